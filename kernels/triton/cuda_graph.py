"""Forward passes captured in CUDA graphs: replayed, the host launches one thing where it launched hundreds."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Capture:
    """Captures passes on one device. What they need for results in between is one memory for all of them.

    So only one of them may run at a time, and what a pass leaves must be in tensors that were made outside of it.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, forward: Callable[[], None]) -> Callable[[], None]:
        """Run a pass once, capture it, and return what runs it again on the current stream.

        It is run before, since a capture must not compile or load kernels, nor make a library's workspace. It may read
        nothing back, and must not depend on what its inputs hold.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            forward()
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: only what this one does must be fit to be captured.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            forward()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph.replay
