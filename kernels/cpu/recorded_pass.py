"""Forward passes recorded once and run again by one call: the CPU's form of a captured graph.

A forward pass is some three hundred native calls on tensors, and for a small batch making the tensors and the calls
takes Python longer than many of the calls themselves. As long as buffers stay the same, so do the calls' arguments, but
for the numbers of tokens and rows: they are kept, and a step writes these numbers and runs them all by one call.

Only native calls can be kept. While a pass is recorded torch's ops are watched, and any one of them, be it a view,
makes the pass one that cannot be kept. The ops' results come from buffers with room for the most tokens of a step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import accumulate
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import native_calls

_NO_MEMORY: Final = 2  # what a C function returns when an allocation fails
_FIELD: Final = 8  # bytes of a field of a structure
_MAKE_BUFFERS: Final = (torch.ops.aten.empty.memory_format, torch.ops.aten.resize_.default)


class RecordedPass:
    """The native calls of a forward pass, and the memory that they work in.

    Args:
        library: where they come from.
        made: the calls, in order.
        buffers: what they write.
    """

    def __init__(self, library: ctypes.CDLL, made: list[native_calls.Call], buffers: native_calls.Buffers) -> None:
        self._run: Any = library.run_tape
        self._run.argtypes, self._run.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
        self._made = made
        self._buffers = buffers
        sizes = [len(call.arguments) // _FIELD for call in made]
        starts = [0, *accumulate(sizes)]
        self._fields = np.frombuffer(b"".join(call.arguments for call in made), np.int64).copy()
        self._tokens = _places(starts, [call.fields.tokens for call in made])
        self._rows = _places(starts, [call.fields.rows for call in made])
        self._calls = (ctypes.c_void_p * (2 * len(made)))()
        following: dict[int, int] = {}  # by function, the structure of its next call
        for i, call in reversed(list(enumerate(made))):
            structure = self._fields.ctypes.data + starts[i] * _FIELD
            self._calls[2 * i] = call.address
            self._calls[2 * i + 1] = structure
            if call.fields.following is not None:
                self._fields[starts[i] + call.fields.following] = following.get(call.address, 0)
                following[call.address] = structure

    def replay(self, tokens: int, rows: int) -> None:
        """Make the calls again, on what the inputs' buffers hold now.

        Args:
            tokens: how many tokens they compute, as many as there is room for in the inputs and results at most.
            rows: of how many rows.

        Raises:
            IndexError: an index in the inputs is out of range.
            MemoryError: a call could not allocate what it needs.
        """
        if not 0 <= tokens <= self._buffers.most_tokens:
            raise IndexError(f"{tokens} tokens; there is room for {self._buffers.most_tokens}")
        self._fields[self._tokens] = tokens
        self._fields[self._rows] = rows
        tell = native_calls.listener()
        failed = self._run(self._calls, len(self._made)) if tell is None else self._replay_timed(tell)
        if failed < 0:
            return
        if failed % 4 == _NO_MEMORY:
            raise MemoryError("a recorded op could not allocate its intermediates")
        raise IndexError(f"an index of recorded op {failed // 4} is out of range")

    def _replay_timed(self, tell: Callable[[str, float], None]) -> int:
        """The same one by one. Returns what ``run_tape`` does."""
        for i, call in enumerate(self._made):
            at = ctypes.byref(self._calls, 2 * i * ctypes.sizeof(ctypes.c_void_p))
            failed = native_calls.run_timed(call.name, lambda at=at: self._run(at, 1), tell)  # type: ignore[misc]
            if failed >= 0:
                return 4 * i + failed
        return -1


def record(
    library: ctypes.CDLL, forward: Callable[[], Tensor], buffers: native_calls.Buffers
) -> tuple[Tensor, RecordedPass | None]:
    """Run a forward pass and keep its calls.

    Returns:
        Its result, whose memory a ``replay`` writes anew; and the tape, or None if something in the pass is no native
        call, or one that is not made for all tokens.
    """
    watch = _Watch()
    with native_calls.recorded(buffers) as recording, watch:
        result = forward()
    kept = not watch.saw_ops and all(call.fields.tokens for call in recording.made)
    return result, RecordedPass(library, recording.made, buffers) if kept else None


def _places(starts: list[int], fields: list[tuple[int, ...]]) -> NDArray[np.int64]:
    """Where fields of the calls' structures lie, all structures side by side."""
    return np.array([start + field for start, each in zip(starts, fields, strict=False) for field in each], np.int64)


class _Watch(TorchDispatchMode):
    """Notices torch ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saw_ops = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch's way of keeping its compiler out of this takes the import of that compiler, a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let an op pass, and remember that there was one, unless it only makes a buffer of the recording."""
        self.saw_ops |= func not in _MAKE_BUFFERS
        return func(*args, **(kwargs or {}))
