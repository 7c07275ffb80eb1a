"""Imports point down: between the top-level folders, and between the floors inside ``engine/``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What each top-level package may import of ours. api sees only some modules of the engine: see FLOORS_FOR_API.
LAYERS = {
    "kernels": (),
    "radix": (),
    "grammar": (),
    "lora": ("kernels",),
    "engine": ("kernels", "radix", "grammar", "lora"),
    "api": ("engine", "grammar"),
    "programs": ("engine", "grammar"),
}

# The floor of each engine module; a folder's floor is that of all its modules without an entry of their own.
FLOORS = {
    0: "errors types snapshot messages config speculative batch garbage",
    1: "stats laps pages pace chunks ngrams gguf source channel step_times models.config models.families",
    2: "cache sequence fairness queue admission endings retention plan answers drafts drafting masks scheduler",
    3: "device inputs kv_pool kv_ahead models loading",
    4: "choice logprobs verify penalties sampler rooms tapes graphs runner memory",
    5: "core grammars adapters observer worker loop step_meter",
    6: "tokenizer_files tokenizer_gguf token_bytes token_bounds chat_template tokenizer detokenizer stop_strings"
    " prompt_encoder requests generation calls client frontend outputs",
    7: "llm",  # Drives a core of its own, in the same process.
}
FLOOR = {f"engine.{name}": floor for floor, names in FLOORS.items() for name in names.split()}
TORCH_FREE = (0, 1, 2, 6, 7)
FLOORS_FOR_FACES = (0, 1, 6)
FLOORS_FOR_API = (0, 1, 6)
FILES = sorted(path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, at_start: bool) -> Iterator[str]:
    """Names of the modules that a file imports, anywhere in it or only ``at_start`` (outside of functions)."""
    todo: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = origin(path, node)
            inner = [f"{module}.{alias.name}".removeprefix(".") for alias in node.names]
            yield from (name if is_module(name) else module for name in inner)
        if not (at_start and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            todo.extend(ast.iter_child_nodes(node))


def origin(path: Path, node: ast.ImportFrom) -> str:
    """The name of the module that an import names, counted from the repository's root."""
    if node.level == 0:
        assert not str(node.module).startswith("rootgraft"), f"{path}: imports of ours are relative"
        return str(node.module)
    package = path.relative_to(ROOT).parent.parts
    kept = package[: len(package) - node.level + 1]
    return ".".join([*kept, *filter(None, [node.module])])


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def floor(module: str) -> int | None:
    """The floor of an engine module by its longest entry; None for the package itself."""
    name = module
    while name and name != "engine":
        if name in FLOOR:
            return FLOOR[name]
        name = name.rpartition(".")[0]
    assert module == "engine", f"{module} has no floor: give it one in FLOORS"
    return None


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_layer_imports_only_layers_below(path: Path) -> None:
    layer = module_name(path).split(".")[0]
    ours = {name.split(".")[0] for name in imports(path, at_start=False)} & LAYERS.keys()
    assert ours <= {layer, *LAYERS[layer]}


@pytest.mark.parametrize("path", [path for path in FILES if module_name(path).startswith("engine.")], ids=module_name)
def test_an_engine_module_imports_only_floors_below(path: Path) -> None:
    own = floor(module_name(path))
    for name in imports(path, at_start=True):
        if name.split(".")[0] == "engine" and (other := floor(name)) is not None:
            assert other in FLOORS_FOR_FACES if own == 6 else other <= own, f"floor {own} imports {name}"
        assert own not in TORCH_FREE or name.split(".")[0] not in ("torch", "kernels"), f"floor {own} imports {name}"


@pytest.mark.parametrize("path", [path for path in FILES if module_name(path).startswith("api")], ids=module_name)
def test_the_api_sees_messages_and_never_tensors(path: Path) -> None:
    for name in imports(path, at_start=False):
        assert name.split(".")[0] != "torch"
        if name.split(".")[0] == "engine" and (other := floor(name)) is not None:
            assert other in FLOORS_FOR_API, f"{name} is none of the api's business"
