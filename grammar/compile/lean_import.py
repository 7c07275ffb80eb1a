"""Import of XGrammar without torch and transformers, which it imports and a compile worker does not use.

The two take two seconds of processor time and 200 MB in each worker that compiles a first EBNF grammar. A worker has a
low priority, so on a busy machine the request waited for many times as long.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

UNUSED = ("torch", "transformers")


class _StandIn(ModuleType):
    """Stand-in for a module: every public name is a class, which may be called, inherited from and used as a type."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": _ignore})


def _ignore(*_: Any, **__: Any) -> None:
    """Take any arguments, as the constructors of a stand-in's classes."""


def import_xgrammar() -> None:
    """Import XGrammar without torch and transformers, unless one of the two is imported already.

    Only for a process that imports neither of them elsewhere. A version of XGrammar that needs them for its import is
    imported with them.

    Raises:
        ImportError: XGrammar cannot be imported.
    """
    if any(name in sys.modules for name in ("xgrammar", *UNUSED)):
        import_module("xgrammar")
        return
    try:
        # The library below XGrammar takes torch where it is installed, and asks it what no stand-in can answer.
        with _instead({"torch": None}):
            import_module("tvm_ffi")
        with _instead({name: _StandIn(name) for name in UNUSED}):
            import_module("xgrammar")
    except Exception:
        for name in [each for each in sys.modules if each.partition(".")[0] == "xgrammar"]:
            del sys.modules[name]
        import_module("xgrammar")


@contextmanager
def _instead(modules: dict[str, ModuleType | None]) -> Iterator[None]:
    """Let imports within the block find these modules; None for one that is not there."""
    for name, module in modules.items():
        sys.modules[name] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
