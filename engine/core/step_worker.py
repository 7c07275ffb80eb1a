"""Step worker: what the engine core asks of a device, and a launched step on its way through the core."""

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
    """The device's side of the core: ``executor.worker.Worker``, or a fake in tests.

    Attributes:
        overlaps: whether the device computes while the host continues, so that it pays to launch a step before the last
            one is read.
        states: slots of recurrent states; None for a model without recurrent states.
        rope_switch: length in tokens beyond which a sequence's KV is computed differently; ``ENDLESS`` if it never is.
        draft: the draft model; None without a draft model.
        pooler: values other than tokens that the model gives.
        kv_pages: access to the pages of the KV pool, to store them elsewhere; None if that is not supported.
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
        """Start the forward pass of a step.

        Steps are launched, drawn and read in the same order, and each step is drawn before the next is launched. A step
        whose rows have all ended is neither drawn nor read; the same is true of a step that found no memory.
        """

    def free_memory(self) -> None:
        """Give memory of the device back that is only cached."""

    def close(self) -> None:
        """End what computes beside this process."""


class Launched(NamedTuple):
    """A launched step on its way to ``EngineCore.finish``.

    Attributes:
        masks: waits for the token masks of its rows and returns them; None for a step without masks, whose tokens are
            being drawn already.
        step_timer: seconds on the host of each part of the step.
    """

    step: StepHandle
    masks: Callable[[], Masks] | None
    step_timer: StepTimer
