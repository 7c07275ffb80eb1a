"""Step worker: interface of the device operations that the engine core uses, and the record of a launched step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ..batch import Batch, Masks, StepHandle
from ..kv_cache.make_tiers import KvPages
from ..kv_cache.state_cache import StateSlots
from ..speculation.model_drafter import DraftRunner
from ..step_timer import StepTimer
from ..types import Pooler

if TYPE_CHECKING:
    from ...lora.adapter_pool import AdapterPool


class StepWorker(Protocol):
    """Interface of the worker, which runs the model on the device: ``executor.worker.Worker``, or a fake in tests.

    Attributes:
        overlaps: whether the device computes while the host continues, so that launching a step before the previous one
            is read saves time.
        states: slots of recurrent states; None for a model without recurrent states.
        rope_switch: length in tokens beyond which a sequence's KV is computed differently; ``ENDLESS`` if it never is.
        draft: the draft model; None without one.
        pooler: the pooled values, such as embeddings, that the model offers.
        kv_pages: access to the pages of the KV pool, for storing KV outside of it; None if that is not supported.
        base_digest: digest of the base model, see ``engine.checkpoint.base_digest``.
    """

    num_pages: int
    max_model_len: int
    states: StateSlots | None
    rope_switch: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    summary: tuple[str, ...]
    adapters: AdapterPool | None
    overlaps: bool
    base_digest: str
    pooler: Pooler

    @property
    def draft(self) -> DraftRunner | None: ...

    @property
    def kv_pages(self) -> KvPages | None: ...

    def launch(self, batch: Batch) -> StepHandle:
        """Launch the forward pass of a step.

        Steps are launched, sampled and read in the same order, and each step is sampled before the next one is
        launched. A step whose rows have all ended is neither sampled nor read. The same holds for a step for which
        there was too little memory.
        """

    def free_memory(self) -> None:
        """Free device memory that is only cached."""

    def close(self) -> None:
        """End the threads and processes that compute for this worker."""


class Launched(NamedTuple):
    """A launched step, which ``EngineCore.finish`` completes.

    Attributes:
        masks: waits for the token masks of the step's rows and returns them; None for a step without masks, whose
            tokens are already being sampled.
        step_timer: measures the seconds of each part of the step on the host.
    """

    step: StepHandle
    masks: Callable[[], Masks] | None
    step_timer: StepTimer
