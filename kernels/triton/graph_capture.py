"""Capture of forward passes in CUDA graphs: a replay is one launch instead of hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import graph_branch, product_choice


class Capture:
    """Captures forward passes in CUDA graphs on one device. All passes share one memory pool for intermediates.

    So only one pass may run at a time, and a pass must write its results to tensors that were allocated outside of it.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream, self._branch = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def __call__(self, forward: Callable[[], None]) -> Callable[[], None]:
        """Run a pass once, capture it, and return its replay on the current stream.

        The pass is run before the capture because a capture must not compile or load kernels or allocate a library's
        workspace, and because the run measures the fastest methods for products. The pass must not read values back
        from the device, and its launches must not depend on the contents of its inputs.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), product_choice.measuring():
            forward()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile; only calls of this thread must be capturable.
        with (
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            graph_branch.branching(self._branch),
        ):
            forward()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay
