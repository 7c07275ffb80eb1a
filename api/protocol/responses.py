"""Request bodies of ``POST /v1/responses`` and ``POST /v1/responses/input_tokens``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, Tag, model_validator

from ...engine.types import MAX_LOGPROBS, MAX_TOKEN_COUNT
from .adapter_parts import AdapterFields
from .base import FormatName, Id, Refusal, StrictModel, rejected
from .cache_control import CacheControl
from .chat import TemplateKwargs
from .foreign_fields import foreign_rules
from .kv_hints import KvHints
from .reasoning import Budget, Effort
from .response_items import Input, InputItem, items_left_out
from .sampling import CacheKey, OptionFields, PriorityName, Salt, Stop, Verbosity, verbosity_left_out
from .structured import Schema
from .tools import (
    BY_CHOICE_FORM,
    MAX_TOOLS,
    Definition,
    OtherChoice,
    OtherTool,
    by_tool_type,
    check_groups,
    tools_left_out,
)

_FOREIGN = foreign_rules("responses")
LOGPROBS = "message.output_text.logprobs"
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_SAFETY_IDENTIFIER = 64  # OpenAI's limit.
MAX_USER = 512


def check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    """Check the metadata against OpenAI's limits."""
    if len(metadata) > MAX_METADATA:
        raise rejected(f"must have at most {MAX_METADATA} keys")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise rejected(
                f"must have keys of at most {MAX_METADATA_KEY} and values of at most {MAX_METADATA_VALUE} characters"
            )
    return metadata


class TextFormat(StrictModel):
    """Output format of the answer. A schema is enforced even if ``strict`` is not set."""

    type: Literal["text", "json_object", "json_schema"]
    name: FormatName | None = None
    description: str | None = None
    schema_: Schema = Field(default=None, alias="schema", validate_default=False)
    strict: bool = False

    @model_validator(mode="after")
    def _check_type(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise rejected("is required where 'type' is 'json_schema'", "schema")
        if self.type != "json_schema" and self.schema_ is not None:
            raise rejected(f"is only allowed with the type 'json_schema', not with '{self.type}'", "schema")
        return self


class TextConfig(StrictModel):
    """Options of the answer's text.

    A ``verbosity`` other than "medium" has no effect, and a response header names it.
    """

    format: TextFormat = Field(default_factory=lambda: TextFormat(type="text"))
    verbosity: Verbosity = None


class FunctionTool(StrictModel):
    """A function tool. ``parameters`` is enforced even if ``strict`` is not set."""

    type: Literal["function"]
    name: Id
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomFormat(StrictModel):
    """Format of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: Definition | None = None

    @model_validator(mode="after")
    def _check_type(self) -> CustomFormat:
        for name in ("syntax", "definition"):
            if self.type == "grammar" and getattr(self, name) is None:
                raise rejected("is required where 'type' is 'grammar'", name)
            if self.type == "text" and getattr(self, name) is not None:
                raise rejected("is only allowed with the type 'grammar', not with 'text'", name)
        check_groups(self.syntax, self.definition)
        return self


class CustomResponseTool(StrictModel):
    """A custom tool, whose input is a text."""

    type: Literal["custom"]
    name: Id
    description: str | None = None
    format: CustomFormat = CustomFormat(type="text")


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("<served>")]
    | Annotated[CustomResponseTool, Tag("<second>")]
    | Annotated[OtherTool, Tag("<other>")],
    by_tool_type("function", "custom"),
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)]


class NamedFunction(StrictModel):
    """A choice that forces a call of one function."""

    type: Literal["function"]
    name: Id


class NamedCustom(StrictModel):
    """A choice that forces a call of one custom tool."""

    type: Literal["custom"]
    name: Id


AnyChoice = Annotated[
    Annotated[NamedFunction, Tag("<served>")]
    | Annotated[NamedCustom, Tag("<second>")]
    | Annotated[OtherChoice, Tag("<other>")],
    by_tool_type("function", "custom"),
]


class AllowedFunctions(StrictModel):
    """A choice that allows only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyChoice], Field(min_length=1, max_length=MAX_TOOLS)]


Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedFunction, Tag("<named>")]
    | Annotated[NamedCustom, Tag("<custom>")]
    | Annotated[AllowedFunctions, Tag("<allowed>")],
    BY_CHOICE_FORM,
]

