"""Public functions and classes have docstrings, but for functions of a line or two whose names say it all."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.machine.import_graph import ROOT, parsed

FOLDERS = ("api", "engine", "fleet", "grammar", "kernels", "lora", "programs", "radix", "tenancy")
FEW_LINES = 2


def public_functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = parsed(path)
    for parent in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        if isinstance(parent, ast.ClassDef) and parent.name.startswith("_"):
            continue
        for node in parent.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
                yield node


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or 0) - node.body[0].lineno + 1


def is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in node.decorator_list)


@pytest.mark.parametrize("folder", FOLDERS)
def test_functions_of_more_than_two_lines_have_docstrings(folder: str) -> None:
    bare = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in public_functions(path)
        if num_lines(node) > FEW_LINES and not ast.get_docstring(node) and not is_overload(node)
    ]
    assert not bare
