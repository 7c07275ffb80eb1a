"""Out-of-memory errors of a device: which they are, and how they leave a call without keeping its tensors alive."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Messages of torch's allocators, CUDA's runtime, cuBLAS and Python's threads, whose errors are plain RuntimeErrors.
_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "can't start new thread")


class DeviceMemoryError(Exception):
    """A call on the device found no memory. The device itself works, and other calls may succeed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that a device has no memory: torch's own, CUDA's, cuBLAS's or Triton's.

    The device may be the host. Python and ``mmap`` tell there what ``ulimit -v`` or strict overcommitting refuse,
    before anything is taken; where a control group's limit is reached, the system ends the process without a word.
    """
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def on_device(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a call and return its result.

    Raises:
        DeviceMemoryError: raised in place of an out-of-memory error. It refers to no frame of the call, so that the
            tensors there are freed before the caller empties torch's cache.
    """
    try:
        return call(*args, **kwargs)
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
    raise DeviceMemoryError(text)
