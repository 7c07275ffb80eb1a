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
from ...lora.request import LoRARequest
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
from ..types import SamplingDefaults
from ..types import SamplingParams as EngineParams
from .beam_search import BeamSearch, BeamSearchOutput
from .conversations import Conversation, read_conversations
from .core_link import CoreLink
from .engine_thread import EngineThread
from .inputs import PromptType, read_prompts
from .progress_bar import ProgressBar
from .prompt_texts import AdapterTexts, PromptTexts
from .request_output import OutputBuilder, RequestOutput
from .running_request import DeltaCallbacks, GenerateCall, RunningRequest
from .sampling_params import AnyParams, BeamSearchParams, SamplingParams
from .tokenizer_face import TokenizerFace
from .vllm_table import check_values, peer_names

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
        self._request_ids = itertools.count()
        self._lora_paths: dict[str, str] = {}  # of adapters that a LoRARequest has brought
        self._faces: dict[Tokenizer, TokenizerFace] = {}
        self._replies: dict[int, Reply | None] = {}  # to the calls that wait for one
        self._thread = EngineThread()
        self._closed = False

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of requests without any: what the model's ``generation_config.json`` recommends.

        The name is vLLM's. ``generation_config="vllm"`` leaves the file aside.
        """
        return SamplingParams.of(default_params(self._defaults))

    def get_tokenizer(self, lora_request: LoRARequest | str | None = None) -> TokenizerFace:
        """Return the model's tokenizer, or that of an adapter which brings its own."""
        tokenizer = self._texts.of(self._adapter_of(lora_request)).served.tokenizer
        if (face := self._faces.get(tokenizer)) is None:
            face = self._faces[tokenizer] = TokenizerFace(tokenizer)
        return face

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType] | None = None,
        sampling_params: AnyParams | Sequence[AnyParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        stop: str | Sequence[str] = (),
        n: int | None = None,
        grammar: GrammarSpec | None = None,
        adapter: str | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: one text, list of token ids, ``TextPrompt`` or ``TokensPrompt``, or a list of such.
            sampling_params: for all prompts, or one for each; None for those of ``get_default_sampling_params``.
            prompt_token_ids: token ids in place of prompts.
            use_tqdm: show a progress bar.
            lora_request: an adapter for all prompts, or one for each.
            stop: strings that end an answer and are no part of it, beside those of ``sampling_params``.
            n: answers to each prompt, in place of that of ``sampling_params``.
            grammar: structured output, such as ``GrammarSpec.json_schema({...})``.
            adapter: name of a LoRA adapter that is loaded, None for the base model.
            others: vLLM's further parameters, as ``vllm_classes.toml`` says.

        Returns:
            One output for each prompt, in their order.

        Raises:
            RequestError: a prompt or parameter out of bounds. Every request is checked before the first one starts.
            UnknownModel: there is no such adapter.
        """
        check_values("LLM.generate", others)
        inputs = self._inputs(prompts, prompt_token_ids, lora_request, adapter)
        return self._run(inputs, sampling_params, _Options(stop, n, grammar), bool(use_tqdm))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: AnyParams | Sequence[AnyParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        *,
        stop: str | Sequence[str] = (),
        n: int | None = None,
        grammar: GrammarSpec | None = None,
        adapter: str | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template. See ``generate``.

        Args:
            chat_template: a Jinja template in place of the model's.
            chat_template_content_format: vLLM's, without effect.
            tools: functions in OpenAI's form.
            chat_template_kwargs: further variables of the template.
        """
        check_values("LLM.chat", others | {"chat_template_content_format": chat_template_content_format})
        conversations = read_conversations(messages)
        inputs = []
        for conversation, chosen in zip(
            conversations, self._adapters_for(len(conversations), lora_request, adapter), strict=True
        ):
            text = chosen.model.served.tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=chat_template_kwargs,
                template=chat_template,
            )
            inputs.append(_Input(self._on_thread(partial(chosen.model.encode_chat, text)), text, "", chosen))
        return self._run(inputs, sampling_params, _Options(stop, n, grammar), bool(use_tqdm))

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest answers to each prompt, as vLLM does.

        Args:
            use_tqdm: show a progress bar of the steps.
            concurrency_limit: vLLM's, without effect.

        Raises:
            RequestError: a prompt or parameter out of bounds.
        """
        given = self._inputs(prompts, None, lora_request, None)
        adapters = [each.adapter for each in given]
        tokenizers = [self.get_tokenizer(each.asked or each.name) for each in adapters]
        ends = [tokenizer.eos_token_id for tokenizer in tokenizers]
        search = BeamSearch(params, [each.tokens.tolist() for each in given], ends)
        step = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=search.num_candidates)
        progress = ProgressBar(params.max_tokens, shown=use_tqdm)
        try:
            for count in range(params.max_tokens):
                beams = search.live()
                if not beams:
                    break
                inputs = [_Input(array("i", beam.tokens), None, "", adapters[prompt]) for prompt, beam in beams]
                search.advance(
                    [_scores_of(output) for output in self._run(inputs, step, _Options((), None, None), False)]
                )
                progress.update(count + 1, count + 1)
        finally:
            progress.close()
        return search.outputs([tokenizer.decode for tokenizer in tokenizers])

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Do nothing: the prefix cache changes no answer. For scripts of vLLM."""
        return True

    def __getattr__(self, name: str) -> Any:
        """Refuse a method of vLLM's ``LLM`` in words that say what to do, as ``vllm_classes.toml`` has them."""
        row = peer_names("LLM").get(name)
        if row is None or row.status == "done":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if row.status == "inert":
            return lambda *args, **kwargs: None
        raise NotOffered(f"LLM.{name} is not there: {row.words}.")

    def _inputs(
        self,
        prompts: Any,
        prompt_token_ids: Any,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
        adapter: str | None,
    ) -> list[_Input]:
        """Read prompts and adapters, and load what ``lora_request`` brings. Raises RequestError."""
        read = read_prompts(prompts, prompt_token_ids)
        return [
            _Input(chosen.model.encode(prompt.content), prompt.text, prompt.salt, chosen)
            for prompt, chosen in zip(read, self._adapters_for(len(read), lora_request, adapter), strict=True)
        ]

    def _adapters_for(
        self, count: int, lora_request: LoRARequest | Sequence[LoRARequest | None] | None, adapter: str | None
    ) -> list[_Adapter]:
        """Return the adapter of each prompt, loading what ``lora_request`` brings."""
        if lora_request is not None and adapter is not None:
            raise RequestError("adapter and lora_request are both given: leave one out.", param="lora_request")
        asked = [adapter] * count if lora_request is None else _one_lora_for_each(lora_request, count)
        found = []
        models: dict[str | None, PromptTexts] = {}
        for each in asked:
            name = self._adapter_of(each)
            if name not in models:
                models[name] = self._texts.of(name)
            found.append(_Adapter(name, models[name], each if isinstance(each, LoRARequest) else None))
        return found

    def _adapter_of(self, asked: LoRARequest | str | None) -> str | None:
        """Return the name of an adapter, which is loaded first if a ``LoRARequest`` brings it."""
        if not isinstance(asked, LoRARequest):
            if asked is not None and not isinstance(asked, str):
                raise RequestError(f"adapter must be a name, not {type(asked).__name__}.", param="adapter")
            return asked
        if not isinstance(asked.lora_name, str) or not asked.lora_name:
            raise RequestError("lora_name must be a text that is not empty.", param="lora_request")
        check_values("LoRARequest", {"tensorizer_config_dict": asked.tensorizer_config_dict})
        if asked.path and (asked.path != self._lora_paths.get(asked.lora_name) or asked.load_inplace):
            self.load_adapter(asked.lora_name, asked.path, replace=asked.lora_name in self._adapters)
            self._lora_paths[asked.lora_name] = asked.path
        return asked.lora_name

    def begin(
        self,
        tokens: Sequence[int],
        params: AnyParams | None = None,
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
        given = _Input(token_array(tokens), None, "", _Adapter(adapter, self._texts.of(adapter), None))
        return self._begin(given, params, _Options(stop, None, grammar), on_delta, session, pin_seconds)

    def begin_prompt(
        self, prompt: PromptType, params: AnyParams | None = None, *, lora_request: LoRARequest | None = None
    ) -> RunningRequest:
        """Begin a request beside the running ones, as ``begin`` does, for one prompt of any form of ``generate``.

        Raises:
            RequestError: the prompt or a parameter is out of bounds.
        """
        [given] = self._inputs([prompt], None, lora_request, None)
        return self._begin(given, params, _Options((), None, None))

    def _begin(
        self,
        given: _Input,
        params: AnyParams | None,
        options: _Options,
        on_delta: Callable[[TextDelta], None] | None = None,
        session: str = "",
        pin_seconds: float = 0.0,
    ) -> RunningRequest:
        model = given.adapter.model
        request = replace(self._request(given, params, options), session=session, pin_seconds=pin_seconds)
        request = model.limits.check(request)
        running = RunningRequest(self._builder(given, request), on_delta, self._callbacks)
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

    def _default_params(self, num_prompt: int, model: PromptTexts) -> EngineParams:
        """Return the default parameters; an answer as long as the model's file says ends where the context does."""
        params, most = default_params(self._defaults), self._defaults.max_tokens
        return params if most is None else replace(params, max_tokens=model.limits.default_max_tokens(num_prompt, most))

    def _request(self, given: _Input, params: AnyParams | None, options: _Options) -> TextRequest:
        """Return the request of a prompt, yet to be checked against the limits. Raises RequestError."""
        limits, tokens = given.adapter.model.limits, given.tokens
        stop = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop)
        shape: dict[str, Any] = {"adapter": given.adapter.name, "salt": given.salt, "grammar": options.grammar}
        if not isinstance(params, SamplingParams):
            chosen = self._default_params(len(tokens), given.adapter.model) if params is None else params
            return TextRequest(tokens, chosen, stop=stop, n=1 if options.n is None else options.n, **shape)
        params.check()
        tokens = _truncated(tokens, params.truncate_prompt_tokens, limits.max_model_len)
        if (grammar := params.grammar()) is not None:
            if options.grammar is not None:
                raise RequestError("grammar and structured_outputs are both given: leave one out.", param="grammar")
            shape["grammar"] = grammar
        return TextRequest(
            tokens,
            params.engine_params(len(tokens), limits),
            stop=params.stops + stop,
            n=params.n if options.n is None else options.n,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            **shape,
        )

    def _builder(self, given: _Input, request: TextRequest) -> OutputBuilder:
        return OutputBuilder(
            given.text,
            request.tokens,
            request.n,
            with_logprobs=request.params.logprobs is not None,
            with_prompt_logprobs=request.params.prompt_logprobs is not None,
            request_id=str(next(self._request_ids)),
            lora_request=given.adapter.asked,
        )

    def _run(
        self,
        inputs: Sequence[_Input],
        params: AnyParams | Sequence[AnyParams] | None,
        options: _Options,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = _one_for_each(params, len(inputs))
        requests = [
            given.adapter.model.limits.check(self._request(given, one, options))
            for given, one in zip(inputs, each, strict=True)
        ]
        builders = [self._builder(given, request) for given, request in zip(inputs, requests, strict=True)]
        calls = [
            _Call(
                inputs[places[0]].adapter.model.served,
                [requests[place] for place in places],
                GenerateCall([builders[place] for place in places], sum(requests[place].n for place in places)),
            )
            for places in _by_tokenizer(inputs)
        ]
        num_answers = sum(request.n for request in requests)
        progress = ProgressBar(num_answers, shown=use_tqdm)
        try:
            for call in calls:
                self._on_thread(partial(self._sequences.start, call.requests, call.receiver, call.served))
            while not all(call.receiver.is_done for call in calls) and not any(call.receiver.error for call in calls):
                self._advance()
                progress.update(
                    sum(call.receiver.num_ended for call in calls), sum(call.receiver.num_tokens for call in calls)
                )
        finally:
            try:
                for call in calls:
                    self._on_thread(partial(self._sequences.stop, call.receiver))
            finally:
                progress.close()
        for call in calls:
            call.receiver.check()
        return [builder.build() for builder in builders]


class NotOffered(EngineError, AttributeError):
    """A method of vLLM's that is not there, with what to do instead."""


@dataclass(frozen=True, slots=True)
class _Adapter:
    """The adapter of a prompt.

    Attributes:
        name: None for the base model.
        model: its tokenizer and limits.
        asked: as it was asked for by ``lora_request``.
    """

    name: str | None
    model: PromptTexts
    asked: LoRARequest | None


@dataclass(frozen=True, slots=True)
class _Input:
    """A prompt in tokens, with its text, the salt of its cached KV, and its adapter."""

    tokens: array[int]
    text: str | None
    salt: str
    adapter: _Adapter


@dataclass(frozen=True, slots=True)
class _Options:
    """Options of a call that hold for all its requests beside sampling parameters, or in their place."""

    stop: str | Sequence[str]
    n: int | None
    grammar: GrammarSpec | None


@dataclass(frozen=True, slots=True)
class _Call:
    """Requests of a call that have one tokenizer, and what receives their deltas."""

    served: ServedTokenizer
    requests: Sequence[TextRequest]
    receiver: GenerateCall


def _by_tokenizer(inputs: Sequence[_Input]) -> list[list[int]]:
    """Return the places of the prompts of each tokenizer."""
    places: dict[str, list[int]] = {}
    for place, given in enumerate(inputs):
        places.setdefault(given.adapter.model.served.identity, []).append(place)
    return list(places.values())


def _one_lora_for_each(asked: Any, count: int) -> Sequence[LoRARequest | None]:
    """Return an adapter for each prompt. Raises RequestError for anything else, or two contents under one name."""
    each = asked if isinstance(asked, (list, tuple)) else [asked] * count
    for one in each:
        if one is not None and not isinstance(one, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, not {type(one).__name__}.", param="lora_request")
    if len(each) != count:
        raise RequestError(
            f"There are {len(each)} lora_request for {count} prompts: give one, or one for each.", param="lora_request"
        )
    paths: dict[str, str] = {}
    for one in each:
        if one is not None and paths.setdefault(one.lora_name, one.path) != one.path:
            raise RequestError(f"{one.lora_name!r} names two adapters in one call.", param="lora_request")
    return each


def _truncated(tokens: array[int], most: int | None, max_model_len: int) -> array[int]:
    if most is None:
        return tokens
    if type(most) is not int or most < -1 or most == 0:
        raise RequestError(
            f"truncate_prompt_tokens must be at least 1, or -1 for the whole context, not {most}.",
            param="truncate_prompt_tokens",
        )
    return tokens[-(max_model_len if most == -1 else most) :]


def _scores_of(output: RequestOutput) -> dict[int, float]:
    """Return the log-probabilities of the likeliest first tokens of an answer."""
    assert output.outputs[0].logprobs is not None
    return {token: score.logprob for token, score in output.outputs[0].logprobs[0].items()}


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


def _one_for_each(params: Any, count: int) -> Sequence[AnyParams | None]:
    kinds = (SamplingParams, EngineParams)
    if params is None or isinstance(params, kinds):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(each, kinds) for each in params):
        raise RequestError(
            "sampling_params must be SamplingParams, or a list with one for each prompt.", param="sampling_params"
        )
    if len(params) != count:
        raise RequestError(
            f"There are {len(params)} sampling_params for {count} prompts: give one, or one for each.",
            param="sampling_params",
        )
    return params
