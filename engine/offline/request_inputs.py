"""Request inputs: builds the engine's requests from the prompts, parameters and options of ``LLM``."""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...grammar.schema.answer_fields import AnswerFields
from ...grammar.spec import GrammarKind, GrammarSpec
from ...lora.request import LoRARequest
from ..config import EngineConfig
from ..errors import RequestError
from ..serving.request import TextRequest, spellings_of_bad_words
from ..serving.sampling_defaults import default_params, read_sampling_defaults
from ..text.field_probabilities import FieldReader
from ..types import Pooling, SamplingDefaults
from ..types import SamplingParams as EngineParams
from .offline_metrics import OfflineMetrics
from .prompt_texts import PromptTexts
from .request_output import OutputBuilder
from .sampling_params import AnyParams, SamplingParams

logger = logging.getLogger("rootgraft.llm")


@dataclass(frozen=True, slots=True)
class PromptAdapter:
    """The adapter of a prompt.

    Attributes:
        name: name of the adapter; None for the base model.
        model: tokenizer and limits of the adapter or the base model.
        asked: the ``LoRARequest`` that requested the adapter; None without one.
    """

    name: str | None
    model: PromptTexts
    asked: LoRARequest | None


@dataclass(frozen=True, slots=True)
class Input:
    """A prompt in tokens, with its text if known, its cache salt, and its adapter."""

    tokens: array[int]
    text: str | None
    salt: str
    adapter: PromptAdapter


@dataclass(frozen=True, slots=True)
class CallOptions:
    """Options that apply to all requests of a call. They extend or replace sampling parameters."""

    stop: str | Sequence[str] = ()
    n: int | None = None
    grammar: GrammarSpec | None = None


class RequestMaker:
    """Builds requests from prompts, and gives them ids.

    Args:
        defaults: the model's default parameters.
        metrics: observer of the requests; None if absent.
    """

    def __init__(self, defaults: SamplingDefaults, metrics: OfflineMetrics | None = None) -> None:
        self._defaults = defaults
        self._metrics = metrics
        self._ids = itertools.count()

    @classmethod
    def of(cls, config: EngineConfig, model: Path, metrics: OfflineMetrics | None = None) -> RequestMaker:
        """Return a maker of requests that uses the default parameters in a model's files. Raises ConfigError."""
        read = read_sampling_defaults(config, model)
        for line in read.ignored:
            logger.warning("%s", line)
        return cls(read.defaults, metrics)

    def default_params(self) -> SamplingParams:
        """Return the default sampling parameters."""
        return SamplingParams.of(default_params(self._defaults))

    def _default_params(self, num_prompt: int, model: PromptTexts) -> EngineParams:
        """Return the default parameters for one prompt.

        ``max_tokens`` from the model's file is limited to the context left.
        """
        params, most = default_params(self._defaults), self._defaults.max_tokens
        return params if most is None else replace(params, max_tokens=model.limits.default_max_tokens(num_prompt, most))

    def request(self, given: Input, params: AnyParams | None, options: CallOptions) -> TextRequest:
        """Return the request for a prompt. It is not yet checked against the limits. Raises RequestError."""
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
        form = shape["grammar"]
        if params.field_probabilities and (form is None or form.kind is not GrammarKind.JSON_SCHEMA):
            raise RequestError(
                "field_probabilities needs the form of the answer as a JSON Schema, as in structured_outputs.",
                param="field_probabilities",
            )
        return TextRequest(
            tokens,
            replace(params.engine_params(len(tokens), limits), bad_words=_bad_words(params, given.adapter.model)),
            stop=params.stops + stop,
            n=params.n if options.n is None else options.n,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            **shape,
        )

    def pooled(self, given: Input, pooling: Pooling, pooled_from: int) -> TextRequest:
        """Return a request that pools a prompt from token ``pooled_from`` on.

        It is not yet checked against the limits.
        """
        params = EngineParams(max_tokens=1, temperature=0.0, ignore_eos=True, pooling=pooling, pooled_from=pooled_from)
        return self.request(given, params, CallOptions())

    def builder(self, given: Input, request: TextRequest) -> OutputBuilder:
        """Return a builder for a request's output."""
        return OutputBuilder(
            given.text,
            request.tokens,
            request.n,
            with_logprobs=request.params.logprobs is not None,
            with_prompt_logprobs=request.params.prompt_logprobs is not None,
            has_named=bool(request.params.logprob_token_ids),
            request_id=str(next(self._ids)),
            lora_request=given.adapter.asked,
            new_reader=self._reader_maker(given, request),
            observe=None if self._metrics is None else self._metrics.watch(request).add,
        )

    def _reader_maker(self, given: Input, request: TextRequest) -> Callable[[], FieldReader] | None:
        """Return a function that creates a reader of an answer's field probabilities; None if none are requested."""
        form = request.grammar
        if form is None or not request.params.allowed_logprobs:
            return None
        fields, tokenizer = AnswerFields(form.value()), given.adapter.model.served.tokenizer
        ends = frozenset((*tokenizer.special_ids, *request.params.stop_token_ids))
        return lambda: FieldReader(fields, tokenizer.token_bytes, ends)


def one_for_each(params: Any, count: int) -> Sequence[AnyParams | None]:
    """Return sampling parameters for each prompt. Raises RequestError if their number or type is wrong."""
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


def _bad_words(params: SamplingParams, model: PromptTexts) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of ``bad_words``. Raises RequestError."""
    texts = spellings_of_bad_words(params.bad_words or ())
    return tuple(tuple(model.served.tokenizer.encode(text, False)) for text in texts)


def _truncated(tokens: array[int], most: int | None, max_model_len: int) -> array[int]:
    if most is None:
        return tokens
    if type(most) is not int or most < -1 or most == 0:
        raise RequestError(
            f"truncate_prompt_tokens must be at least 1, or -1 for the whole context, not {most}.",
            param="truncate_prompt_tokens",
        )
    return tokens[-(max_model_len if most == -1 else most) :]
