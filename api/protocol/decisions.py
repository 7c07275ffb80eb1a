"""Decision bodies: body of ``POST /v1/decisions``, with typed questions about an input, as in OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from ...engine.text.questions import YES_NO, Labels, Option, QuestionKind, TypedQuestion
from ...engine.types import CALIBRATION_NAME
from ..exact_json import dumps_exact
from .adapter_parts import AdapterFields, ModelName
from .base import StrictModel, rejected, string_or_list, typed_by
from .chat_messages import MAX_NAME, MAX_PARTS, CacheBreakpoint, ChatMessage, FunctionCall, ToolCall
from .response_items import MAX_ITEMS, Status
from .sampling import CacheKey, PriorityName, Salt

MAX_QUESTIONS = 400
MAX_CHOICES = 255
MAX_LEVELS = 100
MAX_LABEL = 64 << 10  # Largest number of characters. The number of tokens of all labels has a separate limit.
MAX_JSON_BYTES = 256 << 10
MAX_JSON_DEPTH = 32
MAX_JSON_VALUES = 10_000

_PART_KINDS = {"input_image": "images", "input_audio": "audio", "input_file": "files"}
Name = Annotated[str, Field(max_length=MAX_NAME)]
CalibrationName = Annotated[str, Field(pattern=f"^{CALIBRATION_NAME}$")]


class InputText(StrictModel):
    """A text part of the input."""

    type: Literal["input_text", "output_text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None

    @property
    def shown(self) -> str:
        return self.text


class RefusalPart(StrictModel):
    """A refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def shown(self) -> str:
        return self.refusal


def _check_json(data: Any) -> Any:
    """Refuse JSON beyond OpenAI's limits."""
    level, values = [data], 0
    for depth in range(MAX_JSON_DEPTH + 1):
        values += len(level)
        if values > MAX_JSON_VALUES:
            raise rejected(f"must have at most {MAX_JSON_VALUES} values")
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            break
        if depth == MAX_JSON_DEPTH:
            raise rejected(f"must have at most {MAX_JSON_DEPTH} levels")
    if len(dumps_exact(data)) > MAX_JSON_BYTES:
        raise rejected(f"must have at most {MAX_JSON_BYTES} bytes")
    return data


class InputJson(StrictModel):
    """An object or a list of objects, which the model reads as compact JSON."""

    type: Literal["input_json"]
    data: Annotated[dict[str, Any] | list[dict[str, Any]], BeforeValidator(_check_json)]

    @property
    def shown(self) -> str:
        return dumps_exact(self.data).decode()


def _check_part(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in _PART_KINDS:
        raise rejected(f"must be a text or JSON part; {_PART_KINDS[kind]} is not supported", "type")
    return value


def _part_form(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return None
    return {"input_json": "<json>", "refusal": "<refusal>"}.get(kind, "<text>")


Part = Annotated[
    Annotated[InputText, Tag("<text>")]
    | Annotated[InputJson, Tag("<json>")]
    | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(
        _part_form,
        custom_error_type="rejected",
        custom_error_message="must be a part with the type 'input_text' or 'input_json'",
    ),
    BeforeValidator(_check_part),
]

Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag("<list>")],
    Discriminator(
        string_or_list, custom_error_type="rejected", custom_error_message="must be a string or a list of parts"
    ),
]


