"""Offline inference: the ``LLM`` class runs prompts through an engine in this process, without a server."""

from __future__ import annotations

import itertools
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...grammar.spec import GrammarSpec
from ..checkpoint.locate import resolve_model
from ..config import EngineConfig
from ..core.engine_core import EngineCore
from ..errors import RequestError
from ..messages import Abort, LoadAdapter, Reply, Submit, TokenTexts, UnloadAdapter
from ..peer_options import engine_keywords
from ..serving.output_processor import OutputProcessor, TextDelta, error_of
from ..serving.request import RequestLimits, TextRequest, token_array
from ..serving.sequence_table import SequenceTable
from ..text.prompt_cache import Owner, PromptEncoder
from ..text.tokenizer import Tokenizer
from ..types import SamplingParams
from .request_output import OutputBuilder, RequestOutput

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]

logger = logging.getLogger(__name__)

_SHOW_EVERY = 0.5  # seconds between updates of the progress bar


class LLM:
    """A model in this process. Not thread-safe.

    Args:
        model: folder in Hugging Face format, GGUF file or name on the hub; None for the default model.
        options: of ``EngineConfig``, or vLLM's (``docs/options.md``): translated, accepted without effect or refused.

    Raises:
        ModelError: the model does not exist or is not supported exactly.
        ConfigError: options that do not exist, are out of bounds or contradict each other.

    >>> llm = LLM()
    >>> [output] = llm.generate("The capital of France is", SamplingParams(max_tokens=8, temperature=0))
    >>> output.outputs[0].text
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        config = _config(model, options)
        files = resolve_model(config.model, revision=config.revision)
        self.tokenizer = Tokenizer.load(
            files.path,
            tokenizer_path=Path(config.tokenizer) if config.tokenizer is not None else None,
            chat_template=config.chat_template,
        )
        self._core = EngineCore.load(config, files.path)
        self._limits = RequestLimits(self._core.ready.max_model_len, self._core.ready.vocab_size)
        self._prompts = PromptEncoder(self.tokenizer)
        self._sequences = SequenceTable(_CoreLink(self._core), self.tokenizer)
        self._call_ids = itertools.count(1)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        n: int = 1,
        grammar: GrammarSpec | None = None,
        adapter: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: one text or list of token ids, or a list of such.
            params: for all prompts, or one for each; None for the defaults.
            stop: strings that end an answer and are no part of it.
            n: answers to each prompt.
            grammar: structured output, such as ``GrammarSpec.json_schema({...})``.
            adapter: name of a LoRA adapter, None for the base model.
            use_tqdm: show a progress bar.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestError: a prompt or parameter out of bounds. Every request is checked before the first one starts.
            UnknownModel: there is no such adapter.
        """
        texts = _listed(prompts)
        tokens = [self._encoded(prompt) for prompt in texts]
        return self._run(tokens, texts, params, _Options(stop, n, grammar, adapter), use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        n: int = 1,
        grammar: GrammarSpec | None = None,
        adapter: str | None = None,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template. See ``generate``."""
        conversations = [messages] if _is_conversation(messages) else messages
        texts = [
            self.tokenizer.render_chat(
                conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        tokens = [self._prompts.encode(self._prompts.cut(text), Owner()) for text in texts]
        return self._run(tokens, texts, params, _Options(stop, n, grammar, adapter), use_tqdm)

    def begin(
        self,
        tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        grammar: GrammarSpec | None = None,
        adapter: str | None = None,
        session: str = "",
        pin_seconds: float = 0.0,
        on_delta: Callable[[TextDelta], None] | None = None,
    ) -> RunningRequest:
        """Begin a request beside the running ones; ``step`` advances all of them.

        Args:
            tokens: the prompt.
            session: a name; the KV of the last request of this name is evicted from the prefix cache last.
            pin_seconds: how long the prompt is pinned in the prefix cache.
            on_delta: called in ``step`` with each delta.

        Raises:
            RequestError: the prompt or a parameter is out of bounds.
        """
        request = _Options(stop, 1, grammar, adapter).request(token_array(tokens), params or SamplingParams())
        request = self._limits.check(replace(request, session=session, pin_seconds=pin_seconds))
        running = RunningRequest(_builder(request.tokens, request), on_delta)
        self._sequences.start([request], running)
        return running

    def step(self) -> bool:
        """Compute one step of all running requests. Returns whether any of them still runs."""
        self._sequences.take(self._core.step())
        return len(self._sequences) > 0

    def abort(self, running: RunningRequest) -> None:
        """Abort a request; it gets no more deltas."""
        self._sequences.stop(running)

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load a LoRA adapter under a name. Needs ``enable_lora=True``.

        Args:
            path: folder in PEFT format.
            replace: the name may be in use.

        Raises:
            RequestError: the adapter cannot be loaded.
        """
        self._call(LoadAdapter(next(self._call_ids), name, path, replace))

    def unload_adapter(self, name: str) -> None:
        """Unload an adapter. Raises UnknownModel if no adapter has the name."""
        self._call(UnloadAdapter(next(self._call_ids), name))

    def close(self) -> None:
        """End the engine's helpers: threads that load adapters, processes that compile grammars."""
        self._core.close()

    def _call(self, call: LoadAdapter | UnloadAdapter) -> None:
        """Send a call to the engine and step until its reply. Raises the error in the reply."""
        self._core.handle([call])
        replies: list[Reply] = []
        while not replies:
            replies = [message for message in self._core.step() if isinstance(message, Reply)]
        if (failure := replies[0].failure) is not None:
            raise error_of(failure)

    def _encoded(self, prompt: Prompt) -> array[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        return token_array(prompt)

    def _run(
        self,
        prompts: list[array[int]],
        texts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: _Options,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = _one_for_each(params, len(prompts))
        requests = [self._limits.check(options.request(tokens, one)) for tokens, one in zip(prompts, each, strict=True)]
        progress = _Progress(len(requests) * options.n, shown=use_tqdm)
        running = [
            RunningRequest(_builder(text, request), progress.add) for text, request in zip(texts, requests, strict=True)
        ]
        try:
            for request, one in zip(requests, running, strict=True):
                self._sequences.start([request], one)
            while not all(one.is_done for one in running):
                self.step()
                for one in running:
                    if one.error is not None:
                        raise one.error
        finally:
            progress.close()
            for one in running:
                self.abort(one)
        return [one.output() for one in running]


@dataclass(frozen=True, slots=True)
class _CoreLink:
    """The ``EngineLink`` of an engine in this process."""

    core: EngineCore

    def describe_tokens(self, texts: TokenTexts) -> None:
        self.core.handle([texts])

    def submit(self, submits: Sequence[Submit]) -> None:
        self.core.handle(submits)

    def abort(self, ids: Iterable[int]) -> None:
        self.core.handle([Abort(tuple(ids))])


class RunningRequest:
    """A request begun by ``LLM.begin``: the ``DeltaReceiver`` of its sequences.

    Attributes:
        running: output processors of the sequences that have not ended, by id.
        error: failure that ended the request, None if there is none.
    """

    def __init__(self, builder: OutputBuilder, on_delta: Callable[[TextDelta], None] | None) -> None:
        self._builder = builder
        self._on_delta = on_delta
        self.running: dict[int, OutputProcessor] = {}
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.error is not None or self._builder.is_complete

    def add(self, delta: TextDelta) -> None:
        """Gather a delta and pass it to ``on_delta``."""
        self._builder.add(delta)
        if self._on_delta is not None:
            self._on_delta(delta)

    def fail(self, error: Exception) -> None:
        self.error = error

    def output(self) -> RequestOutput:
        """Return the output, once ``is_done``. Raises ``error`` if there is one."""
        if self.error is not None:
            raise self.error
        return self._builder.build()


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of a call that hold for all its requests, sampling parameters aside."""

    stop: str | Sequence[str]
    n: int
    grammar: GrammarSpec | None
    adapter: str | None

    def request(self, tokens: array[int], params: SamplingParams) -> TextRequest:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return TextRequest(tokens, params, stop=stop, n=self.n, adapter=self.adapter, grammar=self.grammar)


class _Progress:
    """Progress bar: finished answers, and tokens per second over all of them."""

    def __init__(self, total: int, *, shown: bool) -> None:
        self._bar = tqdm(total=total, disable=not shown, unit="answer", desc="Generating", dynamic_ncols=True)
        self._started = self._last = time.monotonic()
        self._tokens = 0

    def add(self, delta: TextDelta) -> None:
        self._tokens += len(delta.tokens)
        self._bar.update(int(delta.finish is not None))
        now = time.monotonic()
        if now - self._last >= _SHOW_EVERY:
            self._show(now)

    def close(self) -> None:
        self._show(time.monotonic())
        self._bar.close()

    def _show(self, now: float) -> None:
        self._last = now
        self._bar.set_postfix_str(f"{self._tokens / max(now - self._started, 1e-9):.1f} tokens/s")


def _config(model: str | None, keywords: dict[str, Any]) -> EngineConfig:
    options, notes = engine_keywords({"model": model} | keywords)
    for note in notes:
        logger.info("%s", note)
    return EngineConfig(**options)


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts, also for one text or one list of token ids."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _is_conversation(messages: Conversation | Sequence[Conversation]) -> bool:
    return len(messages) > 0 and isinstance(messages[0], Mapping)


def _one_for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"There are {len(params)} params for {count} prompts: give one, or one for each.")
    return params


def _builder(text: Prompt, request: TextRequest) -> OutputBuilder:
    return OutputBuilder(
        text if isinstance(text, str) else None,
        request.tokens,
        request.n,
        with_logprobs=request.params.logprobs is not None,
        with_prompt_logprobs=request.params.prompt_logprobs is not None,
    )
