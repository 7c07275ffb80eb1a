"""Forward passes recorded once and run again by one call: the CPU's form of a captured graph.

A forward pass is some three hundred native calls on tensors, and for a small batch making the tensors and the calls
takes Python longer than many of the calls themselves. As long as shapes and buffers stay the same, so do the calls'
arguments: they are kept, and a step is one call that runs them all.

Only native calls can be kept. While a pass is recorded torch's ops are watched, and any one of them, be it a view,
makes the pass one that cannot be kept. The ops' results come from buffers that stay alive with the tape.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.cpu import calls

_NO_MEMORY: Final = 2  # what a C function returns when an allocation fails


class Tape:
    """The native calls of a forward pass, and the memory that they work in.

    Args:
        library: where they come from.
        made: the calls, in order.
        buffers: what they read and write, beside weights and inputs.
    """

    def __init__(self, library: ctypes.CDLL, made: list[calls.Call], buffers: list[Tensor]) -> None:
        self._run: Any = library.run_tape
        self._run.argtypes, self._run.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
        self._made = made
        self._buffers = buffers
        self._calls = (ctypes.c_void_p * (2 * len(made)))()
        for i, call in enumerate(made):
            self._calls[2 * i] = call.address
            self._calls[2 * i + 1] = ctypes.cast(ctypes.c_char_p(call.arguments), ctypes.c_void_p).value

    def replay(self) -> None:
        """Make the calls again, on what the inputs' buffers hold now.

        Raises:
            IndexError: an index in the inputs is out of range.
            MemoryError: a call could not allocate what it needs.
        """
        tell = calls.listener()
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
            failed = calls.run_timed(call.name, lambda at=at: self._run(at, 1), tell)  # type: ignore[misc]
            if failed >= 0:
                return 4 * i + failed
        return -1


def record(library: ctypes.CDLL, forward: Callable[[], Tensor]) -> tuple[Tensor, Tape | None]:
    """Run a forward pass and keep its calls.

    Returns:
        Its result, which a ``replay`` writes anew; and the tape, or None if something in the pass is no native call.
    """
    watch = _Watch()
    with calls.recorded() as recording, watch:
        result = forward()
    return result, None if watch.saw_ops else Tape(library, recording.made, recording.buffers)


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
        self.saw_ops |= func is not torch.ops.aten.empty.memory_format
        return func(*args, **(kwargs or {}))
