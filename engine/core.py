"""The engine's step: where the control plane (ints) and the device (tensors) meet, and nowhere else."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from engine.batch import Batch, StepResult
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.errors import RequestError, UnknownModel
from engine.messages import Abort, Failed, Message, Ready, Submit
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import EngineStats
from radix.namespace import Namespace
from radix.namespace import Path as PrefixPath


class StepWorker(Protocol):
    """What the core needs of the device's side: the worker, or a fake in tests."""

    num_pages: int
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    summary: tuple[str, ...]

    def run(self, batch: Batch) -> StepResult:
        """Compute a step."""


class EngineCore:
    """The sequences on one model. One thread calls it; it waits for nothing but the device.

    Args:
        config: all options.
        worker: the device's side.

    Attributes:
        ready: facts for the client.
    """

    def __init__(self, config: EngineConfig, worker: StepWorker) -> None:
        self._worker = worker
        self._stats = EngineStats()
        self._cache = PrefixCache(worker.num_pages, config.block_size, sharing=config.enable_prefix_caching)
        self._scheduler = Scheduler(
            self._cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=worker.max_model_len,
            stats=self._stats,
        )
        self._seeds = random.Random(config.seed)
        self._outbox: list[Message] = []
        self.ready = Ready(worker.max_model_len, worker.vocab_size, worker.num_pages, config.block_size, worker.summary)

    @classmethod
    def load(cls, config: EngineConfig, model_path: Path) -> EngineCore:
        """Load a model and set the engine up on it. Raises ModelError and ConfigError."""
        from engine.worker import Worker  # imports torch, which a test with a fake worker does not need

        return cls(config, Worker(config, model_path))

    @property
    def has_work(self) -> bool:
        """Whether a sequence is alive or a message waits to be taken by ``step``."""
        return bool(self._scheduler.num_running or self._scheduler.num_waiting or self._outbox)

    def handle(self, messages: Iterable[Message]) -> None:
        """Take messages from the client; answers to them leave with the next step."""
        for message in messages:
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Abort):
                self._outbox += self._scheduler.abort(message.ids)

    def step(self) -> list[Message]:
        """Plan, compute and commit one step. Returns all that the client is to be told."""
        batch = self._scheduler.schedule()
        if batch.rows:
            self._outbox += self._scheduler.commit(batch, self._worker.run(batch))
        messages, self._outbox = self._outbox, []
        return messages

    def close(self) -> list[Message]:
        """Fail every sequence that is still alive. Returns what the client is to be told."""
        return self._outbox + self._scheduler.fail_all("EngineDead", "The engine is shutting down.")

    def stats(self) -> dict[str, float]:
        """Gauges and counters by name, as ``Heartbeat`` carries them."""
        cache = self._cache
        return {
            **self._stats.counters(),
            "running": self._scheduler.num_running,
            "waiting": self._scheduler.num_waiting,
            "pages": cache.num_pages,
            "pages_free": cache.num_free,
            "pages_available": cache.available(),
            "pages_cached": cache.num_cached,
            "pages_private": cache.num_private,
        }

    def take_observations(self) -> dict[str, list[float]]:
        """Histogram observations since the last call."""
        return self._stats.take_observations()

    def check(self) -> None:
        """Raise AssertionError if pages, tree and leases contradict each other."""
        self._cache.check()

    def _submit(self, submit: Submit) -> None:
        try:
            self._scheduler.add(self._sequence(submit))
        except RequestError as error:
            self._outbox.append(Failed(submit.id, type(error).__name__, str(error), param=error.param, code=error.code))

    def _sequence(self, submit: Submit) -> Sequence:
        if submit.adapter is not None:
            raise UnknownModel(submit.adapter)
        params = submit.params
        ends = () if params.ignore_eos else self._worker.eos_ids
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(63)
        return Sequence(
            id=submit.id,
            tokens=submit.tokens[:],
            params=params,
            path=PrefixPath(Namespace(base="base", adapter=None, salt=submit.salt)),
            stop_ids=frozenset((*ends, *params.stop_token_ids)),
            seed=seed,
            arrival=time.monotonic(),
        )
