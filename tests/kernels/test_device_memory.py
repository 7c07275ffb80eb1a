"""Out-of-memory errors of devices are told from bugs, and keep none of a call's tensors alive."""

from __future__ import annotations

import errno
import weakref

import numpy as np
import pytest
import torch

from rootgraft.kernels.device_memory import DeviceMemoryError, is_out_of_memory, on_device


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
        (MemoryError(), True),
        (np.exceptions.AxisError("out of memory"), False),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
    ],
)
def test_which_errors_say_that_a_device_has_no_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_the_error_keeps_no_tensor_of_the_call() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        tensor = torch.zeros(3)
        seen.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out\n of  memory.")

    with pytest.raises(DeviceMemoryError, match="CUDA out of memory") as caught:
        on_device(step)
    assert seen[0]() is None, "the caller could not free it"
    assert caught.value.__context__ is None


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")])
def test_a_host_without_memory_is_a_device_without(error: Exception) -> None:
    def step() -> None:
        raise error

    with pytest.raises(DeviceMemoryError, match=r"MemoryError|Cannot allocate memory"):
        on_device(step)


def test_other_errors_and_results_pass() -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        on_device(fail)
    assert on_device(lambda x, y: x + y, 1, y=2) == 3
