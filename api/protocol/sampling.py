"""Sampling fields: request fields of chats and completions for sampling, stopping, caching, priority and streaming."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, create_model, model_validator

from ...engine.sampling_options import OPTIONS
from ...engine.serving.beams import MAX_BEAMS
from ...engine.types import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_LOGPROBS,
    MAX_SESSION_NAME,
    SESSION_SECONDS,
    Priority,
    SamplingDefaults,
    SamplingParams,
)
from .adapter_parts import AdapterFields, ModelName
from .base import Refusal, StrictModel, rejected, string_or_list
from .cache_control import CacheControl
from .foreign_fields import foreign_rules
from .kv_hints import KvHints

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_PRINTABLE = re.compile(r"[\x20-\x7e]{1,128}")

MAX_LENGTH_PENALTY = 10.0
OPTION_NAMES = tuple(option.name for option in OPTIONS)
PriorityName = Literal["realtime", "interactive", "batch"]
Verbosity = Literal["low", "medium", "high"] | None

IGNORED = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)


_FOREIGN = foreign_rules("generation")


def verbosity_left_out(place: str, wanted: Verbosity) -> list[str]:
    """Return the field's place in a list if a client requests another verbosity than "medium".

    OpenAI's own models were trained on this hint, and clients send it by default, but no model here supports it.
    """
    return [] if wanted in (None, "medium") else [place]


def priority_of(name: PriorityName) -> Priority:
    return Priority[name.upper()]


def _check_logit_bias(bias: dict[str, float]) -> dict[str, float]:
    if len(bias) > MAX_LOGIT_BIAS:
        raise rejected(f"must have at most {MAX_LOGIT_BIAS} entries")
    for token in bias:
        if not _TOKEN_ID.fullmatch(token):
            raise rejected("must have token ids as keys", token)
    return bias


def _check_salt(salt: str) -> str:
    if not _PRINTABLE.fullmatch(salt):
        raise rejected("must be 1 to 128 printable ASCII characters")
    return salt


Salt = Annotated[str, AfterValidator(_check_salt)]
Stop = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[str], Tag("<list>")],
    Discriminator(
        string_or_list, custom_error_type="rejected", custom_error_message="must be a string or a list of strings"
    ),
]


BadWord = Annotated[str, Field(max_length=MAX_BAD_WORD_LENGTH, pattern=r"\S")]
CacheKey = Annotated[str, Field(max_length=MAX_SESSION_NAME)]


class StreamOptions(StrictModel):
    """Options of a stream.

    Attributes:
        include_obfuscation: ignored, because streams are not padded.
        continuous_usage_stats: with ``include_usage``, every chunk contains the usage so far (vLLM's extension).
    """

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class UsageOption(StrictModel):
    """OpenRouter's option that requests the usage at the end of a stream."""

    model_config = ConfigDict(frozen=True)

    include: bool = False


if TYPE_CHECKING:
    OptionFields = StrictModel
else:
    # The sampling options. If a model may recommend a value for an option, the default is None, so that an absent value
    # can be recognized.
    OptionFields = create_model(
        "OptionFields",
        __base__=StrictModel,
        **{
            option.name: (option.kind | None, None) if option.recommended else (option.kind, option.neutral)
            for option in OPTIONS
        },
    )


# Fields, with their neutral values, that change how tokens are sampled or what is reported about them. Beam search
# cannot apply these fields.
_NOT_BY_BEAMS: Mapping[str, Any] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), 0.0),
    "repetition_penalty": 1.0,
    **dict.fromkeys(("stream", "logprobs", "field_probabilities", "echo"), False),
    **{name: [] for name in ("stop", "stop_token_ids", "logprob_token_ids", "bad_words", "tools")},
    **dict.fromkeys(("prompt_logprobs", "top_logprobs", "allowed_token_ids")),
    **dict.fromkeys(("min_tokens", "logprob_start_len"), 0),
    "logit_bias": {},
}


