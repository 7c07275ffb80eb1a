"""Engine core: the body of the step loop.

It connects scheduler (integers) and worker (tensors), and handles messages.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ...kernels.device_memory import DeviceMemoryError, on_device
from ...radix.namespace import ENDLESS
from ..batch import Batch, Masks, StepHandle, StepResult
from ..config import EngineConfig
from ..engine_stats import EngineStats
from ..errors import EngineDead, EngineError, RequestError, UnknownModel
from ..messages import (
    Abort,
    Done,
    ExportSession,
    Failed,
    ForgetTokens,
    ImportSession,
    KvBlocks,
    ListAdapters,
    ListPrefixes,
    LoadAdapter,
    Message,
    PrepareGrammar,
    ReadKv,
    Ready,
    ReleaseSession,
    Reply,
    ResetCache,
    SnapshotTaken,
    Submit,
    TakeSnapshot,
    TokenTexts,
    UnloadAdapter,
    failure_of,
)
from ..scheduling.draft_budget import make_draft_budget
from ..scheduling.scheduler import Scheduler
from ..sequence.sequence import Sequence, SequenceSpec
from ..step_timer import StepTimer
from ..types import FinishReason, Pooler, Usage
from .adapter_manager import Adaptation, AdapterManager
from .debug_snapshot import take_snapshot
from .grammar_vocabularies import GrammarVocabularies
from .kept_kv import KeptKv, PrefixTransfer, SessionTransfer
from .step_worker import Launched, StepWorker

if TYPE_CHECKING:
    from ..executor.load_weights import Weights
    from .structured_output import Compilation

logger = logging.getLogger("rootgraft.engine")

_MOST_LOGGED = 300  # Largest number of characters of an error message in the log.
_PAUSE = 0.001  # Seconds between two polls of compiles and loads while the engine is idle.


class EngineCore:
    """Runs all sequences of one model. Only one thread may call it. This thread waits only for the device.

    Args:
        config: all options of the engine.
        worker: runs the model.

    Attributes:
        ready: the engine's limits and a summary, for the client.

    Raises:
        ConfigError: an adapter that the options name cannot be loaded.
    """

    def __init__(self, config: EngineConfig, worker: StepWorker) -> None:
        self._config = config
        self._worker = worker
        self._stats = EngineStats()
        num_lines = config.most_seqs + config.max_drafts
        grammar_sizes = worker.eos_ids, worker.vocab_size, num_lines
        self._grammars = GrammarVocabularies(*grammar_sizes, overlaps=worker.overlaps)
        self._kept = KeptKv(config, worker)
        self._cache = self._kept.new_cache()
        self._scheduler = self._make_scheduler()
        self._open: set[int] = set()  # Ids of the sequences whose end was not returned yet.
        # The modulus makes the seed non-negative, because Random treats -1 and 1 alike.
        self._seeds = random.Random(config.seed % (1 << 64))
        self._outbox: list[Message] = []
        self._ahead: StepHandle | None = None  # The step that was launched while the previous one was in flight.
        self._compiling: dict[int, tuple[Sequence, Compilation]] = {}
        base = worker.base_digest, worker.vocab_size
        self._adapters = AdapterManager(worker.adapters, *base, config) if worker.adapters else None
        self.ready = Ready(
            max_model_len=worker.max_model_len,
            vocab_size=worker.vocab_size,
            num_pages=worker.num_pages,
            page_size=config.block_size,
            summary=worker.summary,
            adapters=self._adapters.load_named(config.named_adapters) if self._adapters else (),
            base_digest=worker.base_digest,
            pooler=worker.pooler,
        )

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        model_path: Path,
        weights: Weights | None = None,
        lost: Callable[[str], None] | None = None,
    ) -> EngineCore:
        """Create the engine core of a model. The model is loaded, unless ``weights`` are given.

        Args:
            lost: see ``load_worker``.

        Raises:
            ModelError, ConfigError: the model cannot be loaded.
        """
        from ..executor.load_worker import load_worker

        config, worker = load_worker(config, model_path, weights, lost)
        try:
            return cls(config, worker)
        except BaseException:
            worker.close()
            raise

    @property
    def has_work(self) -> bool:
        """Whether any sequence is alive, or a message is waiting to be returned by ``step``."""
        alive = self._scheduler.num_running or self._scheduler.num_waiting or self._compiling
        return bool(alive or self._outbox or self._kept.has_work or (self._adapters and self._adapters.has_work))

    @property
    def overlaps(self) -> bool:
        return self._worker.overlaps

    def handle(self, messages: Iterable[Message]) -> None:
        """Handle messages of the client.

        The next step returns the replies. An exception has the same effect as in ``step``.
        """
        with self._starting_anew():
            for message in messages:
                if isinstance(message, Submit):
                    self._open.add(message.id)
                    self._kept.expect(message)
                    self._submit(message)
                elif isinstance(message, Abort):
                    self._abort(message.ids)
                elif isinstance(message, PrepareGrammar):
                    self._grammars.prepare(message)
                elif isinstance(message, TokenTexts):
                    self._grammars.learn(message)
                elif isinstance(message, ForgetTokens):
                    self._grammars.forget(message.vocabulary)
                elif isinstance(message, (LoadAdapter, UnloadAdapter, ListAdapters)):
                    self._manage(message)
                elif isinstance(message, (ReadKv, KvBlocks)):
                    self._kept.take(message)
                elif isinstance(message, ListPrefixes):
                    names = self._adapters.names() if self._adapters else {}
                    pins = self._scheduler.session_pins
                    self._outbox.append(self._kept.list_prefixes(message, self._cache, pins, names))
                elif isinstance(message, ResetCache):
                    self.reset_cache()
                    self._outbox.append(Reply(message.id, None))
                elif isinstance(message, (ReleaseSession, ExportSession, ImportSession)):
                    self._outbox.append(self.sessions.reply(message))
                elif isinstance(message, TakeSnapshot):
                    snapshot = take_snapshot(self._cache, self._scheduler, self._adapters, self.stats())
                    self._outbox.append(SnapshotTaken(message.id, snapshot))

    def step(self) -> list[Message]:
        """Compute a step. Returns the messages for the client.

        If any part of the step raises an exception, all sequences end with an error, which the next step returns, and
        the core starts again with an empty prefix cache. Adapters and compiled grammars are kept.
        """
        with self._starting_anew():
            return self.finish(self.launch())

    def launch(self) -> Launched | None:
        """Plan and launch a step. Returns None if nothing can be computed now. The caller calls ``finish`` next.

        If the last ``finish`` has already launched the step (overlap scheduling), this method only starts to fill its
        token masks. A GPU computes the step while the caller does other work before it calls ``finish``. If the device
        has too little memory for the step, see ``_drop_steps``.
        """
        try:
            return self._launch()
        except DeviceMemoryError as error:
            self._drop_steps(error)
        return None

    def _launch(self) -> Launched | None:
        """Plan and launch a step. Raises DeviceMemoryError."""
        self._poll_compiling()
        self._poll_adapters()
        step_timer = StepTimer()
        step = self._take_ahead() or self._start(self._scheduler.schedule(), step_timer)
        if step is None:
            return None
        masks = self._masks(step.batch)
        step_timer.end("schedule")
        if masks is None:
            on_device(step.draw, None)
        return Launched(step, masks, step_timer)

    def finish(self, launched: Launched | None) -> list[Message]:
        """Launch the next step if it can be planned now (overlap scheduling), then read and commit the launched step.

        Returns the messages for the client.
        """
        if launched is not None:
            try:
                self._finish(launched)
            except DeviceMemoryError as error:
                if launched.masks is not None:
                    # The mask thread uses the matchers until it is done. The next step needs them.
                    launched.masks()
                self._drop_steps(error)
        elif self.has_work and not self._outbox:
            time.sleep(_PAUSE)
        return self._take_outbox()

    def _finish(self, launched: Launched) -> None:
        """Sample and commit a step, and launch the next step ahead. Raises DeviceMemoryError."""
        step, masks, step_timer = launched
        if masks is not None:
            on_device(step.draw, masks)
        step_timer.skip()
        lacking = None
        # If there are such checks, the sampler may reject a sampled token after which the answer would not fit in the
        # token budget, and sample another one. So the next step's input is not known yet.
        if self._worker.overlaps and not (masks is not None and masks().checks):
            try:
                self._ahead = self._start(self._scheduler.schedule_ahead(), step_timer)
            except DeviceMemoryError as error:
                # The error concerns only the step that was launched ahead, not the step in flight.
                lacking = error
        self._commit(step.batch, on_device(step.result), step_timer)
        if lacking is not None:
            raise lacking

    def _drop_steps(self, error: DeviceMemoryError) -> None:
        """Continue after a step for which the device had too little memory: free cached memory and make steps smaller.

        Sequences are only delayed. If steps cannot become smaller, the largest sequence fails.
        """
        self._ahead = None
        failures = self._scheduler.drop_steps()
        self._worker.free_memory()
        self._outbox += failures
        logger.warning(
            "A step ran out of device memory (%s); %s",
            str(error)[:_MOST_LOGGED],
            f"failed requests: {len(failures)}"
            if failures
            else f"steps are limited to {self._scheduler.max_tokens} tokens for a while",
        )

    def close(self) -> list[Message]:
        """End every live sequence with an error. Returns messages to the client."""
        error = EngineDead("The engine is shutting down.")
        self._grammars.close()
        self._outbox += [failure_of(number, error) for number in self._compiling]
        self._compiling.clear()
        self._outbox += self._scheduler.fail(sorted(self._open), error)
        self._scheduler.slow_masks.close()
        if self._adapters:
            self._outbox += [failure_of(submit.id, error) for submit in self._adapters.take_waiting()]
            self._adapters.close()
        self._kept.close()
        self._worker.close()
        return self._take_outbox()

    def reset_cache(self) -> None:
        """Remove all cached KV that no running sequence uses, from the pool and from all tiers."""
        self._kept.clear(self._cache)

    @property
    def sessions(self) -> SessionTransfer:
        """The object that releases, exports and imports sessions. To be used between two steps."""
        has_adapter = self._adapters.has_content if self._adapters else lambda _: False
        return self._kept.sessions(self._cache, self._scheduler.session_pins, has_adapter)

    def prefix_transfer(self) -> PrefixTransfer:
        """Return the object that saves and loads the KV of prompts, for use between two steps. Raises ConfigError."""
        return self._kept.transfer(self._cache)

    def find(self, number: int) -> Sequence | None:
        """Return the waiting or running sequence with this id, None if there is none. The caller must not change it."""
        return self._scheduler.find(number)

    def adaptation_of(self, submit: Submit) -> Adaptation:
        """Return the adapter and the namespaces for a prompt. Raises UnknownModel, RequestError."""
        adaptation = self._adapt(submit)
        if adaptation is None:
            raise UnknownModel(str(submit.adapter))
        if self._adapters:
            self._adapters.settle([Done(submit.id, FinishReason.ABORT, Usage(0, 0, 0))])
        return adaptation

    def stats(self) -> dict[str, float]:
        """Return the gauges and counters of ``Heartbeat`` by name."""
        cache = self._cache
        loading = self._adapters.waiting_tokens if self._adapters else []
        compiling = [sequence.num_tokens for sequence, _ in self._compiling.values()]
        deferred = len(loading) + len(compiling)
        return {
            **self._stats.counters(),
            **self._scheduler.capacity(),
            **self._scheduler.session_pins.stats(),
            **self._grammars.stats(),
            **(self._adapters.stats() if self._adapters else {}),
            **self._kept.stats(),
            "running": self._scheduler.num_running,
            "waiting": self._scheduler.num_waiting + deferred,
            "waiting_deferred": deferred,
            "waiting_deferred_tokens": sum(loading) + sum(compiling),
            "engines": 1,
            "pages": cache.num_pages,
            "pages_free": cache.num_free,
            "pages_available": cache.available(),
            "pages_cached": cache.num_cached,
            "pages_private": cache.num_private,
        }

    def adapters_in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the adapters with running and with waiting sequences, as in ``Heartbeat``."""
        return self._adapters.in_use() if self._adapters else ((), ())

    @property
    def waiting(self) -> tuple[int, ...]:
        """Ids of the sequences that no step computes: those in the queue, and those whose grammar is being compiled."""
        return (*self._compiling, *self._scheduler.waiting)

    def take_observations(self) -> dict[str, list[float]]:
        """Return the observations for histograms since the last call.

        Also publishes KV events that no step has published.
        """
        self._kept.publish()
        return self._stats.take_observations() | self._grammars.take_observations()

    def check(self) -> None:
        """Raise AssertionError if pages, tree and leases, or adapters, slots and pins are inconsistent."""
        self._cache.check()
        if self._drafts:
            self._drafts.check()
        if self._adapters:
            self._adapters.check()

    def _make_scheduler(self) -> Scheduler:
        """Create a scheduler over the prefix cache."""
        config, worker, cache = self._config, self._worker, self._cache
        has_room = worker.states is None or worker.states.num_drafts > 0
        fill = self._grammars.fill
        self._drafts = make_draft_budget(config, cache, self._stats, worker.draft, fill) if has_room else None
        return Scheduler(
            cache,
            max_num_seqs=config.most_seqs,
            max_num_batched_tokens=config.most_tokens,
            stats=self._stats,
            slots=worker.adapters.slots if worker.adapters else None,
            drafts=self._drafts,
            target_itl=config.target_itl.seconds,
            target_ttft=config.target_ttft.seconds,
        )

    @contextmanager
    def _starting_anew(self) -> Iterator[None]:
        """Context manager: if the block raises, drop all state that may be incomplete, and fail all sequences.

        The rows, leases, adapter slots and the prefix tree are dropped. The failed step may not have made all of its
        copies, so a page of the tree may lack its content. The pages can be allocated again even if the device still
        computes a step, because that step writes them before any later step does.
        """
        try:
            yield
        except BaseException as error:
            self._ahead = None
            self._compiling.clear()
            self._scheduler.slow_masks.close()
            self._stats.count_unfinished(FinishReason.ERROR)
            if self._adapters:
                self._adapters.start_anew()
            self._cache = self._kept.new_cache()
            self._scheduler = self._make_scheduler()
            failure = EngineError(f"A step of the engine failed ({type(error).__name__}), and so did all its requests.")
            ended = {message.id for message in self._outbox if isinstance(message, (Done, Failed))}
            self._outbox += [failure_of(number, failure) for number in sorted(self._open - ended)]
            raise

    def _commit(self, batch: Batch, result: StepResult, step_timer: StepTimer) -> None:
        """Commit a result, and record the seconds of its parts.

        The time of launching ahead counts for the step in flight.
        """
        step_timer.skip()
        self._outbox += self._scheduler.commit(batch, result)
        step_timer.end("commit")
        self._stats.add_seconds({**step_timer.seconds, **result.seconds, "step": step_timer.whole()})

    def _start(self, batch: Batch, step_timer: StepTimer) -> StepHandle | None:
        """Launch a step that was just planned. Returns None if the step has no rows."""
        step_timer.end("schedule")
        step = on_device(self._worker.launch, batch) if batch.rows else None
        step_timer.skip()
        return step

    def _take_ahead(self) -> StepHandle | None:
        """Return the step that was launched before the last step ended, unless all its sequences have ended."""
        ahead, self._ahead = self._ahead, None
        return None if ahead is None or self._scheduler.forget(ahead.batch) else ahead

    def _take_outbox(self) -> list[Message]:
        """Return the messages to the client, and unpin the adapters of the sequences that end with them."""
        messages, self._outbox = self._outbox, []
        if self._adapters:
            if ended := self._adapters.settle(messages):
                self._cache.drop_adapters(frozenset(ended))
            messages += self._adapters.take_messages()
        self._grammars.settle(messages)
        # Requests for another replica's KV precede the messages after which that KV is useless: a prompt's first token,
        # or a sequence's end.
        messages = [*self._kept.take_messages(self._cache, self._scheduler.find, self._open.__contains__), *messages]
        ended_ids = [each.id for each in messages if isinstance(each, (Done, Failed))]
        self._open.difference_update(ended_ids)
        self._kept.forget(ended_ids)
        if not self._open:
            self._kept.rest()
        return messages

    def _submit(self, submit: Submit) -> None:
        try:
            adaptation = self._adapt(submit)
            if adaptation is None:
                return
            sequence = _new_sequence(submit, adaptation, self._worker, self._seeds)
            if submit.grammar is None and submit.reasoning is None:
                self._scheduler.add(sequence)
            else:
                compilation = self._grammars.compile(submit, adaptation.vocab_size)
                self._compiling[submit.id] = sequence, compilation
        except EngineError as error:
            self._outbox.append(failure_of(submit.id, error))

    def _adapt(self, submit: Submit) -> Adaptation | None:
        """Return the adaptation of a sequence; None while its adapter is being loaded."""
        if submit.adapter is None:
            return Adaptation.of_base(self._worker.base_digest, submit)
        if self._adapters is None:
            raise UnknownModel(submit.adapter)
        return self._adapters.begin(submit)

    def _manage(self, message: LoadAdapter | UnloadAdapter | ListAdapters) -> None:
        if self._adapters is None:
            error = RequestError("The engine was started without adapters (--enable-lora).")
            self._outbox.append(Reply(message.id, failure_of(message.id, error)))
        elif isinstance(message, LoadAdapter):
            self._adapters.load(message)
        elif isinstance(message, UnloadAdapter):
            self._adapters.unload(message)
        else:
            self._adapters.tell(message)

    def _poll_adapters(self) -> None:
        """Start the sequences whose adapter was loaded, and fail those whose adapter failed."""
        if self._adapters is None:
            return
        for arrival in self._adapters.poll():
            if arrival.error is None:
                self._submit(arrival.submit)
            else:
                self._outbox.append(failure_of(arrival.submit.id, arrival.error))
        for loss in self._adapters.take_lost():
            self._outbox += self._scheduler.fail(loss.ids, loss.error)
            compiling = [number for number in loss.ids if self._compiling.pop(number, None)]
            self._outbox += [failure_of(number, loss.error) for number in compiling]

    def _poll_compiling(self) -> None:
        """Queue the sequences whose grammar is compiled. Other sequences do not wait for these."""
        for number, (sequence, compilation) in tuple(self._compiling.items()):
            outcome = compilation.poll()
            if outcome is None:
                continue
            del self._compiling[number]
            if isinstance(outcome, EngineError):
                self._outbox.append(failure_of(number, outcome))
            else:
                self._scheduler.add(sequence, outcome)

    def _abort(self, ids: tuple[int, ...]) -> None:
        """Abort sequences in any state."""
        self._outbox += self._scheduler.abort(ids)
        for number in ids:
            if entry := self._compiling.pop(number, None):
                self._outbox.append(Done(number, FinishReason.ABORT, entry[0].usage))
        if self._adapters:
            waiting = self._adapters.take_waiting(frozenset(ids))
            usages = ((submit.id, Usage(len(submit.tokens), 0, len(submit.generated))) for submit in waiting)
            self._outbox += [Done(number, FinishReason.ABORT, usage) for number, usage in usages]

    def _masks(self, batch: Batch) -> Callable[[], Masks] | None:
        """Start to fill the token masks of a step on another thread. Returns None if no row needs one."""
        jobs = self._scheduler.mask_jobs(batch)
        return self._grammars.fill(jobs) if jobs else None


