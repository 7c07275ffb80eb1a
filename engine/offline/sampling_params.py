"""Sampling parameters of offline requests under vLLM's names, also for structured output and beam search."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from ...grammar.errors import GrammarError
from ...grammar.spec import GrammarSpec
from ..errors import GrammarRefused, RequestError
from ..sampling_options import OPTIONS
from ..serving.request import RequestLimits
from ..types import SamplingParams as EngineParams
from .vllm_table import check_values, is_nothing, peer_names

_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


class RequestOutputKind(Enum):
    """Kind of the outputs that ``AsyncLLM`` yields: the answer so far, only the new part, or one output at the end.

    ``LLM`` always returns the last kind.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class StructuredOutputsParams:
    """Constraint on the form of an answer. Exactly one of the first six fields must be given.

    Attributes:
        json: a JSON Schema, as text or object, or a pydantic model.
        regex: a regular expression that the whole answer matches.
        choice: texts, one of which is the answer.
        grammar: EBNF with a rule ``root ::= ...``, or Lark with a rule ``start: ...``.
        json_object: True for any JSON object.
        structural_tag: free text with structured parts, in XGrammar's form.
    """

    json: str | dict[str, Any] | type | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    disable_fallback: bool = False
    backend: str | None = None

    def spec(self) -> GrammarSpec:
        """Return the grammar of the answer.

        Raises:
            RequestError: none or several of the fields are given, or a field is refused.
            GrammarRefused: the schema, expression or grammar is malformed or not supported.
        """
        check_values("StructuredOutputsParams", vars(self), dict.fromkeys(vars(self), False))
        names = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name for name in names if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs must hold exactly one of {', '.join(names)}, not {' and '.join(given) or 'none'}.",
                param="structured_outputs",
            )
        try:
            return self._spec(given[0])
        except GrammarError as error:
            param = f"structured_outputs.{given[0]}"
            raise GrammarRefused(error.keyword, error.pointer, error.reason, param=param) from None

    def _spec(self, name: str) -> GrammarSpec:
        value: Any = getattr(self, name)
        match name:
            case "json":
                return GrammarSpec.json_schema(
                    value.model_json_schema() if hasattr(value, "model_json_schema") else value
                )
            case "regex":
                return GrammarSpec.regex(value)
            case "choice":
                return GrammarSpec.choice(value)
            case "grammar":
                is_ebnf = isinstance(value, str) and _EBNF_RULE.search(value)
                return GrammarSpec.ebnf(value) if is_ebnf else GrammarSpec.lark(value)
            case "json_object":
                return GrammarSpec.json_object()
        return GrammarSpec.structural_tag(value)


GuidedDecodingParams = StructuredOutputsParams
"""Name of the class in vLLM before 0.12."""


