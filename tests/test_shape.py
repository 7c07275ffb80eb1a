"""The shape of modules and classes: what a module imports of ours, and the fields that a class owns.

Two ratchets: an entry of the lists of today's offenders may go or become smaller; none may grow or be added.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from support.machine.import_graph import ROOT, imported_modules, name_of, parsed

FOLDERS = ("api", "engine", "fleet", "grammar", "kernels", "lora", "programs", "radix", "tenancy")
MOST_IMPORTS = 20
MOST_FIELDS = 15

# Modules that import more than MOST_IMPORTS modules of ours.
WIDE_MODULES = {}
# Classes that own more than MOST_FIELDS fields.
WIDE_CLASSES = {}


def modules() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def owned_fields(node: ast.ClassDef) -> set[str]:
    """Names of the fields that a class declares or assigns."""
    declared = {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and _is_name(each.target)}
    assigned = {
        each.attr
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        for each in ast.walk(method)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and _is_name(each.value, "self")
    }
    return declared | assigned


def _is_name(node: ast.expr, name: str | None = None) -> bool:
    return isinstance(node, ast.Name) and name in (None, node.id)


def owning_classes() -> Iterator[tuple[str, ast.ClassDef]]:
    """The classes that own state, by name: without frozen records, and requests, whose shape is a protocol's."""
    protocols = (ROOT / "api" / "protocol", ROOT / "engine" / "offline" / "sampling_params.py")
    for path in modules():
        if any(path.is_relative_to(protocol) for protocol in protocols):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not any("frozen=True" in ast.unparse(d) for d in node.decorator_list):
                yield f"{name_of(path)} {node.name}", node


def check_ratchet(counts: dict[str, int], most: int, offenders: dict[str, int]) -> None:
    """Compare counts with a bound, and with the list of those that exceed it today."""
    assert counts, "nothing was counted"
    too_many = {name: count for name, count in counts.items() if count > offenders.get(name, most)}
    assert not too_many, f"at most {most}"
    mended = [name for name in offenders if counts.get(name, 0) <= most]
    assert not mended, "these keep the bound now: remove them from the list"


def test_a_module_imports_few_others() -> None:
    counts = {name_of(path): len(set(imported_modules(path)) - {path}) for path in modules()}
    check_ratchet(counts, MOST_IMPORTS, WIDE_MODULES)


def test_a_class_owns_few_fields() -> None:
    check_ratchet({name: len(owned_fields(node)) for name, node in owning_classes()}, MOST_FIELDS, WIDE_CLASSES)
