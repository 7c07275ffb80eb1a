"""System One body: request body of ``POST /v1/systemone``, with a state and a map of questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, Tag, model_validator

from ...engine.text.questions import YES_NO, Labels, Option, QuestionKind, TypedQuestion
from ..exact_json import dumps_exact
from .adapter_parts import ModelName
from .base import Refusal, StrictModel, rejected, typed_by
from .chat_messages import MAX_NAME, ChatMessage, check_template_kwargs
from .decisions import MAX_CHOICES, MAX_LEVELS, MAX_QUESTIONS, CalibrationName
from .sampling import PriorityName, Salt

_MEDIA = Refusal("only text and JSON input is supported.", ([],))
Shown = Any
"""A text, or JSON that the model reads as text."""


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else dumps_exact(value).decode()


class Asked(StrictModel):
    """Fields of every question. ``model`` and ``calibration`` are extensions.

    Attributes:
        model: the base model or the adapter that answers this question.
        calibration: name of a calibration that ``rootgraft calibrate`` has fitted for this question.
    """

    instructions: Shown = ""
    model: ModelName | None = None
    calibration: CalibrationName | None = None


class NoulCriteria(StrictModel):
    """Descriptions of what the answers true and false mean."""

    true: Shown = None
    false: Shown = None


class NoulAsked(Asked):
    """A question whose answer is yes or no."""

    type: Literal["noul"]
    criteria: NoulCriteria | None = None

    @model_validator(mode="after")
    def _check_asks(self) -> NoulAsked:
        told = () if self.criteria is None else (self.criteria.true, self.criteria.false)
        if not any(_shown(each).strip() for each in (self.instructions, *told)):
            raise rejected("is required, or a description of true or false", "instructions")
        return self


def _check_names(criteria: dict[str, Any]) -> dict[str, Any]:
    for name in criteria:
        if not name.strip():
            raise rejected("must not have an empty name")
    return criteria


class ChoiceAsked(Asked):
    """A question whose answer is one of several named options. The value of an option is its description or null."""

    type: Literal["choice"]
    criteria: Annotated[dict[str, Shown], Field(min_length=2, max_length=MAX_CHOICES), AfterValidator(_check_names)]


def _check_levels(levels: list[Any]) -> list[Any]:
    seen: set[str] = set()
    for index, level in enumerate(levels):
        if not (text := _shown(level)).strip():
            raise rejected("must not be empty", index)
        if text in seen:
            raise rejected("is given twice", index)
        seen.add(text)
    return levels


class ScoreAsked(Asked):
    """A question whose answer is a level of an ordered scale. The first level is 0."""

    type: Literal["score"]
    criteria: Annotated[list[Shown], Field(min_length=2, max_length=MAX_LEVELS), AfterValidator(_check_levels)]


SystemOneQuestion = Annotated[
    Annotated[NoulAsked, Tag("<noul>")]
    | Annotated[ChoiceAsked, Tag("<choice>")]
    | Annotated[ScoreAsked, Tag("<score>")],
    *typed_by("noul", "choice", "score"),
]


def _check_question_names(questions: dict[str, Any]) -> dict[str, Any]:
    for name in questions:
        if not name or len(name) > MAX_NAME:
            raise rejected(f"must have names of 1 to {MAX_NAME} characters")
    return questions


class SystemOneRequest(StrictModel):
    """Body with System One's fields, the fields that open-source engines add, and ``answer_with``."""

    refused: ClassVar[Mapping[str, Refusal]] = {
        "images": _MEDIA,
        "audio": _MEDIA,
        "videos": _MEDIA,
        "joint": Refusal("questions are always answered independently.", (False,)),
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"request_id"})

    state: Shown
    questions: Annotated[
        dict[str, SystemOneQuestion],
        Field(min_length=1, max_length=MAX_QUESTIONS),
        AfterValidator(_check_question_names),
    ]
    model: ModelName | None = None
    instructions: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(check_template_kwargs)] = Field(default_factory=dict)
    answer_with: Literal["letters", "values"] = "letters"
    cache_salt: Salt | None = None
    priority: PriorityName | None = None

    @model_validator(mode="after")
    def _check_state(self) -> SystemOneRequest:
        if not _shown(self.state).strip():
            raise rejected("must not be empty", "state")
        return self

    @property
    def messages(self) -> list[ChatMessage]:
        """The instructions and the state as a conversation."""
        told = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        return [*told, ChatMessage(role="user", content=_shown(self.state))]

    @property
    def typed_questions(self) -> list[TypedQuestion]:
        """The questions in the form that is rendered for the model."""
        return [_typed(name, question, Labels(self.answer_with)) for name, question in self.questions.items()]


def _typed(name: str, question: Any, labels_by: Labels) -> TypedQuestion:
    match question:
        case ChoiceAsked():
            options = tuple(Option(option, _shown(told)) for option, told in question.criteria.items())
            kind = QuestionKind.CHOICE
        case ScoreAsked():
            options, kind = tuple(Option(_shown(level)) for level in question.criteria), QuestionKind.SCORE
        case _:
            told = question.criteria or NoulCriteria()
            meanings = (_shown(told.true), _shown(told.false))
            options = tuple(map(Option, YES_NO, meanings))
            kind = QuestionKind.PREDICATE
    return TypedQuestion(kind, _shown(question.instructions), options, labels_by, f"questions.{name}.criteria")
