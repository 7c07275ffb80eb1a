"""CPU graphs: a forward pass recorded as a list of native calls, replayed by one call of the library.

A forward pass has about three hundred native calls. For a small batch, creating their tensors and arguments takes
Python longer than many of the calls take. While buffers keep their addresses, the arguments differ between steps only
in the numbers of tokens and rows. So a replay writes these two numbers to the recorded structures and runs all calls.

Only native calls can be recorded. A dispatch mode detects torch ops during the recording: any torch op, even a view,
makes the pass unrecordable. Results are in buffers with room for the largest step.
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

from .native_library import Buffers, Listener, NativeLibrary, Recording, run_timed

_NO_MEMORY: Final = 2  # return code of a C function whose allocation failed
_FIELD: Final = 8  # Bytes of a structure's field.
_MAKE_BUFFERS: Final = (torch.ops.aten.empty.memory_format, torch.ops.aten.resize_.default)


class RecordedPass:
    """The native calls of a forward pass with their argument structures.

    Args:
        library: provides the called functions.
        recording: the calls in order, and the buffers of their results.
    """

    def __init__(self, library: NativeLibrary, recording: Recording) -> None:
        self._run: Any = library.handle.run_tape
        self._run.argtypes, self._run.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
        self._library = library
        self._recording = recording
        calls = recording.calls
        starts = [0, *accumulate(len(call.arguments) // _FIELD for call in calls)]
        self._fields = np.frombuffer(b"".join(call.arguments for call in calls), np.int64).copy()
        self._tokens = _indices(starts, [call.fields.tokens for call in calls])
        self._rows = _indices(starts, [call.fields.rows for call in calls])
        self._calls = (ctypes.c_void_p * (2 * len(calls)))()
        following: dict[int, int] = {}  # By function: the structure of its next call.
        for i, call in reversed(list(enumerate(calls))):
            structure = self._fields.ctypes.data + starts[i] * _FIELD
            self._calls[2 * i] = call.address
            self._calls[2 * i + 1] = structure
            if call.fields.following is not None:
                self._fields[starts[i] + call.fields.following] = following.get(call.address, 0)
                following[call.address] = structure

    def replay(self, tokens: int, rows: int) -> None:
        """Run the calls again on the current contents of the input buffers.

        Args:
            tokens: number of tokens of this step, within the capacity of the input and result buffers.
            rows: number of rows of this step.

        Raises:
            IndexError: too many tokens, or an index in the inputs is out of range.
            MemoryError: a call could not allocate its intermediates.
        """
        most_tokens = self._recording.buffers.most_tokens
        if not 0 <= tokens <= most_tokens:
            raise IndexError(f"{tokens} tokens; there is room for {most_tokens}")
        self._fields[self._tokens] = tokens
        self._fields[self._rows] = rows
        listener = self._library.listener
        failed = self._run(self._calls, len(self._calls) // 2) if listener is None else self._replay_timed(listener)
        if failed < 0:
            return
        if failed % 4 == _NO_MEMORY:
            raise MemoryError("a recorded op could not allocate its intermediates")
        raise IndexError(f"an index of recorded op {failed // 4} is out of range")

    def _replay_timed(self, listener: Listener) -> int:
        """Run and time the calls one by one; returns the code of ``run_tape``: 4 * call + error, or -1."""
        for i, call in enumerate(self._recording.calls):
            at = ctypes.byref(self._calls, 2 * i * ctypes.sizeof(ctypes.c_void_p))
            failed = run_timed(call.name, lambda at=at: self._run(at, 1), listener)  # type: ignore[misc]
            if failed >= 0:
                return 4 * i + failed
        return -1


def record(
    library: NativeLibrary, forward: Callable[[], Tensor], buffers: Buffers
) -> tuple[Tensor, RecordedPass | None]:
    """Run a forward pass and record its native calls.

    Returns:
        Its result, whose memory each ``replay`` overwrites; and the recorded pass, or None if the pass contains a torch
        op or a native call without a number of tokens.
    """
    watch = _TorchOpWatch()
    with library.recorded(buffers) as recording, watch:
        result = forward()
    recordable = not watch.saw_ops and all(call.fields.tokens for call in recording.calls)
    return result, RecordedPass(library, recording) if recordable else None


def _indices(starts: list[int], fields: list[tuple[int, ...]]) -> NDArray[np.int64]:
    """Return the indices of the given fields of each call's structure, in all structures concatenated."""
    return np.array([start + field for start, each in zip(starts, fields, strict=False) for field in each], np.int64)


class _TorchOpWatch(TorchDispatchMode):
    """Dispatch mode that detects torch ops other than the allocation of result buffers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.saw_ops = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would otherwise import its compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.saw_ops |= func not in _MAKE_BUFFERS
        return func(*args, **(kwargs or {}))
