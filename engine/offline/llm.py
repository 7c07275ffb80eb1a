"""Offline inference: the ``LLM`` class runs prompts through an engine in this process, without a server."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...grammar.spec import GrammarSpec
from ..adapter_sources.adapter_fetcher import AdapterFetcher
from ..adapter_sources.named_sources import fetch_named, named_source
from ..checkpoint.locate import resolve_model
from ..config import EngineConfig
from ..core.engine_core import EngineCore
from ..errors import EngineDead, EngineError, RequestError
from ..messages import AdapterChanged, LoadAdapter, Reply, UnloadAdapter
from ..peer_options import engine_keywords
from ..serving.adapter_tokenizers import AdapterTokenizers, ServedTokenizer
from ..serving.output_processor import TextDelta, error_of
from ..serving.request import TextRequest, token_array
from ..serving.sampling_defaults import default_params, read_sampling_defaults
from ..serving.sequence_table import SequenceTable
from ..text.tokenizer import Tokenizer
from ..types import SamplingDefaults, SamplingParams
from .core_link import CoreLink
from .engine_thread import EngineThread
from .progress_bar import ProgressBar
from .prompt_texts import AdapterTexts, PromptTexts
from .request_output import OutputBuilder, RequestOutput
from .running_request import DeltaCallbacks, GenerateCall, RunningRequest

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
T = TypeVar("T")

logger = logging.getLogger("rootgraft.llm")


class LLM:
    """A model in this process. Not thread-safe, and of no use to processes forked from this one: each makes its own.

    The engine and all that belongs to a step run on a thread of their own (``EngineThread``). KeyboardInterrupt, or
    another exception of a signal handler, ends the wait for a step and never the step itself: ``generate`` and ``chat``
    abort their requests, requests of ``begin`` go on with the next ``step``, with the same tokens. An exception inside
    a step fails all requests, and the next call finds an engine that works, with an empty prefix cache.

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
        self._defaults = _sampling_defaults(config, files.path)
        self._fetcher = AdapterFetcher.of(config)
        self._lora_dir = config.lora_dir
        try:
            self._core = EngineCore.load(fetch_named(config, self._fetcher)[0], files.path)
        except BaseException:
            self._fetcher.close()
            raise
        ready = self._core.ready
        self._adapters = {info.name: info for info in ready.adapters}
        served = ServedTokenizer(self.tokenizer, ready.vocab_size)
        tokenizers = AdapterTokenizers(served, config)
        self._texts = AdapterTexts(
            tokenizers, self._adapters, lambda name: self.load_adapter(name, name), ready.max_model_len
        )
        self._sequences = SequenceTable(CoreLink(self._core))
        self._callbacks = DeltaCallbacks()
        self._call_ids = itertools.count(1)
        self._replies: dict[int, Reply | None] = {}  # to the calls that wait for one
        self._thread = EngineThread()
        self._closed = False

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without any: what the model's ``generation_config.json`` recommends.

        The name is vLLM's. ``generation_config="vllm"`` leaves the file aside.
        """
        return default_params(self._defaults)

    def get_tokenizer(self, adapter: str | None = None) -> Tokenizer:
        """Return the model's tokenizer, or that of an adapter which brings its own."""
        return self._texts.of(adapter).served.tokenizer

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
            params: for all prompts, or one for each; None for those of ``get_default_sampling_params``.
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
        texts, model = _listed(prompts), self._texts.of(adapter)
        tokens = [model.encode(prompt) for prompt in texts]
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
        model = self._texts.of(adapter)
        texts = [
            model.served.tokenizer.render_chat(
                conversation,  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        tokens = [self._on_thread(partial(model.encode_chat, text)) for text in texts]
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
            on_delta: called with each delta after the step that brought it, in ``step`` and in every other call that
                steps. What it raises is raised by ``step``, once all deltas of the step have reached their requests.

        Raises:
            RequestError: the prompt or a parameter is out of bounds.
        """
        prompt, model = token_array(tokens), self._texts.of(adapter)
        request = _Options(stop, 1, grammar, adapter).request(prompt, params or self._params_for(prompt, model))
        request = model.limits.check(replace(request, session=session, pin_seconds=pin_seconds))
        running = RunningRequest(_builder(request.tokens, request), on_delta, self._callbacks)
        try:
            self._on_thread(partial(self._sequences.start, [request], running, model.served))
        except BaseException:  # nobody has the request, so nobody could abort it
            self._on_thread(partial(self._sequences.stop, running))
            raise
        return running

    def step(self) -> bool:
        """Compute one step of all running requests. Returns whether any of them still runs.

        Raises:
            Exception: of a callback in this step, or in another call since the last step; with several, the first one.
        """
        self._advance()
        self._callbacks.raise_errors()
        return len(self._sequences) > 0

    def abort(self, running: RunningRequest) -> None:
        """Abort a request: it gets no more deltas, and ``output`` raises RequestError unless it had ended."""
        running.abort()
        self._on_thread(partial(self._sequences.stop, running))

    def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Load a LoRA adapter under a name. Needs ``enable_lora=True``. Running requests go on meanwhile.

        Args:
            path: folder in PEFT format, ``org/name`` on the Hub, or a URI: ``hf://``, ``s3://``, ``https://``, ``file://``.
            replace: the name may be in use.

        Raises:
            RequestError: the adapter cannot be loaded.
            AdapterUnavailable: its source does not answer.
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

    def close(self) -> None:
        """End the engine's threads and the processes that compile grammars. Requests that run fail with EngineDead.

        In a process that was forked from the one that made the LLM nothing is ended.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread.is_here:
            self._thread.run(lambda: self._sequences.take(self._core.close()))
            self._thread.close()
            self._fetcher.close()

    def _on_thread(self, call: Callable[[], T]) -> T:
        """Return what a call does on the engine's thread. Raises EngineDead after ``close``."""
        if self._closed:
            raise EngineDead("This LLM was closed: make another one.")
        return self._thread.run(call)

    def _advance(self) -> None:
        """Compute a step, then run the callbacks of its deltas."""
        self._on_thread(self._step)
        self._callbacks.run()

    def _step(self) -> None:
        """Compute a step and give its messages to requests and calls. On the engine's thread."""
        messages = self._core.step()
        for message in messages:
            if isinstance(message, Reply) and message.id in self._replies:
                self._replies[message.id] = message
            elif isinstance(message, AdapterChanged) and message.info is not None:
                self._adapters[message.name] = message.info
            elif isinstance(message, AdapterChanged):
                self._adapters.pop(message.name, None)
        self._sequences.take(messages)

    def _call(self, call: LoadAdapter | UnloadAdapter) -> None:
        """Send a call to the engine and step until its reply. Raises the error in the reply."""
        self._replies[call.id] = None
        try:
            self._on_thread(partial(self._core.handle, [call]))
            while (reply := self._replies[call.id]) is None:
                self._advance()
        finally:
            del self._replies[call.id]
        if reply.failure is not None:
            raise error_of(reply.failure)

    def _params_for(self, prompt: array[int], model: PromptTexts) -> SamplingParams:
        """Return the default parameters; an answer as long as the model's file says ends where the context does."""
        params, most = self.get_default_sampling_params(), self._defaults.max_tokens
        return (
            params if most is None else replace(params, max_tokens=model.limits.default_max_tokens(len(prompt), most))
        )

    def _run(
        self,
        prompts: list[array[int]],
        texts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        options: _Options,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        model = self._texts.of(options.adapter)
        each = _one_for_each(params, len(prompts)) or [self._params_for(prompt, model) for prompt in prompts]
        requests = [model.limits.check(options.request(tokens, one)) for tokens, one in zip(prompts, each, strict=True)]
        builders = [_builder(text, request) for text, request in zip(texts, requests, strict=True)]
        call = GenerateCall(builders, len(requests) * options.n)
        progress = ProgressBar(len(requests) * options.n, shown=use_tqdm)
        try:
            self._on_thread(partial(self._sequences.start, requests, call, model.served))
            while not call.is_done:
                self._advance()
                progress.update(call.num_ended, call.num_tokens)
        finally:
            try:
                self._on_thread(partial(self._sequences.stop, call))
            finally:
                progress.close()
        return call.outputs()


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


def _sampling_defaults(config: EngineConfig, model: Path) -> SamplingDefaults:
    read = read_sampling_defaults(config, model)
    for line in read.ignored:
        logger.warning("%s", line)
    return read.defaults


def _config(model: str | None, keywords: dict[str, Any]) -> EngineConfig:
    options, notes = engine_keywords({"model": model} | keywords)
    for note in notes:
        logger.info("%s", note)
    return EngineConfig(**options)


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return a list of prompts, also for one text or one list of token ids. Raises RequestError for anything else."""
    if isinstance(prompts, (bytes, Mapping)) or not hasattr(prompts, "__getitem__"):
        right = "a text, a list of token ids, or a list of these"
        raise RequestError(f"prompts must be {right}, not {type(prompts).__name__}.", param="prompt")
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _is_conversation(messages: Conversation | Sequence[Conversation]) -> bool:
    return len(messages) > 0 and isinstance(messages[0], Mapping)


def _one_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams] | None:
    if params is None or isinstance(params, SamplingParams):
        return None if params is None else [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, SamplingParams) for each in params):
        raise RequestError("params must be SamplingParams, or a list with one for each prompt.", param="params")
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
