"""What makes the host wait for a device is found before a capture would fail there; on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.kernels.meta_gpu import GPU, gpu_tensor

from rootgraft.kernels.pass_graphs import host_wait

X = gpu_tensor(4, 8)
NUMBERS = gpu_tensor(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "op"),
    [
        (lambda: NUMBERS[0].item(), "item"),
        (lambda: NUMBERS.tolist(), "to"),
        (lambda: X.cpu(), "to"),
        (lambda: X[X[:, 0] > 0], "index"),
        (lambda: X.nonzero(), "nonzero"),
        (lambda: X.masked_select(X > 0), "masked_select"),
        (lambda: NUMBERS.unique(), "_unique2"),
        (lambda: X.repeat_interleave(NUMBERS, dim=0), "repeat_interleave"),
        (lambda: X.copy_(torch.zeros(4, 8)), "copy_"),
        (lambda: torch.zeros(4, 8).to(GPU), "to"),
        (lambda: torch.tensor([1.0, 2.0], device=GPU), "tensor"),
        (lambda: torch.as_tensor([1.0, 2.0], device="meta"), "as_tensor"),
        (lambda: X.new_tensor([1.0, 2.0]), "new_tensor"),
        (lambda: X.index_select(0, torch.zeros(2, dtype=torch.int64)), "index_select"),
    ],
)
def test_what_the_host_waits_for(call: Callable[[], object], op: str) -> None:
    assert host_wait(call) == op


def test_what_it_does_not_wait_for() -> None:
    """Indices and numbers of the device, numbers of the host, results of known shape; and what is on the host alone."""

    def forward() -> None:
        y = torch.where(X > 0, X, 1.0).masked_fill_(X < 0, 2.0)
        y[NUMBERS] = X[NUMBERS] * torch.tensor(2.0)
        torch.arange(4, device=GPU) + NUMBERS.clamp(min=0)
        X.to(torch.float32).softmax(-1).topk(2)
        X.repeat_interleave(2, dim=0)
        NUMBERS.repeat_interleave(NUMBERS, output_size=4)
        assert torch.tensor([1, 2]).nonzero().tolist() == [[0], [1]]

    assert host_wait(forward) is None
