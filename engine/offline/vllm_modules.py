"""Modules of vLLM under our package's name: what scripts import from them, or what to do instead.

``from rootgraft.utils.argparse_utils import FlexibleArgumentParser`` finds our class, where no file of that name is
ours. The table is ``vllm_modules.toml``, whose head explains its values.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = __name__.partition(".")[0]

_Row = str | Mapping[str, str]


@cache
def _table() -> Mapping[str, Mapping[str, _Row]]:
    """Return the names of each module, both without the package's name."""
    return tomllib.loads(Path(__file__).with_name("vllm_modules.toml").read_text("utf-8"))


def _is_module(name: str) -> bool:
    """Whether vLLM has a module of this name, or the table says what to do instead of all that is in it."""
    return any(each == name or each.startswith(name + ".") for each in _table()) or _others(name) is not None


def _others(name: str) -> _Row | None:
    """Return what stands for the names of a module that have no row of their own, by the nearest module around it."""
    while name:
        if (row := _table().get(name, {}).get("*")) is not None:
            return row
        name = name.rpartition(".")[0]
    return None


def _resolve(module: str, name: str) -> Any:
    """Return a name of a module of vLLM. Raises ImportError in the table's words."""
    row = _table().get(module, {}).get(name) or _others(module)
    match row:
        case str():
            place, _, found = row.partition(":")
            return getattr(import_module(place, _PACKAGE), found)
        case {"refuse": words}:
            raise ImportError(f"{_PACKAGE} has no {module}.{name}: {words}.", name=f"{_PACKAGE}.{module}")
        case {"inert": _}:
            return _WithoutEffect
    raise AttributeError(f"module '{_PACKAGE}.{module}' has no attribute {name!r}")


class _WithoutEffect:
    """Does nothing where vLLM's function or class is not needed: a call returns None. Scripts name it in types too."""

    def __new__(cls, *_: Any, **__: Any) -> None:  # type: ignore[misc]
        return None


def _reader(module: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``. Names that the import system asks for itself are not vLLM's."""

    def read(name: str) -> Any:
        if name not in _table().get(module, {}) and name.startswith("__"):
            raise AttributeError(f"module '{_PACKAGE}.{module}' has no attribute {name!r}")
        return _resolve(module, name)

    return read


class PeerModuleFinder(MetaPathFinder, Loader):
    """Finds the modules of the table, for names that no file of ours has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of the table, and None for every other name."""
        package, _, name = fullname.partition(".")
        if package != _PACKAGE or not name or not _is_module(name):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Let the module look its names up as they are asked for."""
        module.__doc__ = "Names that scripts of vLLM import from its module of this name."
        module.__dict__["__getattr__"] = _reader(module.__name__.partition(".")[2])


def install() -> None:
    """Find modules of vLLM after all others."""
    if not any(isinstance(each, PeerModuleFinder) for each in sys.meta_path):
        sys.meta_path.append(PeerModuleFinder())
