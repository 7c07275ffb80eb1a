"""Modules of vLLM under this package's name: provide the names that scripts import, or raise an error with advice.

``from rootgraft.utils.argparse_utils import FlexibleArgumentParser`` finds this package's class, although no file has
that name. The table is ``vllm_modules.toml``; the comment at its beginning explains its values.
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
    """Return the names of each module, by module; both without the package's name."""
    return tomllib.loads(Path(__file__).with_name("vllm_modules.toml").read_text("utf-8"))


def _is_module(name: str) -> bool:
    """Return whether the table has a module of this name, or an entry for all names in a package around it."""
    return any(each == name or each.startswith(name + ".") for each in _table()) or _others(name) is not None


def _others(name: str) -> _Row | None:
    """Return the entry for names that have none of their own: ``*`` of the module or of the nearest package."""
    while name:
        if (row := _table().get(name, {}).get("*")) is not None:
            return row
        name = name.rpartition(".")[0]
    return None


def _resolve(module: str, name: str) -> Any:
    """Return the object that replaces a name of a vLLM module. Raises ImportError with the table's text."""
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
    """A function or class that does nothing and returns None.

    It replaces one of vLLM's; scripts also use it in annotations.
    """

    def __new__(cls, *_: Any, **__: Any) -> None:  # type: ignore[misc]
        return None


def _reader(module: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__``. Dunder names, which only the import system reads, raise AttributeError."""

    def read(name: str) -> Any:
        if name not in _table().get(module, {}) and name.startswith("__"):
            raise AttributeError(f"module '{_PACKAGE}.{module}' has no attribute {name!r}")
        return _resolve(module, name)

    return read


class PeerModuleFinder(MetaPathFinder, Loader):
    """Import finder for the modules of the table. It handles names for which this package has no file."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the import spec of a module in the table; None for every other name."""
        package, _, name = fullname.partition(".")
        if package != _PACKAGE or not name or not _is_module(name):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        """Give the module a ``__getattr__`` that looks up a name when it is used."""
        module.__doc__ = "Names that scripts of vLLM import from its module of this name."
        module.__dict__["__getattr__"] = _reader(module.__name__.partition(".")[2])


def install() -> None:
    """Install the finder of vLLM's modules behind all other finders."""
    if not any(isinstance(each, PeerModuleFinder) for each in sys.meta_path):
        sys.meta_path.append(PeerModuleFinder())