# OpenAI's values of ``include``. All except the logprobs belong to features that are not implemented, and have no
# effect.
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class ReasoningConfig(StrictModel):
    """OpenAI's options for reasoning. The reasoning is shown unchanged, so a kind of summary cannot be chosen."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(StrictModel):
    """Options of a stream. ``include_obfuscation`` is ignored, because streams are not padded."""

    include_obfuscation: bool = False


_PROMPT_REFUSED = {"conversation": Refusal("continue a response with 'previous_response_id'.")}


class ResponsePrompt(AdapterFields):
    """Fields of both routes, which determine the prompt and its tokens.

    ``truncation`` is accepted and has no effect: with "auto" the prompt may be truncated, but here a prompt that does
    not fit is refused.
    """

    instructions: str | None = None
    previous_response_id: Id | None = None
    reasoning: ReasoningConfig = Field(default_factory=ReasoningConfig)
    thinking_token_budget: Budget | None = None
    text: TextConfig = Field(default_factory=TextConfig)
    tools: Tools = Field(default_factory=list)
    tool_choice: Choice = "auto"
    parallel_tool_calls: bool = True
    truncation: Literal["auto", "disabled"] | None = None
    prompt_cache_key: CacheKey | None = None
    cache_salt: Salt | None = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)


class ResponseRequest(ResponsePrompt, OptionFields):
    """Body of a response request: OpenAI's fields that change the answer or are repeated in it; vLLM's extensions."""

    ignored: ClassVar[frozenset[str]] = _FOREIGN.ignored | {
        *("max_tool_calls", "prompt_cache_options", "prompt_cache_retention", "service_tier")
    }
    refused: ClassVar[Mapping[str, Refusal]] = {
        **_FOREIGN.refused,
        **_PROMPT_REFUSED,
        "access_programs": Refusal("they are not supported."),
        "background_options": Refusal("background responses start at once."),
        "context_management": Refusal("the server never shortens a conversation.", ([],)),
        "image": Refusal("the model only generates text."),
        "moderation": Refusal("moderation is not supported."),
        "prompt": Refusal("stored prompts are not supported: use 'instructions' and 'input'."),
    }

    input: Input
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_COUNT)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    include: list[Includable] = Field(default_factory=list)
    store: bool = True
    background: bool = False
    stream: bool = False
    generate: bool = True
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[dict[str, str], AfterValidator(check_metadata)] = Field(default_factory=dict)
    user: Annotated[str, Field(max_length=MAX_USER)] | None = None
    safety_identifier: Annotated[str, Field(max_length=MAX_SAFETY_IDENTIFIER)] | None = None
    cache_control: CacheControl | None = None
    kv_hints: KvHints | None = None
    seed: int | None = None
    field_probabilities: bool = False
    stop: Stop = Field(default_factory=list)
    ignore_eos: bool = False
    priority: PriorityName | None = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ResponseRequest:
        if self.stream_options is not None and not self.stream:
            raise rejected("is only allowed if 'stream' is true", "stream_options")
        if self.background and not self.store:
            raise rejected("needs 'store': true, so that the response can be retrieved", "background")
        if self.field_probabilities and self.text.format.type != "json_schema":
            raise rejected("needs a JSON Schema in 'text.format'", "field_probabilities")
        if self.kv_hints is not None:
            self.kv_hints.check_session(self.prompt_cache_key or "")
            self.generate = self.generate and not self.kv_hints.prefetch
        if not self.generate and self.background:
            raise rejected("cannot be used with 'generate': false", "background")
        _check_input(self, self.input)
        return self

    @property
    def left_out(self) -> list[str]:
        """Places and types of tools that cannot be called and of their items, and a verbosity without effect."""
        verbosity = verbosity_left_out("text.verbosity", self.text.verbosity)
        return [*tools_left_out(self.tools), *items_left_out(self.input), *verbosity]

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens with logprobs at each position; None for no logprobs."""
        return self.top_logprobs if self.top_logprobs or LOGPROBS in self.include else None


class CountInputTokensRequest(ResponsePrompt):
    """The fields of a response request that determine the number of its input tokens."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        **_PROMPT_REFUSED,
        "personality": Refusal("write it into 'instructions'."),
    }

    input: Input = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_pairs(self) -> CountInputTokensRequest:
        _check_input(self, self.input)
        return self


def _check_input(prompt: ResponsePrompt, given: str | list[InputItem]) -> None:
    """Refuse an empty input, unless the prompt has other content."""
    if given == [] and prompt.instructions is None and prompt.previous_response_id is None:
        raise rejected("must not be empty", "input")
