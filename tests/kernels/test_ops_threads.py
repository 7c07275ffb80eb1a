"""The kernels' own pool: any number of callers, of threads and of processes gets the bits of one thread."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from support.machine.waits import HANG_SECONDS

from rootgraft.kernels import ops, quantised_weights

pytestmark = pytest.mark.usefixtures("kernels")


def product(layer: ops.PackedLinear, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return ops.linear(x, layer)


def test_torch_gets_one_thread(kernels):
    ops.set_threads(2)
    assert (kernels.library.num_threads, torch.get_num_threads()) == (2, 1)
    ops.use_native(False)
    ops.set_threads(2)
    assert torch.get_num_threads() == 2
    ops.use_native(True)


def test_callers_at_once():
    """One of them has the pool, the others do without."""
    layer, x = ops.pack_linear(torch.randn(500, 64)), torch.randn(40, 64)
    expected = product(layer, x)
    ops.set_threads(3)
    wrong = []

    def call() -> None:
        wrong.extend(i for i in range(200) if not torch.equal(product(layer, x), expected))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_calls_after_every_length_of_idleness():
    """Workers fall asleep and wake, or are on their way to either."""
    layer, x = ops.pack_linear(torch.randn(500, 64)), torch.randn(40, 64)
    expected = product(layer, x)
    ops.set_threads(4)
    for microseconds in (0, 50, 150, 190, 200, 210, 250, 400, 1000) * 5:
        threading.Event().wait(microseconds / 1e6)
        assert torch.equal(product(layer, x), expected)


@pytest.mark.parametrize("columns", [40, 700])
def test_many_rows_are_cut_among_threads(columns):
    """Rows at both sides of where a thread takes its own rows with all columns; more threads than shares of items."""
    weight, x = torch.randn(columns, 576).bfloat16(), torch.randn(1030, 576).bfloat16()
    layers = [
        ops.pack_linear(weight),
        quantised_weights.pack_channels(weight, dynamic=True),
        quantised_weights.pack_blocks(
            torch.zeros(columns, 576 // 32 * 34, dtype=torch.uint8) + 33, "Q8_0", dynamic=True
        ),
    ]
    for layer in layers:
        expected = product(layer, x)
        for count in (2, 3, 70):
            ops.set_threads(count)
            for rows in (255, 256, 257, 383, 384, 511, 512, 767, 768, 1030):
                assert torch.equal(product(layer, x[:rows]), expected[:rows])
        ops.set_threads(1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own():
    """Whatever the workers were at: more of them than cores are mostly on their way into a call or out of it."""
    layer, x = ops.pack_linear(torch.randn(500, 64)), torch.randn(40, 64)
    ops.set_threads(16)
    expected = product(layer, x)
    for _ in range(20):
        assert torch.equal(product(layer, x), expected)
        child = os.fork()
        if child == 0:
            signal.alarm(int(HANG_SECONDS))  # ends one that waits for workers of its parent
            os._exit(0 if torch.equal(product(layer, x), expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
