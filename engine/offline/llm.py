"""The offline face: many prompts in, all answers back in order, in this process and without a server."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...grammar.spec import GrammarSpec
from ..checkpoint.locate import resolve_model
from ..config import EngineConfig
from ..core.engine_core import EngineCore
from ..errors import ConfigError, EngineError, RequestError
from ..messages import Abort, Done, Failed, LoadAdapter, Message, Reply, TokenOut, UnloadAdapter
from ..serving.output_processor import OutputProcessor, TextDelta, error_of
from ..serving.request import RequestLimits, TextRequest, token_array
from ..text.prompt_cache import Owner, PromptEncoder
from ..text.stop_strings import StopStrings
from ..text.tokenizer import Tokenizer
from ..types import SamplingParams
from .request_output import OutputBuilder, RequestOutput

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]

_SHOW_EVERY = 0.5  # seconds between updates of the progress bar


class LLM:
    """A model in this process. Not for use from several threads at once.

    Args:
        model: folder in Hugging Face format, GGUF file or name on the hub; None for the default model.
        options: of ``EngineConfig``.

    Raises:
        ModelError: no such model, or one that is not computed exactly.
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
        self._ids = itertools.count(1)
        self._described = False  # whether the engine knows its tokens as bytes
        self._sequences: dict[int, _Sequence] = {}  # those that have not ended

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
        """Continue texts.

        Args:
            prompts: one text or list of token ids, or a list of such.
            params: for all prompts, or one for each; None for the defaults.
            stop: strings that end an answer and are no part of it.
            n: answers to each prompt.
            grammar: what every answer must follow, such as ``GrammarSpec.json_schema({...})``.
            adapter: name of the adapter that answers, None for the base model.
            use_tqdm: show a progress bar.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestError: a prompt or parameter out of bounds. Every request is checked before the first one starts.
            UnknownModel: there is no such adapter.
        """
        texts = _listed(prompts)
        tokens = [self._encoded(prompt) for prompt in texts]
        return self._run(tokens, texts, params, _Form(stop, n, grammar, adapter), use_tqdm)

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
        return self._run(tokens, texts, params, _Form(stop, n, grammar, adapter), use_tqdm)

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
        """Begin a request beside those that run already. ``step`` brings all of them on.

        Args:
            tokens: the prompt.
            session: a name; what the last request of this name computed is evicted from the prefix cache last.
            pin_seconds: how long the prompt is to stay there, even beyond that.
            on_delta: called in ``step`` with each piece of the answer as it comes.

        Raises:
            RequestError: the prompt or a parameter is out of bounds.
        """
        form = _Form(stop, 1, grammar, adapter)
        request = replace(
            form.request(token_array(tokens), params or SamplingParams()), session=session, pin_seconds=pin_seconds
        )
        request = self._limits.check(request)
        running = RunningRequest(_builder(request.tokens, request), on_delta)
        self._submit([request], [running])
        return running

    def step(self) -> bool:
        """Compute one step of all requests that ``begin`` began. Returns whether any of them still runs."""
        for message in self._core.step():
            self._take(message)
        return bool(self._sequences)

    def abort(self, running: RunningRequest) -> None:
        """Give a request up; nothing more comes of it."""
        numbers = [number for number, sequence in self._sequences.items() if sequence.running is running]
        for number in numbers:
            del self._sequences[number]
        if numbers:
            self._core.handle([Abort(tuple(numbers))])

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load a LoRA adapter under a name. Needs ``enable_lora=True``.

        Args:
            path: its folder, as PEFT saves it.
            replace: the name may be in use.

        Raises:
            RequestError: it cannot be loaded.
        """
        self._call(LoadAdapter(next(self._ids), name, path, replace))

    def unload_adapter(self, name: str) -> None:
        """Let a name stand for nothing. Raises UnknownModel if it does already."""
        self._call(UnloadAdapter(next(self._ids), name))

    def close(self) -> None:
        """End what runs beside the model: threads that load adapters, processes that compile grammars."""
        self._core.close()

    def _call(self, call: LoadAdapter | UnloadAdapter) -> None:
        """Have the engine do something, and wait for its reply."""
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
        form: _Form,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = _one_for_each(params, len(prompts))
        requests = [self._limits.check(form.request(tokens, one)) for tokens, one in zip(prompts, each, strict=True)]
        progress = _Progress(len(requests) * form.n, shown=use_tqdm)
        running = [
            RunningRequest(_builder(text, request), progress.add) for text, request in zip(texts, requests, strict=True)
        ]
        try:
            self._submit(requests, running)
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

    def _submit(self, requests: list[TextRequest], running: list[RunningRequest]) -> None:
        """Hand all requests to the engine."""
        if not self._described and any(request.grammar for request in requests):
            self._core.handle([self.tokenizer.texts()])
            self._described = True
        for request, one in zip(requests, running, strict=True):
            stops = StopStrings(request.stop) if request.stop else None
            submits = request.submits(self._ids)
            for index, submit in enumerate(submits):
                generation = OutputProcessor(self.tokenizer, request, stops, index)
                self._sequences[submit.id] = _Sequence(generation, one)
            self._core.handle(submits)

    def _take(self, message: Message) -> None:
        """Add what a message says to its request. Sequences that were given up are unknown."""
        if not isinstance(message, (TokenOut, Done, Failed)) or message.id not in self._sequences:
            return
        sequence = self._sequences[message.id]
        if isinstance(message, (Done, Failed)):
            del self._sequences[message.id]
        if isinstance(message, Failed):
            sequence.running.error = error_of(message)
            return
        was_stopped = sequence.generation.stopped
        if (delta := sequence.generation.push(message)) is not None:
            sequence.running.add(delta)
        if isinstance(message, TokenOut) and sequence.generation.stopped and not was_stopped:
            self._core.handle([Abort((message.id,))])


class RunningRequest:
    """A request that ``LLM.begin`` began.

    Attributes:
        error: what ended it, None as long as nothing did.
    """

    def __init__(self, builder: OutputBuilder, on_delta: Callable[[TextDelta], None] | None) -> None:
        self._builder = builder
        self._on_delta = on_delta
        self.error: EngineError | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.error is not None or self._builder.is_complete

    def add(self, delta: TextDelta) -> None:
        """Take what came. Called by ``LLM.step``."""
        self._builder.add(delta)
        if self._on_delta is not None:
            self._on_delta(delta)

    def output(self) -> RequestOutput:
        """The answer, once ``is_done``. Raises ``error`` if there is one."""
        if self.error is not None:
            raise self.error
        return self._builder.build()


@dataclass(frozen=True, slots=True)
class _Form:
    """What all requests of a call have in common beside their parameters."""

    stop: str | Sequence[str]
    n: int
    grammar: GrammarSpec | None
    adapter: str | None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def request(self, tokens: array[int], params: SamplingParams) -> TextRequest:
        """The request of this form for a prompt."""
        return TextRequest(tokens, params, stop=self.stops, n=self.n, adapter=self.adapter, grammar=self.grammar)


@dataclass(frozen=True, slots=True)
class _Sequence:
    generation: OutputProcessor
    running: RunningRequest


class _Progress:
    """The bar: answers done, and tokens a second over all of them."""

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


def _config(model: str | None, options: dict[str, Any]) -> EngineConfig:
    known = {field.name for field in fields(EngineConfig)}
    if unknown := sorted(options.keys() - known):
        raise ConfigError(f"There is no option {unknown[0]!r}; there are {', '.join(sorted(known))}.")
    return EngineConfig(model=model, **options)


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """A list of prompts, also for one text or one list of token ids."""
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
