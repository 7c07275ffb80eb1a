"""Names are unique in the product: file names and public classes, but for the few listed."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from support.machine.import_graph import ROOT, parsed

FOLDERS = ("api", "engine", "fleet", "grammar", "kernels", "lora", "programs", "radix", "tenancy")
MOST_SHARED = 12

# One such file per package.
IN_MANY_FOLDERS = {"__init__", "errors", "config"}
# A route and the body of its requests; rope as a module of models and as a kernel; a request of the server, and vLLM's
# module of that of an adapter.
IN_TWO_FOLDERS = {
    "adapters",
    "batches",
    "chat",
    "completions",
    "decisions",
    "pooled",
    "responses",
    "scores",
    "tokenize",
    "rope",
    "request",
}
# Each is known in its own folder only; two are names of vLLM for what offline callers write.
SHARED_CLASSES = {"Fields", "TokenCounts", "Prompt", "SamplingParams"}


def modules() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def repeated(names: Iterable[tuple[str, Path]]) -> dict[str, list[str]]:
    """The names that more than one file has, with these files."""
    files: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in names:
        files[name].append(path.relative_to(ROOT).as_posix())
    return {name: found for name, found in files.items() if len(found) > 1}


def test_file_names_are_unique() -> None:
    assert len(IN_TWO_FOLDERS) <= MOST_SHARED
    found = repeated((path.stem, path) for path in modules() if path.stem not in IN_MANY_FOLDERS)
    assert not {name: files for name, files in found.items() if name not in IN_TWO_FOLDERS}
    assert all(len(files) == 2 for files in found.values())


def test_class_names_are_unique() -> None:
    found = repeated(
        (node.name, path)
        for path in modules()
        for node in parsed(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name: files for name, files in found.items() if name not in SHARED_CLASSES}
