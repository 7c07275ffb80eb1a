"""The loaded kernel library: C functions bound to Python, thread count, recording and timing of native calls."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .arena import ReusedMemory, WeightArena
from .build import BuildError

_UNUSED: Final = 3  # Number of references to a buffer during the check, if only the list of buffers holds it.

_LARGE: Final = 4 << 20  # Bytes of a result from which its memory is kept for the next result.

Listener = Callable[[str, float], None]
"""Called with the name of a native call and its duration in seconds."""


class Fields(NamedTuple):
    """Indices of the fields that a recording rewrites in a function's argument structure.

    Attributes:
        tokens: fields that hold the number of tokens.
        rows: fields that hold the number of rows.
        following: field for the address of the structure of the function's next call, 0 if unknown. Only a recording
            fills it.
    """

    tokens: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    following: int | None = None


_NO_FIELDS: Final = Fields()


class Call(NamedTuple):
    """A recorded call: the function's name and address, its packed argument structure, and the fields to rewrite."""

    name: str
    address: int
    arguments: bytes
    fields: Fields


class Buffers:
    """Result buffers of recorded calls. All recordings may share them, since one of them runs at a time.

    Args:
        most_tokens: capacity of each buffer in its first dimension.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._all: list[Tensor] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor in a buffer that nothing else references, or in a new one.

        Raises:
            ValueError: there are more tokens than ``most_tokens``.
        """
        tokens, *rest = shape
        if tokens > self.most_tokens:
            raise ValueError(f"a result has {tokens} tokens; there is room for {self.most_tokens}")
        for buffer in self._all:
            if list(buffer.shape[1:]) == rest and buffer.dtype is dtype and sys.getrefcount(buffer) == _UNUSED:
                return buffer.resize_(shape)
        buffer = torch.empty((self.most_tokens, *rest), dtype=dtype).resize_(shape)
        self._all.append(buffer)
        return buffer


@dataclass(frozen=True, slots=True)
class Recording:
    """The calls made so far, in order, and the buffers of their results."""

    buffers: Buffers
    calls: list[Call] = field(default_factory=list)


class _OfThread(threading.local):
    """State of one thread. Several engines of a process may compute at the same time, each on its own thread."""

    recording: Recording | None = None


class NativeLibrary:
    """A compiled library with the state that its ops share.

    Args:
        handle: the library, as ``build.load_library`` returns it.

    Attributes:
        handle: the loaded library.
        instruction_set: the library's target, for messages.
        arena: memory of packed weights.
        num_threads: threads of an op, the calling thread included. The thread pool is the library's own; torch's
            thread count does not apply to it.
        listener: gets the time of each call, None if absent.
    """

    def __init__(self, handle: ctypes.CDLL) -> None:
        self.handle = handle
        handle.instruction_set.restype = ctypes.c_char_p
        self.instruction_set: str = handle.instruction_set().decode()
        self.arena = WeightArena()
        self._reused = ReusedMemory()
        self.num_threads = torch.get_num_threads()
        self.listener: Listener | None = None
        self._of_thread = _OfThread()

    @property
    def multiplies_bf16(self) -> bool:
        """Whether the CPU has instructions for products of bfloat16. Others widen bfloat16 to fp32 in registers."""
        return "BF16" in self.instruction_set

    @property
    def keeps_bf16(self) -> bool:
        """Whether bfloat16 is faster than fp32: its products are native, or widening it is faster than reading fp32."""
        return self.multiplies_bf16 or "AVX" in self.instruction_set

    def bind(self, name: str, layout: Struct, fields: Fields = _NO_FIELDS) -> Callable[[bytes], int]:
        """Return a C function as a Python function of its packed arguments.

        Args:
            fields: fields of the structure. A function without token fields cannot be part of a recording.

        Raises:
            BuildError: the C structure has another size than ``layout``.
        """
        size = self.handle[f"{name}_size"]
        size.restype = ctypes.c_int64
        if size() != layout.size:
            raise BuildError(f"{name} expects {size()} bytes of arguments, not {layout.size}")
        function: Any = self.handle[name]
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        of_thread = self._of_thread

        def call(arguments: bytes) -> int:
            if (recording := of_thread.recording) is not None:
                recording.calls.append(Call(name, address, arguments, fields))
            if self.listener is not None:
                return run_timed(name, lambda: function(arguments), self.listener)
            return function(arguments)  # type: ignore[no-any-return]

        return call

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised CPU tensor for the result of an op; during a recording, from its buffers."""
        if (recording := self._of_thread.recording) is None:
            large = math.prod(shape) * dtype.itemsize > _LARGE
            return self._reused.empty(shape, dtype) if large else torch.empty(shape, dtype=dtype)
        return recording.buffers.empty(shape, dtype)

    @contextmanager
    def recorded(self, buffers: Buffers) -> Iterator[Recording]:
        """Record every native call that this thread makes in the block."""
        self._of_thread.recording = recording = Recording(buffers)
        try:
            yield recording
        finally:
            self._of_thread.recording = None

    @contextmanager
    def timed(self, listener: Listener) -> Iterator[None]:
        """Report the time of every native call made in the block, including replayed ones."""
        self.listener = listener
        try:
            yield
        finally:
            self.listener = None


def run_timed(name: str, run: Callable[[], int], listener: Listener) -> int:
    """Run a call, report its seconds under ``name``, and return its result."""
    begin = time.perf_counter()
    result = run()
    listener(name, time.perf_counter() - begin)
    return result
