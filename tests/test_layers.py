"""Imports point down: between the top-level folders, and between the floors that their subfolders are.

A folder is a floor. The tables below are of folders, ground floor first; a module may import its own folder and those
on floors below it. Folders on one floor do not know each other.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from support.machine.import_graph import ROOT, imported_modules, imports, name_of

# What each top-level package may import of ours. fleet, api and programs see only some folders of the engine: FACES.
LAYERS = {
    "tenancy": (),
    "kernels": (),
    "radix": (),
    "grammar": ("tenancy",),
    "lora": ("kernels", "tenancy"),
    "engine": ("kernels", "radix", "grammar", "lora", "tenancy"),
    "fleet": ("engine",),
    "api": ("fleet", "engine", "grammar", "tenancy"),
    "programs": ("engine", "grammar"),
}

FLOORS = {
    "kernels": (("kernels/layouts",), ("kernels/cpu", "kernels/triton"), ("kernels",)),
    "grammar": (
        ("grammar",),
        ("grammar/regex",),
        ("grammar/schema",),
        ("grammar/emit",),
        ("grammar/match",),
        ("grammar/compile",),
    ),
    "engine": (
        ("engine",),
        ("engine/checkpoint/families", "engine/messages"),
        ("engine/checkpoint", "engine/kv_cache", "engine/machine", "engine/sandbox"),
        ("engine/sequence", "engine/text", "engine/adapter_sources"),
        ("engine/speculation", "engine/serving"),
        ("engine/scheduling", "engine/sampling", "engine/models"),
        ("engine/models/transformers",),
        ("engine/loading",),
        ("engine/executor",),
        ("engine/core",),
        ("engine/profiling", "engine/offline", "engine/model_tools"),
    ),
}
FLOORS["fleet"] = (("fleet/placement", "fleet/scaling"), ("fleet",), ("fleet/catalog", "fleet/on_ray"))
FLOORS["api"] = (
    ("api",),
    ("api/protocol", "api/storage"),
    ("api/access",),
    ("api/structured", "api/batches"),
    ("api/observe",),
    ("api/generate",),
    ("api/responses", "api/anthropic", "api/ollama", "api/tgi", "api/rpc", "api/gateways", "api/sockets"),
    ("api/routes",),
    ("api/http",),
    ("api/cli/machine",),
    ("api/cli",),
    ("api/cli/chat",),
)
NEED_TORCH = tuple(
    f"engine/{name}"
    for name in ("sampling", "models", "models/transformers", "loading", "executor", "core", "profiling", "model_tools")
)
FACES = (
    *(
        "engine",
        "engine/messages",
        "engine/checkpoint",
        "engine/kv_cache",
        "engine/machine",
        "engine/sandbox",
        "engine/adapter_sources",
        "engine/text",
        "engine/serving",
    ),
    *("engine/profiling", "engine/offline", "engine/model_tools"),
)


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def floor(folder: str) -> int:
    floors = FLOORS[folder.split("/")[0]]
    found = [number for number, folders in enumerate(floors) if folder in folders]
    assert len(found) == 1, f"{folder} has no floor: give it one in FLOORS"
    return found[0]


def folder_of(path: Path) -> str:
    return path.parent.relative_to(ROOT).as_posix()


def layer_of(path: Path) -> str:
    return folder_of(path).split("/")[0]


def test_a_layer_imports_only_layers_below() -> None:
    found = [
        f"{name_of(path)} imports {name_of(name)}"
        for path in sources(*LAYERS)
        for name in imported_modules(path)
        if layer_of(name) not in (layer_of(path), *LAYERS[layer_of(path)])
    ]
    assert not found


def test_a_module_imports_its_own_folder_and_floors_below() -> None:
    found = [
        f"{name_of(path)} imports {name_of(name)}"
        for path in sources(*FLOORS)
        for name in imported_modules(path)
        if layer_of(name) == layer_of(path) and folder_of(name) != folder_of(path)
        if floor(folder_of(name)) >= floor(folder_of(path))
    ]
    assert not found


def test_the_control_plane_needs_no_torch() -> None:
    found = [
        f"{name_of(path)} imports {name if isinstance(name, str) else name_of(name)}"
        for path in sources("engine")
        if folder_of(path) not in NEED_TORCH
        for name in imports(path, at_start=True)
        if (name == "torch" if isinstance(name, str) else layer_of(name) == "kernels")
    ]
    assert not found


def test_the_api_sees_messages_and_never_tensors() -> None:
    """Of the engine it imports only the folders of FACES."""
    found = [
        f"{name_of(path)} imports {name if isinstance(name, str) else name_of(name)}"
        for path in sources("fleet", "api", "programs")
        for name in imports(path, at_start=False)
        if (name == "torch" if isinstance(name, str) else layer_of(name) == "engine" and folder_of(name) not in FACES)
    ]
    assert not found


def test_no_cycle_among_modules() -> None:
    graph = {path: set(imported_modules(path)) - {path} for path in sources(*LAYERS)}
    while ground := {path for path, below in graph.items() if not below & graph.keys()}:
        graph = {path: below for path, below in graph.items() if path not in ground}
    while top := graph.keys() - set().union(*graph.values()):
        graph = {path: below for path, below in graph.items() if path not in top}
    assert not graph, f"cycles among {sorted(map(name_of, graph))}"


def test_what_is_installed_is_one_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"rootgraft": "rootgraft.api.cli.main:main"}
    assert not (ROOT / "rootgraft").exists(), "it would hide the installed package where the checkout is on the path"