class SamplingFields(AdapterFields, OptionFields):
    """Fields that chats and completions have in common. ``RequestLimits.check`` checks their bounds."""

    ignored: ClassVar[frozenset[str]] = IGNORED | _FOREIGN.ignored
    refused: ClassVar[Mapping[str, Refusal]] = {
        **_FOREIGN.refused,
        "logits_processors": Refusal("the server does not run code from requests."),
        "logit_processors": Refusal("the server does not run code from requests."),
    }

    seed: int | None = None
    n: int = 1
    min_tokens: int = 0
    stop: Stop = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logit_bias: Annotated[dict[str, float], AfterValidator(_check_logit_bias)] = Field(default_factory=dict)
    logprob_token_ids: Annotated[list[int], Field(max_length=MAX_LOGPROB_TOKEN_IDS)] = Field(default_factory=list)
    allowed_token_ids: Annotated[list[int], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] = Field(default_factory=list)
    return_token_ids: bool = False
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    cache_salt: Salt | None = None
    prompt_cache_key: CacheKey | None = None
    session_id: CacheKey | None = None
    lora_path: ModelName | None = None
    cache_control: CacheControl | None = None
    kv_hints: KvHints | None = None
    priority: PriorityName | None = None
    use_beam_search: bool = False
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] = 1.0
    stream: bool = False
    stream_options: StreamOptions | None = None
    usage: UsageOption = UsageOption()

    @model_validator(mode="after")
    def _check_stream(self) -> SamplingFields:
        if self.adapters is not None and self.lora_path:
            raise rejected("contradicts 'adapters'", "lora_path")
        if self.stream_options is not None and not self.stream:
            raise rejected("is only allowed if 'stream' is true", "stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise rejected("cannot be streamed", "prompt_logprobs")
        logprobs = getattr(self, "logprobs", None)  # Chats and completions have this field with different types.
        if self.logprob_token_ids and (logprobs is None or logprobs is False):
            raise rejected("is only allowed with 'logprobs'", "logprob_token_ids")
        if self.logprob_token_ids and getattr(self, "echo", False):
            raise rejected("cannot be used with 'echo': it applies to the tokens of the answer", "logprob_token_ids")
        return self

    @model_validator(mode="after")
    def _check_hints(self) -> SamplingFields:
        if self.kv_hints is not None:
            self.kv_hints.check_session(self.session)
        return self

    @model_validator(mode="after")
    def _check_beams(self) -> SamplingFields:
        if self.use_beam_search:
            if not 1 <= self.n <= MAX_BEAMS:
                raise rejected(f"must be from 1 to {MAX_BEAMS} if 'use_beam_search' is true", "n")
            for name in _NOT_BY_BEAMS:
                value = getattr(self, name, None)
                if value is not None and value != _NOT_BY_BEAMS[name]:
                    raise rejected("contradicts 'use_beam_search'", name)
        return self

    @property
    def include_usage(self) -> bool:
        return self.usage.include or (self.stream_options is not None and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and self.include_usage and options.continuous_usage_stats

    @property
    def session(self) -> str:
        """The name of the request's session; "" for none."""
        return self.session_id or "" if self.prompt_cache_key is None else self.prompt_cache_key

    @property
    def session_seconds(self) -> float:
        """Seconds for which the session's KV is kept after the answer; 0 to release it."""
        asked = None if self.kv_hints is None else self.kv_hints.seconds
        return SESSION_SECONDS if asked is None else asked

    @property
    def is_prefetch(self) -> bool:
        """Whether only the prompt is to be computed, before the request that will use it."""
        return self.kv_hints is not None and self.kv_hints.prefetch

    def request_fields(self) -> dict[str, Any]:
        """Return the fields of ``TextRequest`` that the body sets, except for prompt, parameters and format."""
        return {
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            "include_stop": self.include_stop_str_in_output,
            "n": self.n,
            "salt": self.cache_salt or "",
            "skip_special_tokens": self.skip_special_tokens,
            "session": self.session,
            "session_seconds": self.session_seconds,
            "pin_seconds": 0.0 if self.cache_control is None else self.cache_control.seconds,
        }

    @property
    def priority_class(self) -> Priority | None:
        return None if self.priority is None else priority_of(self.priority)

    def sampling(
        self,
        defaults: SamplingDefaults,
        *,
        max_tokens: int,
        logprobs: int | None,
        prompt_logprobs: int | None,
        logprob_start_len: int = 0,
    ) -> SamplingParams:
        """Return the engine's sampling parameters.

        The keyword arguments come from fields that differ between the routes.
        """
        given = {name: getattr(self, name) for name in OPTION_NAMES}
        options = {name: getattr(defaults, name) if value is None else value for name, value in given.items()}
        return SamplingParams(
            **options,
            max_tokens=max_tokens,
            seed=self.seed,
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            logit_bias=tuple((int(token), bias) for token, bias in self.logit_bias.items()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logprob_start_len=logprob_start_len,
            logprob_token_ids=tuple(self.logprob_token_ids),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            # Only bodies with output formats have this field.
            allowed_logprobs=bool(getattr(self, "field_probabilities", False)),
        )
