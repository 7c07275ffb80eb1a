"""Workers of tensor-parallel ranks: that of rank 0, which leads, and those that follow."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from ...kernels.collectives import Ranks
from ..batch import Batch, Masks, PageCopy, StepResult
from ..config import EngineConfig
from ..models.pipeline_stage import PipelineStage
from .adapter_messages import unpack_adapter
from .followers import Followers
from .model_runner import RunnerStep
from .pool_pages import PoolPages
from .rank_pages import PageServer, RankPages
from .worker import Worker


class LeadWorker(Worker):
    """The worker of rank 0: each of its steps is computed by all ranks. Raises as ``Worker``."""

    def __init__(self, config: EngineConfig, model_path: Path, followers: Followers) -> None:
        self._followers = followers
        super().__init__(config, model_path, ranks=followers.group, mirror=followers)
        assert isinstance(self.kv_pages, PoolPages)
        self.kv_pages = followers.pages = RankPages(self.kv_pages, followers)

    def compute(self, batch: Batch, masks: Callable[[], Masks] | None = None) -> StepResult:
        """Compute a step by all ranks; raises as ``Followers.together``."""
        return self._followers.together(lambda: self._runner.run(batch, masks))

    def close(self) -> None:
        """End the other ranks, between two steps."""
        self._followers.close()


class FollowWorker(Worker):
    """The worker of a follower: it computes its part of the steps that rank 0 sends. Raises as ``Worker``."""

    def __init__(self, config: EngineConfig, model_path: Path, ranks: Ranks) -> None:
        super().__init__(config, model_path, ranks=ranks)
        self._step: RunnerStep | None = None

    def follow_step(self, batch: Batch) -> None:
        """Compute this shard's part of a step."""
        self.kv_pages.reach(batch)
        self._step = self._runner.launch(batch)

    def serve_pages(self, link: socket.socket) -> PageServer:
        """Answer rank 0, which reads this rank's parts of pages, on a thread."""
        assert isinstance(self.kv_pages, PoolPages)
        return PageServer(link, self.kv_pages)

    def follow_load(self, batch: Batch) -> None:
        """Fill this rank's parts of pages and slots, between two steps."""
        self.kv_pages.load([each for each in batch.copies if not isinstance(each, PageCopy)])

    def follow_head(self, tokens: Sequence[int], *, best: bool) -> None:
        """Compute this shard's part of logits of the last step, or of the largest of each."""
        assert self._step is not None
        if isinstance(self.model, PipelineStage) and not self.model.has_head:
            return
        self._runner.follow_head(self._step, tokens, best=best)

    def follow_install(self, content: bytes) -> None:
        """Put a shard of an adapter in its slot."""
        assert self.adapters is not None
        self.adapters.bank.install(*unpack_adapter(content, pinned=self.model.device.type == "cuda"))

    def follow_clear(self, slot: int) -> None:
        """Empty a slot."""
        assert self.adapters is not None
        self.adapters.bank.clear(slot)
