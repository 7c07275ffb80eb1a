"""Out-of-memory errors of a device: recognizing them, and raising them without keeping a call's tensors alive."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

# Messages of torch's allocators, CUDA's runtime, cuBLAS and Python's threads. Their errors are plain RuntimeErrors.
_TEXTS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory", "can't start new thread")


class DeviceMemoryError(Exception):
    """There was not enough memory for a call on the device. The device itself works, and other calls may succeed."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that a device has no memory: torch's own, CUDA's, cuBLAS's or Triton's.

    The device may be the host. There Python and ``mmap`` report allocations that ``ulimit -v`` or strict overcommitting
    refuse. If the limit of a control group is reached, however, the system ends the process without an error.
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
            call's tensors are freed before the caller empties torch's cache.
    """
    try:
        return call(*args, **kwargs)
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        text = " ".join(str(error).split()) or type(error).__name__
    raise DeviceMemoryError(text)