def _shown(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else "\n".join(part.shown for part in content)


class DecisionMessage(StrictModel):
    """A message of the input. ``phase`` is meant for OpenAI's models and is ignored."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: Literal["commentary", "final_answer"] | None = None


class DecisionCall(StrictModel):
    """A tool call in the input. ``arguments`` belongs to a function call, ``input`` to a call of a custom tool."""

    type: Literal["function_call", "custom_tool_call"]
    call_id: Name
    name: Name
    arguments: str | None = None
    input: str | None = None
    id: Name | None = None
    namespace: Name | None = None
    status: Status | None = None

    @model_validator(mode="after")
    def _check_given(self) -> DecisionCall:
        wanted, other = ("arguments", "input") if self.type == "function_call" else ("input", "arguments")
        if getattr(self, wanted) is None:
            raise rejected("is required", wanted)
        if getattr(self, other) is not None:
            raise rejected(f"is not for a {self.type}", other)
        return self

    @property
    def call(self) -> ToolCall:
        arguments = orjson.dumps({"input": self.input}).decode() if self.arguments is None else self.arguments
        return ToolCall(id=self.call_id, function=FunctionCall(name=self.name, arguments=arguments))


class DecisionOutput(StrictModel):
    """The result of a tool call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Name
    output: Content
    id: Name | None = None
    status: Status | None = None


def _item_form(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind in (None, "message"):
        return "<message>"
    if kind in ("function_call", "custom_tool_call"):
        return "<call>"
    return "<output>" if kind in ("function_call_output", "custom_tool_call_output") else None


Item = Annotated[
    Annotated[DecisionMessage, Tag("<message>")]
    | Annotated[DecisionCall, Tag("<call>")]
    | Annotated[DecisionOutput, Tag("<output>")],
    Discriminator(
        _item_form,
        custom_error_type="rejected",
        custom_error_message="must be a message, a function_call, a custom_tool_call or the output of one",
    ),
]

Input = Annotated[
    Annotated[str, Tag("<string>"), Field(min_length=1)]
    | Annotated[list[Item], Tag("<list>"), Field(min_length=1, max_length=MAX_ITEMS)],
    Discriminator(
        string_or_list, custom_error_type="rejected", custom_error_message="must be a string or a list of items"
    ),
]


class QuestionFields(StrictModel):
    """Fields of every question. ``model`` and ``calibration`` are extensions.

    Attributes:
        model: the base model or the adapter that answers this question.
        calibration: name of a calibration that ``rootgraft calibrate`` has fitted for this question.
    """

    instructions: Content
    name: Name | None = None
    model: ModelName | None = None
    calibration: CalibrationName | None = None


class PredicateQuestion(QuestionFields):
    """A question that asks for the probability that a statement about the input is true."""

    type: Literal["predicate"]


class Choice(StrictModel):
    """A value that can be chosen. A string and a boolean with the same text are different values."""

    value: Annotated[str, Field(max_length=MAX_LABEL)] | bool
    description: str = ""

    @property
    def text(self) -> str:
        return self.value if isinstance(self.value, str) else str(self.value).lower()


def _check_choices(choices: list[Choice]) -> list[Choice]:
    seen: set[tuple[type, str | bool]] = set()
    for index, choice in enumerate(choices):
        if isinstance(choice.value, str) and not choice.value.strip():
            raise rejected("must not be empty", index, "value")
        if (key := (type(choice.value), choice.value)) in seen:
            raise rejected("is given twice", index, "value")
        seen.add(key)
    return choices


class ChoiceQuestion(QuestionFields):
    """A question whose answer is one of several values."""

    type: Literal["choice"]
    choices: Annotated[list[Choice], Field(min_length=2, max_length=MAX_CHOICES), AfterValidator(_check_choices)]


class ScoreLevel(StrictModel):
    """A level of a scale."""

    label: Annotated[str, Field(max_length=MAX_LABEL)]
    description: str = ""


def _check_levels(levels: list[ScoreLevel]) -> list[ScoreLevel]:
    seen: set[str] = set()
    for index, level in enumerate(levels):
        if not level.label.strip():
            raise rejected("must not be empty", index, "label")
        if level.label in seen:
            raise rejected("is given twice", index, "label")
        seen.add(level.label)
    return levels


class ScoreQuestion(QuestionFields):
    """A question whose answer is a level of an ordered scale. The first level is 0."""

    type: Literal["score"]
    levels: Annotated[list[ScoreLevel], Field(min_length=2, max_length=MAX_LEVELS), AfterValidator(_check_levels)]


Question = Annotated[
    Annotated[PredicateQuestion, Tag("<predicate>")]
    | Annotated[ChoiceQuestion, Tag("<choice>")]
    | Annotated[ScoreQuestion, Tag("<score>")],
    *typed_by("predicate", "choice", "score"),
]


class CacheOptions(StrictModel):
    """OpenAI's options of its prompt cache.

    They have no effect, because the prefix cache reuses every prefix in any mode.
    """

    model_config = ConfigDict(frozen=True)

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class DecisionRequest(AdapterFields):
    """A request for decisions, with OpenAI's fields and extensions.

    The extensions are ``adapters``, ``answer_with``, ``cache_salt``, ``priority``, and further fields of questions.

    Attributes:
        answer_with: kind of the labels with which the model answers, see ``Labels``.
    """

    ignored: ClassVar[frozenset[str]] = frozenset({"safety_identifier"})

    input: Input
    questions: Annotated[list[Question], Field(min_length=1, max_length=MAX_QUESTIONS)]
    prompt_cache_key: CacheKey | None = None
    prompt_cache_options: CacheOptions | None = None
    answer_with: Literal["letters", "values"] = "letters"
    cache_salt: Salt | None = None
    priority: PriorityName | None = None

    @model_validator(mode="after")
    def _check_calls(self) -> DecisionRequest:
        known: set[str] = set()
        for index, item in enumerate(() if isinstance(self.input, str) else self.input):
            if isinstance(item, DecisionCall):
                known.add(item.call_id)
            elif isinstance(item, DecisionOutput) and item.call_id not in known:
                raise rejected("names no call before it", "input", index, "call_id")
        return self

    @property
    def typed_questions(self) -> list[TypedQuestion]:
        """The questions in the form that is rendered for the model."""
        return [_typed(question, index, Labels(self.answer_with)) for index, question in enumerate(self.questions)]

    @property
    def messages(self) -> list[ChatMessage]:
        """The input as the messages of a conversation."""
        if isinstance(self.input, str):
            return [ChatMessage(role="user", content=self.input)]
        return list(_messages(self.input))


def _messages(items: list[Any]) -> Iterator[ChatMessage]:
    """Convert the items to chat messages. A call is added to the assistant's message before it."""
    said: ChatMessage | None = None  # The assistant's last message; None if no call may be added to it any more.
    for item in items:
        if isinstance(item, DecisionCall):
            if said is None:
                said = ChatMessage(role="assistant", content="")
            said.tool_calls.append(item.call)
            continue
        if said is not None:
            yield said
            said = None
        if isinstance(item, DecisionOutput):
            yield ChatMessage(role="tool", content=_shown(item.output), tool_call_id=item.call_id)
        elif item.role == "assistant":
            said = ChatMessage(role="assistant", content=_shown(item.content))
        else:
            yield ChatMessage(role=item.role, content=_shown(item.content))
    if said is not None:
        yield said


def _typed(question: Any, index: int, labels_by: Labels) -> TypedQuestion:
    field = f"questions[{index}]"
    match question:
        case ChoiceQuestion():
            options = tuple(Option(each.text, each.description) for each in question.choices)
            kind, field = QuestionKind.CHOICE, f"{field}.choices"
        case ScoreQuestion():
            options = tuple(Option(each.label, each.description) for each in question.levels)
            kind, field = QuestionKind.SCORE, f"{field}.levels"
        case _:
            options, kind = tuple(map(Option, YES_NO)), QuestionKind.PREDICATE
    return TypedQuestion(kind, _shown(question.instructions), options, labels_by, field)
