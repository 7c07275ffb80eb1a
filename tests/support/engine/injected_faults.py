"""Exceptions raised at chosen points of a step: a function of the engine raises once, before or after its work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rootgraft.engine.core.adapter_manager import AdapterManager
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.core.structured_output import StructuredOutputManager
from rootgraft.engine.kv_cache.prefix_cache import PrefixCache
from rootgraft.engine.scheduling.draft_budget import DraftBudget
from rootgraft.engine.scheduling.scheduler import Scheduler
from rootgraft.engine.scheduling.session_pins import SessionPins
from rootgraft.engine.scheduling.slow_masks import SlowMasks
from rootgraft.engine.scheduling.step_plan import StepPlan
from rootgraft.engine.scheduling.waiting_queue import WaitingQueue
from rootgraft.engine.speculation.proposer import Proposer
from rootgraft.lora.adapter_pool import AdapterPool
from rootgraft.lora.device_slots import SlotPool
from rootgraft.radix.tree import RadixTree
from support.engine.fake_worker import FakeStep, FakeWorker

# Everything that a step does: plan, launch, masks, draw, read, commit, messages; the parts of each that change state.
POINTS: tuple[tuple[type[Any], str], ...] = (
    (EngineCore, "launch"),
    (EngineCore, "_poll_compiling"),
    (EngineCore, "_masks"),
    (EngineCore, "_take_ahead"),
    (EngineCore, "_take_outbox"),
    (EngineCore, "_submit"),
    (EngineCore, "_abort"),
    (Scheduler, "schedule"),
    (Scheduler, "schedule_ahead"),
    (Scheduler, "_admit"),
    (Scheduler, "_start"),
    (Scheduler, "_extend"),
    (Scheduler, "_preempt"),
    (Scheduler, "mask_jobs"),
    (Scheduler, "commit"),
    (Scheduler, "_commit_row"),
    (Scheduler, "_append"),
    (Scheduler, "_finish"),
    (Scheduler, "_leave"),
    (Scheduler, "_learn"),
    (StepPlan, "give"),
    (StepPlan, "begin"),
    (WaitingQueue, "push"),
    (WaitingQueue, "admit"),
    (WaitingQueue, "requeue"),
    (WaitingQueue, "remove"),
    (DraftBudget, "add"),
    (Proposer, "propose"),
    (SessionPins, "add"),
    (SlowMasks, "begin"),
    (PrefixCache, "acquire"),
    (PrefixCache, "grow"),
    (PrefixCache, "shrink"),
    (PrefixCache, "commit"),
    (PrefixCache, "release"),
    (PrefixCache, "_allocate"),
    (RadixTree, "lock"),
    (RadixTree, "unlock"),
    (RadixTree, "extend"),
    (RadixTree, "evict"),
    (RadixTree, "_split"),
    (RadixTree, "_merge"),
    (StructuredOutputManager, "fill"),
    (AdapterManager, "begin"),
    (AdapterManager, "poll"),
    (AdapterManager, "settle"),
    (AdapterPool, "poll"),
    (AdapterPool, "_finish_load"),
    (AdapterPool, "_install"),
    (SlotPool, "acquire"),
    (SlotPool, "release"),
    (FakeWorker, "launch"),
    (FakeStep, "draw"),
    (FakeStep, "result"),
)


class Fault:
    """An exception at a point of the engine.

    Attributes:
        was_raised: whether it has been raised: it is once.
    """

    def __init__(self, point: tuple[type[Any], str], calls: int, error: BaseException, *, late: bool) -> None:
        self.point, self.error = point, error
        self.was_raised = False
        self._calls = calls  # that work before it
        self._late = late  # after the work

    @contextmanager
    def injected(self) -> Iterator[Fault]:
        """Within the block the point raises at its call number ``calls``."""
        owner, name = self.point
        inner = getattr(owner, name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            if self.was_raised:
                return inner(*args, **kwargs)
            self._calls -= 1
            if self._calls >= 0:
                return inner(*args, **kwargs)
            self.was_raised = True
            if self._late:
                inner(*args, **kwargs)
            raise self.error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, faulty)
            yield self
