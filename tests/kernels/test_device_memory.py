"""Out-of-memory errors of devices are told from bugs, and keep none of a call's tensors alive."""

from __future__ import annotations

import weakref

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
        (MemoryError(), False),  # of the host, whose system is about to end processes
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


def test_other_errors_and_results_pass() -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        on_device(fail)
    assert on_device(lambda x, y: x + y, 1, y=2) == 3
