"""The imports of a module, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]


def imports(path: Path, *, at_start: bool) -> Iterator[Path | str]:
    """The modules of ours that a file imports, as paths, and the names of others'.

    Either anywhere in the file, or only ``at_start``: outside of functions. Imports for types count.
    """
    todo: list[ast.AST] = [parsed(path)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert not str(node.module).startswith("rootgraft"), f"{path}: imports of ours are relative"
            yield str(node.module)
        elif isinstance(node, ast.ImportFrom):
            origin = path.parents[node.level - 1].joinpath(*str(node.module or "").split("."))
            for alias in node.names:
                yield _module(origin / alias.name) or _module(origin) or origin
        if not (at_start and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            todo.extend(ast.iter_child_nodes(node))


def imported_modules(path: Path, *, at_start: bool = False) -> Iterator[Path]:
    """The modules of ours that a file imports."""
    for name in imports(path, at_start=at_start):
        if isinstance(name, Path):
            assert name.is_file(), f"{path} imports {name}, which is no module"
            yield name


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _module(path: Path) -> Path | None:
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
