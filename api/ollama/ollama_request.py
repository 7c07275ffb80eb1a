"""Request bodies of Ollama's routes: ``/api/chat``, ``/api/generate``, ``/api/embed``, ``/api/show``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from ...engine.types import MAX_LOGPROBS, MAX_TOKEN_COUNT
from ..protocol.adapter_parts import ModelName
from ..protocol.base import Refusal, StrictModel, rejected, string_or_list
from ..protocol.chat_messages import MAX_CALLS, MAX_MESSAGES, Name
from ..protocol.pooled import MAX_DIMENSIONS, MAX_TEXTS
from ..protocol.sampling import Stop
from ..protocol.tools import Tools

_TEXT_ALONE = Refusal("only text can be taken.", ([],))
_LOADING = frozenset(
    {
        *("embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu"),
        *("num_keep", "num_thread", "numa", "use_mlock", "use_mmap", "vocab_only"),
    }
)


class OllamaOptions(StrictModel):
    """Ollama's ``options``. Options for loading a model do not affect answers, and are ignored.

    Attributes:
        num_predict: largest number of tokens of the answer; 0 or a negative number for as many as fit.
        repeat_last_n: number of last tokens to which penalties apply. Only -1 (all tokens) and 0 (none) are supported.
    """

    ignored: ClassVar[frozenset[str]] = _LOADING | {"mirostat_eta", "mirostat_tau"}
    refused: ClassVar[Mapping[str, Refusal]] = {
        "mirostat": Refusal("this sampling method is not supported: remove it.", (0,)),
        "tfs_z": Refusal("this sampling method is not supported: remove it.", (1, 1.0)),
        "typical_p": Refusal("this sampling method is not supported: remove it.", (1, 1.0)),
    }

    num_predict: Annotated[int, Field(ge=-2, le=MAX_TOKEN_COUNT)] = -1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stop = Field(default_factory=list)
    repeat_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_last_n: Annotated[int, Field(ge=-1, le=MAX_TOKEN_COUNT)] = -1
    penalize_newline: bool = True

    @model_validator(mode="after")
    def _check_penalties(self) -> OllamaOptions:
        if self.penalties and self.repeat_last_n > 0:
            raise rejected("must be -1 or 0: penalties apply to the whole text or not at all", "repeat_last_n")
        if self.penalties and self.repeat_last_n and not self.penalize_newline:
            raise rejected("must be true: penalties apply to all tokens", "penalize_newline")
        return self

    @property
    def penalties(self) -> dict[str, float | None]:
        """The penalties that are not neutral, by the field names of chats."""
        given = {
            "repetition_penalty": (self.repeat_penalty, 1.0),
            "presence_penalty": (self.presence_penalty, 0.0),
            "frequency_penalty": (self.frequency_penalty, 0.0),
        }
        return {name: value for name, (value, neutral) in given.items() if value not in (None, neutral)}

    @property
    def chat_fields(self) -> dict[str, Any]:
        """The options as fields of a chat or a completion."""
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        if self.num_predict > 0:
            fields["max_tokens"] = self.num_predict
        if self.repeat_penalty is not None or not self.repeat_last_n:
            fields["repetition_penalty"] = 1.0
        return fields | (self.penalties if self.repeat_last_n else {})


def _check_format(value: Any) -> Any:
    if not isinstance(value, dict | bool) and value not in ("", "json"):
        raise rejected("must be 'json' or a JSON Schema")
    return value


Format = Annotated[Any, AfterValidator(_check_format)]
Think = Annotated[
    Annotated[bool, Tag("<boolean>")] | Annotated[Literal["low", "medium", "high", "max"], Tag("<effort>")],
    Discriminator(
        lambda value: "<boolean>" if isinstance(value, bool) else "<effort>" if isinstance(value, str) else None,
        custom_error_type="rejected",
        custom_error_message="must be true, false, 'low', 'medium', 'high' or 'max'",
    ),
]


class CalledFunction(StrictModel):
    """The function of a call. Its arguments are an object."""

    ignored: ClassVar[frozenset[str]] = frozenset({"index", "description"})

    name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(StrictModel):
    """A call of an earlier turn."""

    ignored: ClassVar[frozenset[str]] = frozenset({"type"})

    id: Name | None = None
    function: CalledFunction


class OllamaMessage(StrictModel):
    """A message of a chat. Tool results are in the order of their calls, or name the tool or the call."""

    refused: ClassVar[Mapping[str, Refusal]] = {"images": _TEXT_ALONE}

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_CALLS)] = Field(default_factory=list)
    tool_name: Name | None = None
    tool_call_id: Name | None = None

    @model_validator(mode="after")
    def _check_role(self) -> OllamaMessage:
        if self.tool_calls and self.role != "assistant":
            raise rejected("is only allowed in messages of the assistant", "tool_calls")
        return self


class OllamaFields(StrictModel):
    """Fields of both routes that generate. ``field_probabilities`` is an extension, as for chats.

    ``keep_alive`` is ignored, because it is an option of the server.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"keep_alive", "shift", "truncate"})

    model: ModelName | None = None
    stream: bool = True
    format: Format = ""
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    think: Think | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    field_probabilities: bool = False

    @model_validator(mode="after")
    def _check_logprobs(self) -> OllamaFields:
        if self.top_logprobs and not self.logprobs:
            raise rejected("is only allowed if 'logprobs' is true", "top_logprobs")
        if self.field_probabilities and isinstance(self.format, str):
            raise rejected("needs a JSON Schema in 'format'", "field_probabilities")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens with logprobs at each position; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class OllamaChatRequest(OllamaFields):
    """Body of ``/api/chat``. A request without messages only asks for the model to be loaded."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    tools: Tools = Field(default_factory=list)


class OllamaGenerateRequest(OllamaFields):
    """Body of ``/api/generate``. A request with an empty prompt only asks for the model to be loaded.

    Attributes:
        raw: whether the prompt is used unchanged, without a chat template.
    """

    refused: ClassVar[Mapping[str, Refusal]] = {
        "context": Refusal("tokens of earlier turns are not accepted: send the conversation to /api/chat.", ([],)),
        "height": Refusal("only text can be produced.", (0,)),
        "images": _TEXT_ALONE,
        "steps": Refusal("only text can be produced.", (0,)),
        "suffix": Refusal("fill-in-the-middle is not supported.", ("",)),
        "template": Refusal("a request cannot set it: start the server with --chat-template.", ("",)),
        "width": Refusal("only text can be produced.", (0,)),
    }

    prompt: str = ""
    system: str = ""
    raw: bool = False

    @model_validator(mode="after")
    def _check_raw(self) -> OllamaGenerateRequest:
        for name in ("system", "think") if self.raw else ():
            if getattr(self, name):
                raise rejected("cannot be used with 'raw', which bypasses the chat template", name)
        return self


OllamaTexts = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[str], Field(max_length=MAX_TEXTS), Tag("<list>")],
    Discriminator(
        string_or_list, custom_error_type="rejected", custom_error_message="must be a string or a list of strings"
    ),
]


class OllamaEmbedRequest(StrictModel):
    """Body of ``/api/embed``.

    Attributes:
        truncate: whether the end of a text that is too long is cut off; otherwise such a text is refused.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"keep_alive", "options"})

    model: ModelName | None = None
    input: OllamaTexts = ""
    truncate: bool = True
    dimensions: Annotated[int, Field(ge=0, le=MAX_DIMENSIONS)] = 0


class OllamaEmbeddingsRequest(StrictModel):
    """Body of ``/api/embeddings``, the older route, for one text."""

    ignored: ClassVar[frozenset[str]] = frozenset({"keep_alive", "options"})

    model: ModelName | None = None
    prompt: str = ""


class OllamaShowRequest(StrictModel):
    """Body of ``/api/show``. ``name`` is the older name of ``model``."""

    ignored: ClassVar[frozenset[str]] = frozenset({"verbose"})

    model: ModelName | None = None
    name: ModelName | None = None
