"""The engine's step: where the control plane (ints) and the device (tensors) meet, and nowhere else."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from engine.batch import Batch, Masks, StepResult
from engine.cache import PrefixCache
from engine.config import EngineConfig
from engine.errors import EngineError, RequestError, UnknownModel
from engine.messages import Abort, Done, Failed, Message, Ready, Submit, TokenTexts
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import EngineStats
from engine.types import FinishReason
from radix.namespace import Namespace
from radix.namespace import Path as PrefixPath

if TYPE_CHECKING:
    from engine.grammars import Compilation, Grammars

_COMPILE_PAUSE = 0.001  # seconds between two looks at compiles when there is nothing else to do


class StepWorker(Protocol):
    """What the core needs of the device's side: the worker, or a fake in tests."""

    num_pages: int
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    summary: tuple[str, ...]

    def run(self, batch: Batch, masks: Callable[[], Masks] | None = None) -> StepResult:
        """Compute a step; ``masks`` is called when the logits are there."""


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
        self._max_num_seqs = config.max_num_seqs
        self._grammars: Grammars | None = None
        self._compiling: dict[int, tuple[Sequence, Compilation]] = {}
        self.ready = Ready(worker.max_model_len, worker.vocab_size, worker.num_pages, config.block_size, worker.summary)

    @classmethod
    def load(cls, config: EngineConfig, model_path: Path) -> EngineCore:
        """Load a model and set the engine up on it. Raises ModelError and ConfigError."""
        from engine.worker import Worker  # imports torch, which a test with a fake worker does not need

        return cls(config, Worker(config, model_path))

    @property
    def has_work(self) -> bool:
        """Whether a sequence is alive or a message waits to be taken by ``step``."""
        return bool(self._scheduler.num_running or self._scheduler.num_waiting or self._outbox or self._compiling)

    def handle(self, messages: Iterable[Message]) -> None:
        """Take messages from the client; answers to them leave with the next step."""
        for message in messages:
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Abort):
                self._outbox += self._scheduler.abort(message.ids)
                self._abort_compiling(message.ids)
            elif isinstance(message, TokenTexts):
                self._learn(message)

    def step(self) -> list[Message]:
        """Plan, compute and commit one step. Returns all that the client is to be told."""
        self._poll_compiling()
        batch = self._scheduler.schedule()
        if batch.rows:
            self._outbox += self._scheduler.commit(batch, self._worker.run(batch, self._masks(batch)))
        elif self._compiling:
            time.sleep(_COMPILE_PAUSE)
        messages, self._outbox = self._outbox, []
        return messages

    def close(self) -> list[Message]:
        """Fail every sequence that is still alive. Returns what the client is to be told."""
        if self._grammars:
            self._grammars.close()
        for sequence, _ in self._compiling.values():
            self._outbox.append(Failed(sequence.id, "EngineDead", "The engine is shutting down."))
        return self._outbox + self._scheduler.fail_all("EngineDead", "The engine is shutting down.")

    def stats(self) -> dict[str, float]:
        """Gauges and counters by name, as ``Heartbeat`` carries them."""
        cache = self._cache
        return {
            **self._stats.counters(),
            **(self._grammars.stats() if self._grammars else {}),
            "running": self._scheduler.num_running,
            "waiting": self._scheduler.num_waiting + len(self._compiling),
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
            sequence = self._sequence(submit)
            if submit.grammar is None:
                self._scheduler.add(sequence)
            elif self._grammars is None:
                raise RequestError("This model has no end token, so its answers cannot follow a grammar.")
            else:
                self._compiling[submit.id] = sequence, self._grammars.compile(*submit.grammar)
        except EngineError as error:
            self._outbox.append(_failed(submit.id, error))

    def _learn(self, texts: TokenTexts) -> None:
        """Get ready for grammars, unless the model has no token to end an answer with."""
        if not self._worker.eos_ids:
            return
        from engine.grammars import Grammars  # imports llguidance, which an engine without grammars can do without

        self._grammars = Grammars(texts, self._worker.eos_ids, self._worker.vocab_size, self._max_num_seqs)

    def _poll_compiling(self) -> None:
        """Queue the sequences whose grammar is there. Each waits alone: nobody else is behind it."""
        for number, (sequence, compilation) in tuple(self._compiling.items()):
            outcome = compilation.poll()
            if outcome is None:
                continue
            del self._compiling[number]
            if isinstance(outcome, EngineError):
                self._outbox.append(_failed(number, outcome))
            else:
                sequence.matcher = outcome
                self._scheduler.add(sequence)

    def _abort_compiling(self, ids: Iterable[int]) -> None:
        for number in ids:
            if entry := self._compiling.pop(number, None):
                self._outbox.append(Done(number, FinishReason.ABORT, entry[0].usage))

    def _masks(self, batch: Batch) -> Callable[[], Masks] | None:
        """Begin to fill the masks of a step on another thread; None if no row needs one."""
        jobs = self._scheduler.mask_jobs(batch)
        return self._grammars.fill(jobs) if jobs and self._grammars else None

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


def _failed(number: int, error: EngineError) -> Failed:
    """A refusal as the client is told of it."""
    param, code = (error.param, error.code) if isinstance(error, RequestError) else (None, None)
    return Failed(number, type(error).__name__, str(error), param=param, code=code)
