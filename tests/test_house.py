"""The order of the tests: they mirror the product, import no test, share helpers in `support`, and see no privates."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from support.machine.import_graph import ROOT, name_of, parsed

TESTS = Path(__file__).parent
SUPPORT = TESTS / "support"
HOOKS = SUPPORT / "engine" / "core_hooks.py"
MODULES = sorted(TESTS.rglob("*.py"))
# Folders whose tests name no module: behaviour that spans modules, the real model behind a server, pages of docs/.
FREE_FOLDERS = {"scenarios", "real", "docs"}


def imports(path: Path) -> Iterator[str]:
    """Dotted names of the imported modules, with the imported names appended."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: imports in the tests are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_test(path: Path) -> bool:
    return path.name.startswith("test_") or path.name == "conftest.py"


def test_no_module_imports_a_test() -> None:
    tests = {each.stem for each in MODULES if is_test(each)}
    found = [(name_of(path), name) for path in MODULES for name in imports(path) if tests & set(name.split("."))]
    assert not found, "move what is shared to tests/support"


def test_helpers_are_in_support_and_imported_from_there_alone() -> None:
    helpers = {path.stem for path in MODULES if not is_test(path)} - {"__init__"}
    stray = [name_of(path) for path in MODULES if not is_test(path) and not path.is_relative_to(SUPPORT)]
    assert not stray
    tests = [name_of(path) for path in SUPPORT.rglob("*.py") if is_test(path)]
    assert not tests
    bare = [(name_of(path), name) for path in MODULES for name in imports(path) if name.split(".")[0] in helpers]
    assert not bare


def test_names_of_test_modules_are_unique() -> None:
    names = Counter(path.name for path in MODULES if path.name not in ("__init__.py", "conftest.py"))
    assert not [name for name, count in names.items() if count > 1]


def is_beside_its_module(path: Path) -> bool:
    folder, subject = path.parent.relative_to(TESTS), path.stem.removeprefix("test_")
    modules = {module.stem for module in (ROOT / folder).glob("*.py")}
    return any(subject == module or subject.startswith(f"{module}_") for module in modules)


def test_a_test_lies_where_its_module_does() -> None:
    """``tests/<folder>/test_<module>.py`` tests ``<folder>/<module>.py``; a further word may tell what of it."""
    tests = [path for path in MODULES if path.name.startswith("test_") and path.parent != TESTS]
    named = [path for path in tests if path.relative_to(TESTS).parts[0] not in FREE_FOLDERS]
    stray = [name_of(path) for path in named if not is_beside_its_module(path)]
    assert named and not stray, "name these after a module of their folder, or move them to scenarios/ or real/"


def private_attributes(path: Path) -> set[str]:
    """Names of private attributes and methods of the classes in a module."""
    own = {
        node.attr
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }
    return {name for name in own if name.startswith("_") and not name.startswith("__")}


def last_name(node: ast.expr) -> str:
    """The last name of ``a.b.c``, or of the function in ``f(x)``; "" of anything else."""
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_privates_of_the_core_are_read_through_the_hook_alone() -> None:
    """Attributes of the core by any name, unless on ``self``; of what the hook returns, none that is private."""
    core = private_attributes(ROOT / "engine" / "core" / "engine_core.py")
    assert "_scheduler" in core and "_cache" in core
    hooks = {node.name for node in parsed(HOOKS).body if isinstance(node, ast.FunctionDef)}
    found = [
        f"{name_of(path)}:{node.lineno} {node.attr}"
        for path in MODULES
        if path != HOOKS
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if (last_name(node.value).lstrip("_").endswith("core") and node.attr in core) or last_name(node.value) in hooks
    ]
    assert not found, "add a function to support/engine/core_hooks.py"


MOST_PRIVATE_PATCHES = 81
"""A ratchet: patches of private names break at every move. Give what is patched a public name, or a hook."""


def private_patches(path: Path) -> Iterator[str]:
    """Private names that a test replaces through ``monkeypatch``."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call) and last_name(node.func) in ("setattr", "delattr") and len(node.args) > 1:
            # Either an object and a name, or a path of names.
            named = next((each.value for each in node.args[:2] if isinstance(each, ast.Constant)), "")
            name = str(named).rpartition(".")[2]
            if name.startswith("_") and not name.startswith("__"):
                yield f"{name_of(path)}:{node.lineno} {name}"


def test_few_patches_are_of_private_names() -> None:
    found = [patch for path in MODULES for patch in private_patches(path)]
    assert 0 < len(found) <= MOST_PRIVATE_PATCHES, found