def _new_sequence(submit: Submit, adaptation: Adaptation, worker: StepWorker, seeds: random.Random) -> Sequence:
    """Create the sequence of a ``Submit``.

    Args:
        adaptation: the sequence's adapter.
        seeds: generator of seeds, for sequences without a seed.

    Raises:
        RequestError: the sequence already has as many generated tokens as allowed, or no token is allowed, or the model
            has no head for the request.
    """
    _check_kind(submit, worker.pooler, adaptation.num_classes or len(worker.pooler.labels))
    params, room = submit.params, worker.max_model_len - len(submit.tokens)
    if len(submit.generated) >= min(params.max_tokens, room) and submit.generated:
        raise RequestError(
            f"generated must have fewer tokens than max_tokens ({params.max_tokens}) and than the model has room for "
            f"({room}), not {len(submit.generated)}.",
            param="generated",
        )
    ends = frozenset((*worker.eos_ids, *submit.ends))
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else ends)
    if params.min_tokens and params.allowed_token_ids and (stops | ends).issuperset(params.allowed_token_ids):
        raise RequestError(
            "allowed_token_ids allows no token before min_tokens: all its tokens are end or stop tokens.",
            param="allowed_token_ids",
        )
    seed = params.seed if params.seed is not None else seeds.getrandbits(63)
    tokens = submit.tokens + submit.generated
    path, switch = adaptation.rotated(len(tokens), worker.rope_switch)
    spec = SequenceSpec(
        stop_ids=stops,
        seed=seed,
        arrival=time.monotonic(),
        max_model_len=worker.max_model_len,
        adapter=adaptation.adapter,
        adapted_from=adaptation.adapted_from,
        vocabulary=submit.vocabulary,
        vocab_size=adaptation.vocab_size,
        tenant=submit.tenant,
        session=submit.session,
        session_seconds=submit.session_seconds,
        pins=(*submit.prefix_pins, (len(submit.tokens), submit.pin_seconds)),
        pooled_from=params.pooled_from if params.pooling == "embed" and worker.pooler.pools_all else ENDLESS,
        ignored_ids=ends if params.ignore_eos else frozenset(),
    )
    return Sequence(
        id=submit.id,
        tokens=tokens,
        params=params,
        path=path,
        spec=spec,
        rope_switch=switch,
        priority=submit.priority,
        num_prompt=len(submit.tokens),
    )


def _check_kind(submit: Submit, pooler: Pooler, num_classes: int) -> None:
    """Check that the model has the head that a request needs. Raises RequestError.

    Args:
        num_classes: number of classes of the classification head of the model or of the adapter.
    """
    pooling = submit.params.pooling
    if not pooling and not pooler.generates:
        other = "classify" if pooler.labels else "embeddings"
        raise RequestError(f"This model has no language head and generates no text: use /v1/{other}.", param="model")
    if pooling == "classify" and not num_classes:
        raise RequestError(
            "This model has no classification head: load a ...ForSequenceClassification model, or choose between "
            "labels with /v1/decisions.",
            param="model",
        )
    if pooling == "embed" and pooler.refusal:
        raise RequestError(f"Embeddings of this model are not supported: {pooler.refusal}.", param="model")