@dataclass
class SamplingParams:
    """Sampling parameters of a request, under vLLM's names. ``vllm_classes.toml`` describes the effect of each field.

    The bounds are those of the server's requests (docs/reference/api.md). They are checked when a request begins.

    Attributes:
        n: number of answers to each prompt.
        max_tokens: largest number of tokens of an answer; None for as many as fit in the context.
        stop: strings that end an answer. They are not part of the answer, unless ``include_stop_str_in_output`` is set.
        seed: seed of random sampling; None or -1 for no seed.
        logprobs: number of likeliest tokens whose logprobs are returned for each position, in addition to the sampled
            token's logprob.
        logit_bias: bias by token id.
        structured_outputs: constraint on the form of the answer; a dict of the fields of ``StructuredOutputsParams`` is
            accepted too.
        truncate_prompt_tokens: number of tokens at the prompt's end that are kept; -1 for as many as fit in the
            context.
        logprob_start_len: number of the prompt's leading tokens without ``prompt_logprobs``. Not a parameter of vLLM.
        field_probabilities: whether to return the probability of each choice that a JSON Schema left to the model. Not
            a parameter of vLLM.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] | None = None
    truncate_prompt_tokens: int | None = None
    guided_decoding: StructuredOutputsParams | Mapping[str, Any] | None = None
    best_of: int | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logits_processors: Sequence[Any] | None = None
    thinking_token_budget: int | None = None
    watermarking: Any = None
    repetition_detection: Any = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    prompt_logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_start: int | None = None
    trace_decode_token_ids: Sequence[int] | None = None
    routed_experts_prompt_start: int = 0
    stream_interval: int | None = None
    skip_clone: bool = False
    skip_reading_prefix_cache: bool | None = None
    extra_args: Mapping[str, Any] | None = None
    output_text_buffer_length: int = 0
    logprob_start_len: int = 0
    top_n_sigma: float = 0.0
    field_probabilities: bool = False

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Create parameters from values. A value of None selects the default."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    @classmethod
    def of(cls, params: EngineParams) -> SamplingParams:
        """Return the engine's parameters in this form, without those that only servers and other methods use."""
        internal = {"pooling", "pooled_from", "num_label", "allowed_logprobs", "bad_words"}
        own = {each.name for each in fields(params)} - internal
        values = {name: getattr(params, name) for name in own}
        ids = ("stop_token_ids", "allowed_token_ids", "logprob_token_ids")
        more: dict[str, Any] = {name: list(getattr(params, name)) or None for name in ids}
        more["logit_bias"] = dict(params.logit_bias) or None
        more["field_probabilities"] = params.allowed_logprobs
        return cls(**values | more)

    def clone(self) -> SamplingParams:
        return copy.deepcopy(self)

    def check(self) -> None:
        """Raise RequestError, which names the field, if a field requests what this engine does not support."""
        neutral = {"best_of": self.n, "flat_logprobs": False, "thinking_token_budget": -1}
        refused = {
            name: getattr(self, name) for name, row in peer_names("SamplingParams").items() if row.status == "refuse"
        }
        check_values("SamplingParams", refused, neutral)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whether one or several were given."""
        if self.stop is None or isinstance(self.stop, str):
            return () if self.stop is None else (self.stop,)
        return tuple(self.stop)

    def grammar(self) -> GrammarSpec | None:
        """Return the grammar of structured output; None for free text. Raises like ``StructuredOutputsParams.spec``."""
        given = [form for form in (self.structured_outputs, self.guided_decoding) if not is_nothing(form)]
        if not given:
            return None
        if len(given) > 1:
            raise RequestError(
                "structured_outputs and guided_decoding are both given: leave one out.", param="guided_decoding"
            )
        [form] = given
        if isinstance(form, Mapping):
            check_values("StructuredOutputsParams", dict.fromkeys(form))
            form = StructuredOutputsParams(**form)
        if not isinstance(form, StructuredOutputsParams):
            raise RequestError(
                f"structured_outputs must be StructuredOutputsParams or a dict, not {type(form).__name__}.",
                param="structured_outputs",
            )
        return form.spec()

    def engine_params(self, num_prompt: int, limits: RequestLimits) -> EngineParams:
        """Return the engine's parameters for a prompt of ``num_prompt`` tokens.

        They are not yet checked against ``limits``.
        """
        most = limits.default_max_tokens(num_prompt) if self.max_tokens is None else self.max_tokens
        same = {
            name: getattr(self, name)
            for name in (*(option.name for option in OPTIONS), "min_tokens", "ignore_eos", "logprob_start_len")
        }
        return EngineParams(
            max_tokens=most,
            seed=None if self.seed == -1 else self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_biases(self.logit_bias),
            logprobs=0 if self.logprob_token_ids and self.logprobs is None else _count(self.logprobs),
            logprob_token_ids=tuple(self.logprob_token_ids or ()),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            prompt_logprobs=_count(self.prompt_logprobs),
            allowed_logprobs=bool(self.field_probabilities),
            **same,
        )


AnyParams = SamplingParams | EngineParams
"""Sampling parameters with vLLM's names, or the engine's own."""


@dataclass
class BeamSearchParams:
    """Parameters of ``LLM.beam_search``.

    Attributes:
        beam_width: number of sequences that are kept; at most half of the largest ``logprobs``.
        temperature: without effect, because the log-probabilities are those of the model's own distribution.
        length_penalty: a sequence's sum of log-probabilities is divided by its length to the power of this number.

    Raises:
        RequestError: one of vLLM's other fields has a value that is not supported.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    skip_special_tokens: bool = True
    watermarking: Any = None
    allowed_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        check_values("BeamSearchParams", vars(self), {"skip_special_tokens": True})


def _count(value: int | None) -> int | None:
    """Convert a number of logprobs: ``True`` means 1 and ``False`` means None, as in vLLM."""
    return None if value is None or value is False else 1 if value is True else value


def _biases(value: Mapping[int, float] | Sequence[tuple[int, float]] | None) -> tuple[tuple[int, float], ...]:
    try:
        pairs = value.items() if isinstance(value, Mapping) else value or ()
        return tuple((int(token), bias) for token, bias in pairs)
    except (TypeError, ValueError):
        raise RequestError("logit_bias must be a dict of token ids and numbers.", param="logit_bias") from None
