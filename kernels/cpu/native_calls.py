"""What native ops are made of: calls with one structure of packed arguments, and memory for results.

Both can be recorded, for ``kernels.cpu.recorded_pass``; and calls can be timed.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from struct import Struct
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .build import BuildError

_UNUSED: Final = 3  # references to a buffer while it is looked at, if only the list of buffers holds it


class Fields(NamedTuple):
    """Where the structure of a function holds what a recording writes: indices of its fields.

    Attributes:
        tokens: those that are the number of tokens.
        rows: those that are the number of rows.
        following: the one that is the address of the structure of the next call of the function, 0 if that is not
            known; a recording knows it.
    """

    tokens: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    following: int | None = None


_NONE: Final = Fields()


class Call(NamedTuple):
    """A call that was made.

    Attributes:
        name: of the function.
        address: of the function.
        arguments: its structure.
        fields: of it.
    """

    name: str
    address: int
    arguments: bytes
    fields: Fields


class Buffers:
    """Memory for the results of recorded calls, which all recordings may share: one of them runs at a time.

    Args:
        most_tokens: there is room for so many, in the first dimension of each result.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._all: list[Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See ``calls.empty``. Memory that nobody refers to any more is used again."""
        tokens, *rest = shape
        if tokens > self.most_tokens:
            raise ValueError(f"a result has {tokens} tokens; there is room for {self.most_tokens}")
        for buffer in self._all:
            if list(buffer.shape[1:]) == rest and buffer.dtype is dtype and sys.getrefcount(buffer) == _UNUSED:
                return buffer.resize_(shape)
        buffer = torch.empty((self.most_tokens, *rest), dtype=dtype).resize_(shape)
        self._all.append(buffer)
        return buffer


class Recording:
    """What was called, and the memory for the results.

    Attributes:
        made: the calls, in order.
        buffers: the memory.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.made: list[Call] = []
        self.buffers = buffers


_recording: Recording | None = None


@contextmanager
def recorded(buffers: Buffers) -> Iterator[Recording]:
    """Keep every native call that is made inside. Only one thread may make calls meanwhile."""
    global _recording
    _recording = Recording(buffers)
    try:
        yield _recording
    finally:
        _recording = None


_told: Callable[[str, float], None] | None = None


@contextmanager
def timed(tell: Callable[[str, float], None]) -> Iterator[None]:
    """Tell the name of every native call that is made inside, those of tapes included, and how many seconds it took."""
    global _told
    _told = tell
    try:
        yield
    finally:
        _told = None


def listener() -> Callable[[str, float], None] | None:
    """Who is to be told how long calls take, if anyone."""
    return _told


def run_timed(name: str, run: Callable[[], int], tell: Callable[[str, float], None]) -> int:
    """Make a call and tell its time."""
    begin = time.perf_counter()
    result = run()
    tell(name, time.perf_counter() - begin)
    return result


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor for the result of an op."""
    return torch.empty(shape, dtype=dtype) if _recording is None else _recording.buffers.empty(shape, dtype)


def bind(library: ctypes.CDLL, name: str, layout: Struct, fields: Fields = _NONE) -> Callable[[bytes], int]:
    """A C function, after a check that its structure has the size of ours.

    Args:
        fields: of its structure. A function without one for tokens cannot be part of a recording.

    Raises:
        BuildError: it has not.
    """
    size = library[f"{name}_size"]
    size.restype = ctypes.c_int64
    if size() != layout.size:
        raise BuildError(f"{name} expects {size()} bytes of arguments, not {layout.size}")
    function: Any = library[name]
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None

    def call(arguments: bytes) -> int:
        if _recording is not None:
            _recording.made.append(Call(name, address, arguments, fields))
        if _told is not None:
            return run_timed(name, lambda: function(arguments), _told)
        return function(arguments)  # type: ignore[no-any-return]

    return call
