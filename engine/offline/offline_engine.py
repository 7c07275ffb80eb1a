"""Offline engine: the engine of an ``LLM`` in this process, with its requests, steps, adapters and shutdown."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ..adapter_sources.adapter_fetcher import AdapterFetcher
from ..adapter_sources.named_sources import fetch_named, is_adapter, named_source
from ..config import EngineConfig
from ..core.engine_core import EngineCore
from ..errors import EngineDead, EngineError, RequestError
from ..messages import Abort, AdapterChanged, ForgetTokens, LoadAdapter, Reply, Submit, TokenTexts, UnloadAdapter
from ..serving.adapter_tokenizers import AdapterTokenizers, ServedTokenizer
from ..serving.output_processor import TextDelta, error_of
from ..serving.request import TextRequest
from ..serving.sequence_table import SequenceTable
from ..text.tokenizer import Tokenizer
from ..types import Pooler, SamplingParams
from .engine_thread import EngineThread
from .prompt_adapters import PromptAdapters
from .prompt_texts import AdapterTexts
from .request_inputs import Input
from .request_output import OutputBuilder
from .running_request import DeltaCallbacks, GenerateCall, ProgressBar, RunningRequest
from .saved_session import SavedSession, pack_head, read_head

T = TypeVar("T")

_NO_SEQUENCE = -1  # No sequence has this id.


class OfflineEngine:
    """An engine in this process, which runs steps only when it is called. Not thread-safe.

    Args:
        config: options of the engine.
        path: path of the model.
        tokenizer: tokenizer of the model.

    Attributes:
        adapters: finds and loads the adapters of prompts.
        pooler: the model's pooler, which converts hidden states to embeddings, scores or classes.
        max_model_len: largest number of tokens of prompt and answer together.
        on_observations: called on the engine's thread after each step, with the values for the histograms.

    Raises:
        ModelError: the model is not supported exactly.
        ConfigError: options are out of bounds or contradict each other.
    """

    def __init__(self, config: EngineConfig, path: Path, tokenizer: Tokenizer) -> None:
        self._fetcher = AdapterFetcher.of(config)
        self._lora_dir = config.lora_dir
        try:
            self._core = EngineCore.load(fetch_named(config, self._fetcher)[0], path)
        except BaseException:
            self._fetcher.close()
            raise
        ready = self._core.ready
        self._adapters = {info.name: info for info in ready.adapters}
        self.pooler = ready.pooler
        self.max_model_len = ready.max_model_len
        self.on_observations: Callable[[Mapping[str, Sequence[float]]], None] = lambda observations: None
        tokenizers = AdapterTokenizers(ServedTokenizer(tokenizer, ready.vocab_size), config)
        self._texts = AdapterTexts(
            tokenizers, self._adapters, lambda name: self.load_adapter(name, name), ready.max_model_len
        )
        self.adapters = PromptAdapters(
            self._texts, self._adapters, lambda name, path, replace: self.load_adapter(name, path, replace=replace)
        )
        self._sequences = SequenceTable(CoreLink(self._core))
        self._callbacks = DeltaCallbacks()
        self._call_ids = itertools.count(1)
        self._replies: dict[int, Reply | None] = {}  # Replies by the id of their call; None until the reply arrives.
        self._thread = EngineThread()
        self._closed = False

    def digest_of(self, adapter: str | None) -> str:
        """Return the digest of a loaded adapter, or for None of the base model's weights; "" if it is not known."""
        if adapter is None:
            return self._core.ready.base_digest
        return info.digest if (info := self._adapters.get(adapter)) else ""

    def pooler_of(self, adapter: str | None) -> Pooler:
        """Return the pooled values that the model offers, or an adapter with a classification head of its own.

        An adapter of the folder of adapters is loaded first. Raises RequestError if it cannot be.
        """
        if adapter is None:
            return self.pooler
        if adapter not in self._adapters and self._lora_dir is not None and is_adapter(Path(self._lora_dir), adapter):
            self.load_adapter(adapter, adapter)
        info = self._adapters.get(adapter)
        return self.pooler.with_head(0 if info is None else info.num_classes)

    def begin(
        self,
        given: Input,
        request: TextRequest,
        builder: OutputBuilder,
        on_delta: Callable[[TextDelta], None] | None = None,
        generated: array[int] | None = None,
    ) -> RunningRequest:
        """Begin a checked request in addition to the running ones. ``step`` advances all of them.

        Args:
            generated: known tokens of the answer, after which the request continues; None if absent.
        """
        running = RunningRequest(request, builder, on_delta, self._callbacks)
        served = given.adapter.model.served
        try:
            self.on_thread(partial(self._sequences.start, [request], running, served, generated))
        except BaseException:
            # The caller has no reference to the request yet, so only this function can abort it.
            self.on_thread(partial(self._sequences.stop, running))
            raise
        return running

    def run(
        self,
        inputs: Sequence[Input],
        requests: Sequence[TextRequest],
        builders: Sequence[OutputBuilder],
        use_tqdm: bool,
    ) -> None:
        """Run checked requests until all have ended. If the run is interrupted, abort the requests."""
        calls = [
            _Call(
                inputs[places[0]].adapter.model.served,
                [requests[place] for place in places],
                GenerateCall([builders[place] for place in places], sum(requests[place].n for place in places)),
            )
            for places in _by_tokenizer(inputs)
        ]
        progress = ProgressBar(sum(request.n for request in requests), shown=use_tqdm)
        try:
            for call in calls:
                self.on_thread(partial(self._sequences.start, call.requests, call.receiver, call.served))
            while not all(call.receiver.is_done for call in calls) and not any(call.receiver.error for call in calls):
                self._advance()
                progress.update(
                    sum(call.receiver.num_ended for call in calls), sum(call.receiver.num_tokens for call in calls)
                )
        finally:
            try:
                for call in calls:
                    self.on_thread(partial(self._sequences.stop, call.receiver))
            finally:
                progress.close()
        for call in calls:
            call.receiver.check()

    def stats(self) -> dict[str, float]:
        """Return the engine's gauges and counters by name, as in a heartbeat. Must be called on the engine's thread."""
        return self._core.stats()

    def step(self) -> bool:
        """Compute one step of all running requests. Returns whether any of them still runs.

        Raises:
            Exception: the first exception that a callback raised in this step, or in another call since the last step.
        """
        self._advance()
        self._callbacks.raise_errors()
        return len(self._sequences) > 0

    def abort(self, running: RunningRequest) -> None:
        """Abort a request. It gets no more deltas, and its ``output`` raises RequestError unless it has ended."""
        running.abort()
        self.on_thread(partial(self._sequences.stop, running))

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load a LoRA adapter under a name. Needs ``enable_lora=True``. Running requests continue meanwhile.

        Args:
            path: folder in PEFT format, ``org/name`` on the Hub, or a URI: ``hf://``, ``s3://``, ``https://``, ``file://``.
            replace: whether the name may be in use.

        Raises:
            RequestError: the adapter cannot be loaded.
            AdapterUnavailable: the adapter's source does not answer.
        """
        source = named_source(path, self._lora_dir)
        if source is None:
            num_own = self._texts.num_own(name, path)
            return self._call(LoadAdapter(next(self._call_ids), name, path, replace, num_tokens=num_own))
        fetched = self._fetcher.fetch(source, trusted=True)
        try:
            self._call(LoadAdapter(next(self._call_ids), name, str(fetched.folder), replace, trusted=True))
        except EngineError:
            self._fetcher.release(fetched)
            raise

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises UnknownModel if no adapter has the name."""
        self._call(UnloadAdapter(next(self._call_ids), name))

    def save_prefix(self, given: Input, file: Path) -> int:
        """Write the cached KV of a prompt's full pages to a file.

        Returns the number of tokens. Raises OSError, ConfigError.
        """
        adapter, tokenizer = given.adapter.name, given.adapter.model.served.identity
        params = SamplingParams(max_tokens=1)
        submit = Submit(_NO_SEQUENCE, given.tokens, params, adapter=adapter, salt=given.salt, tokenizer=tokenizer)
        return self.on_thread(
            lambda: self._core.prefix_transfer().save(self._core.adaptation_of(submit).path, submit.tokens, file)
        )

    def load_prefix(self, file: Path) -> int:
        """Load the KV pages of a file into the prefix cache.

        Returns the number of tokens. Raises OSError, ConfigError.
        """
        return self.on_thread(lambda: self._core.prefix_transfer().load(file))

    def save_session(self, running: RunningRequest, file: Path) -> int:
        """Write a running request and its KV to a file, and end the request here.

        Returns the number of tokens with saved KV.

        Raises:
            RequestError: the request has ended, has several answers or wants logprobs, or no step has computed it yet.
            OSError, ConfigError: as for ``save_prefix``.
        """
        return self.on_thread(partial(self._save_session, running, file))

    def _save_session(self, running: RunningRequest, file: Path) -> int:
        transfer, request = self._core.prefix_transfer(), running.request
        params = request.params
        # The scores of tokens from before the pause are not in the file.
        if (
            request.n > 1
            or params.logprobs is not None
            or params.prompt_logprobs is not None
            or params.allowed_logprobs
        ):
            raise RequestError(
                "A session gives one answer, without logprobs and field_probabilities: set n to 1, and leave the "
                "others out.",
                param="n",
            )
        sequence = self._core.find(next(iter(running.running), _NO_SEQUENCE))
        if running.is_done or sequence is None:
            raise RequestError("The request has ended, or is waiting for its grammar or adapter: call step() first.")
        path, tokens = sequence.path, sequence.tokens[:]
        saved = SavedSession(
            path.namespace.base,
            path.namespace.adapter or "",
            replace(request, params=replace(request.params, seed=sequence.spec.seed)),
            tokens[sequence.num_prompt :],
        )
        num_tokens = transfer.save(path, tokens, file, pack_head(saved.encode()))
        self._sequences.stop(running)
        running.abort()
        return num_tokens

    def load_session(self, file: Path) -> SavedSession | None:
        """Load the KV of a session file into the prefix cache.

        Returns the saved session; None if it cannot continue here.

        Raises:
            OSError, ConfigError: as for ``load_prefix``.
        """
        return self.on_thread(partial(self._load_session, file))

    def _load_session(self, file: Path) -> SavedSession | None:
        transfer, found = self._core.prefix_transfer(), read_head(file)
        saved = None if found is None else SavedSession.decode(found[0])
        if found is None or saved is None or saved.base != self._core.ready.base_digest:
            return None
        if saved.request.adapter is not None:
            info = self._adapters.get(saved.request.adapter)
            if info is None or info.digest != saved.adapter_digest:
                return None
        transfer.load(file, found[1])
        return saved

    def release_session(self, session: str) -> bool:
        """End a session. Returns whether the session kept any KV."""
        return self.on_thread(lambda: self._core.sessions.release("", session))

    def reset_cache(self) -> None:
        """Remove all cached KV that no running request uses."""
        self.on_thread(self._core.reset_cache)

    def close(self) -> None:
        """End the engine's threads and the processes that compile grammars. Running requests fail with EngineDead.

        In a fork of the process that made the LLM, nothing is ended.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread.is_here:
            self._thread.run(lambda: self._sequences.take(self._core.close()))
            self._thread.close()
            self._fetcher.close()

    def on_thread(self, call: Callable[[], T]) -> T:
        """Run a call on the engine's thread and return its result. Raises EngineDead after ``close``."""
        if self._closed:
            raise EngineDead("This LLM was closed: create another one.")
        return self._thread.run(call)

    def _advance(self) -> None:
        """Compute a step, then call the callbacks with its deltas."""
        self.on_thread(self._step)
        self._callbacks.run()

    def _step(self) -> None:
        """Compute a step, and dispatch its messages to requests and calls. Runs on the engine's thread."""
        messages = self._core.step()
        self.on_observations(self._core.take_observations())
        for message in messages:
            if isinstance(message, Reply) and message.id in self._replies:
                self._replies[message.id] = message
            elif isinstance(message, AdapterChanged) and message.info is not None:
                self._adapters[message.name] = message.info
            elif isinstance(message, AdapterChanged):
                self._adapters.pop(message.name, None)
        self._sequences.take(messages)

    def _call(self, call: LoadAdapter | UnloadAdapter) -> None:
        """Send a call to the engine, and run steps until its reply arrives. Raises the error in the reply."""
        self._replies[call.id] = None
        try:
            self.on_thread(partial(self._core.handle, [call]))
            while (reply := self._replies[call.id]) is None:
                self._advance()
        finally:
            del self._replies[call.id]
        if reply.failure is not None:
            raise error_of(reply.failure)


@dataclass(frozen=True, slots=True)
class CoreLink:
    """The ``EngineLink`` of an engine core in this process. It passes messages directly to the core."""

    core: EngineCore

    def describe_tokens(self, message: TokenTexts | ForgetTokens) -> None:
        """Give the core the bytes of a vocabulary's tokens, or let it drop them."""
        self.core.handle([message])

    def submit(self, submits: Sequence[Submit]) -> None:
        """Submit sequences."""
        self.core.handle(submits)

    def abort(self, ids: Iterable[int]) -> None:
        """Abort sequences."""
        self.core.handle([Abort(tuple(ids))])


@dataclass(frozen=True, slots=True)
class _Call:
    """The requests of a call that use the same tokenizer, and the receiver of their deltas."""

    served: ServedTokenizer
    requests: Sequence[TextRequest]
    receiver: GenerateCall


def _by_tokenizer(inputs: Sequence[Input]) -> list[list[int]]:
    """Return the indices of the prompts, grouped by the tokenizer that they use."""
    places: dict[str, list[int]] = {}
    for place, given in enumerate(inputs):
        places.setdefault(given.adapter.model.served.identity, []).append(place)
    return list(places.values())
