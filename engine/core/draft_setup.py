"""Drafts of an engine: its sources and, if it has a draft model, that model's sequences."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ..batch import Masks
from ..config import EngineConfig
from ..engine_stats import EngineStats
from ..kv_cache.prefix_cache import PrefixCache
from ..scheduling.draft_budget import DraftBudget
from ..sequence.mask_jobs import MaskJob
from ..speculation.model_drafter import ModelDrafter
from ..speculation.proposer import Proposer
from .step_worker import StepWorker


def make_drafts(
    config: EngineConfig,
    worker: StepWorker,
    cache: PrefixCache,
    stats: EngineStats,
    fill_masks: Callable[[Seq[MaskJob]], Callable[[], Masks]],
) -> DraftBudget | None:
    """Return what gives drafts to rows; None without drafts, or if a rejected one would remain in a recurrent state.

    Args:
        fill_masks: begins to fill the masks of a draft model's step, see ``ModelDrafter``.
    """
    if not config.max_drafts or worker.states is not None:
        return None
    drafter = None
    if worker.draft is not None:
        sharing, num_rows = config.enable_prefix_caching, config.max_num_seqs
        drafter = ModelDrafter(worker.draft, config.block_size, fill_masks, sharing=sharing, num_rows=num_rows)
    return DraftBudget(Proposer(config.speculative, cache, stats), cache, config.max_drafts, drafter)
