"""Triton's interpreter, faster, with the same numbers.

Most of its time is Python around small arrays. Installed once in a process, this keeps what was computed again each
time:

* Each launch, and each call of a device function, looked through all of Triton's language for what to replace. Here
  that is found once in a process, and a launch replaces it once.
* Each sum and product of integers was computed again in 64 bits and compared with the limits of its type, for an
  assertion that nobody reads unless the interpreter is to debug.
* Each tensor, also one that only stands between two operations, made the type of its block with its name and its shape
  twice, as constants that have types of their own. A launch has a few such types, which are kept.
* Each operation made the table of numpy's types anew.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def hasten() -> None:
    """Make the interpreter of this process faster, and leave all else as it is."""
    interpreter._patch_lang = _patching_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    tl.core._unwrap_if_constexpr = _plain_first(tl.core._unwrap_if_constexpr)
    tl.core.block_type.__init__ = _kept_blocks(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = _kept_shapes(tl.core.tensor.__init__)
    options = interpreter.interpreter_builder.options
    assert not options.debug, "whether sums overflow would be used"
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _patching_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """For the function that lets Triton's language compute: of one launch, only the first call for a module does.

    What it looks through the language for is found once for all launches; each of them only sets it and takes it back.
    """
    replaced: list[Any] = []  # modules that compute while a launch runs

    @functools.cache
    def changes(language: Any) -> tuple[tuple[Any, str, Any, Any], ...]:
        """Attributes that let a module compute: their owner and name, with their values before and after."""
        scope = original(SimpleNamespace(__globals__={"tl": language}))
        made = tuple((owner, name, was, getattr(owner, name)) for owner, name, was in scope._changes)
        scope.restore()
        return made

    @functools.cache
    def languages(function: Any) -> tuple[Any, ...]:
        return tuple({each for each in function.__globals__.values() if each is tl or each is tl.core})

    def restore() -> None:
        while replaced:
            for owner, name, was, _ in reversed(changes(replaced.pop())):
                if was is interpreter._MISSING:
                    if name in vars(owner):  # else the other module's change, of the same class, is taken back already
                        delattr(owner, name)
                else:
                    setattr(owner, name, was)

    def patch_lang(function: Any) -> Any:
        is_launch = not replaced
        if is_launch:  # both are looked through while neither computes: they share classes
            changes(tl), changes(tl.core)
        for language in languages(function):
            if language not in replaced:
                replaced.append(language)
                for owner, name, _, becomes in changes(language):
                    setattr(owner, name, becomes)
        return SimpleNamespace(restore=restore if is_launch else lambda: None)

    return patch_lang


def _by_name(original: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """For the numpy type of a type of Triton: types of one name are equal, and some of them have no hash."""
    known: dict[str, np.dtype[Any]] = {}

    @functools.wraps(original)
    def numpy_type(of: Any) -> np.dtype[Any]:
        found = known.get(of.name)
        if found is None:
            found = known[of.name] = original(of)
        return found

    return numpy_type


def _plain_first(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """For the value of a constant: most of what is asked about is no constant, and no list that may hold one."""
    plain = frozenset((int, float, bool, str, type(None), tl.tensor, tl.dtype))

    @functools.wraps(original)
    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is tl.constexpr else original(value)

    return unwrapped


def _kept_blocks(original: Callable[..., None]) -> Callable[..., None]:
    """For the making of a block's type: what follows from its elements' type and its shape is kept."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    @functools.wraps(original)
    def make(self: Any, element_ty: Any, shape: Any) -> None:
        sides = tuple([side.value if type(side) is tl.constexpr else side for side in shape])
        found = known.get((element_ty.name, sides))
        # A tuple of Python's, and 8.0, which equals 8, are refused.
        if found and isinstance(shape, list | tl.tuple) and all(type(side) is int for side in sides):
            vars(self).update(found, element_ty=element_ty)
        else:
            original(self, element_ty, shape)
            known[element_ty.name, sides] = dict(vars(self))

    return make


def _kept_shapes(original: Callable[..., None]) -> Callable[..., None]:
    """For the making of a tensor: its shape and its size, which are constants, are kept by shape."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    @functools.wraps(original)
    def make(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if found := known.get(key):
            vars(self).update(found, handle=handle, type=type, dtype=type.scalar)
        else:
            original(self, handle, type)
            known[key] = {name: vars(self)[name] for name in ("numel", "shape")}

    return make
