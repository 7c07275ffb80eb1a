"""Branch calls: a branch's calls of a model (prompt, parameters, format, answer), and the interface of backends."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from pydantic import PydanticUserError, TypeAdapter
from pydantic_core import SchemaError

from ..engine.serving.ending_tree import EndingTree
from ..engine.serving.output_processor import BUDGET
from .errors import CallFailed
from .token_report import Report

Message = dict[str, str]
_LONGEST_PATH = 128


class FormatKind(StrEnum):
    """Kind of an answer format."""

    SCHEMA = "schema"
    REGEX = "regex"
    CHOICES = "choices"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """Format of a structured answer: a JSON Schema, a regular expression, or a list of strings."""

    kind: FormatKind
    value: Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation for the model.

    Attributes:
        messages: dicts with ``role`` and ``content``. If the last message is the assistant's, the answer continues it.
        adapter: name of an adapter; None for the session's model.
        branch: path of the calling branch, whose next call will extend this conversation.
    """

    messages: tuple[Message, ...]
    adapter: str | None = None
    branch: str = ""

    @property
    def is_open(self) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def followed_by(self, text: str) -> Prompt:
        """Return the prompt with further text in the assistant's message."""
        *before, last = self.messages if self.is_open else (*self.messages, {"role": "assistant", "content": ""})
        return replace(self, messages=(*before, {"role": "assistant", "content": last["content"] + text}))


@dataclass(frozen=True, slots=True)
class CallParams:
    """Sampling parameters and answer format of a call.

    Attributes:
        format: format of the answer; None for free text.
        temperature: sampling temperature; 0 is greedy.
        stop: stop strings, which are not part of the answer.
        seed: seed for sampling; None for a new seed in each call.
    """

    format: AnswerFormat | None
    max_tokens: int
    temperature: float
    stop: tuple[str, ...]
    seed: int | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    Attributes:
        finish_reason: as in OpenAI's API.
        stop: the stop string or token id that ended the answer; None if the answer ended otherwise.
        shortest: number of tokens of the shortest possible answer in the format; None if the answer was not cut off or
            the number is not known.
    """

    text: str
    finish_reason: str
    report: Report
    stop: str | int | None = None
    shortest: int | None = None


def stop_string(reason: str | int | None, stops: Sequence[str]) -> str | int | None:
    """Return the requested stop string that ended an answer, from its ``stop_reason``.

    An answer that was completed early to stay within its token budget has the ``stop_reason`` ``budget``. This is not a
    stop string, unless ``stops`` contains it.
    """
    return None if reason == BUDGET and BUDGET not in stops else reason


class ModelBackend(Protocol):
    """Interface to a model. All methods are thread-safe and raise ``CallFailed``."""

    def stream(self, prompt: Prompt, params: CallParams) -> Generator[str, None, Completion]:
        """Yield the pieces of an answer. Returns the whole answer. Closing the generator aborts the request."""

    def score(self, prompt: Prompt, choices: Sequence[str]) -> tuple[list[list[float]], Report]:
        """Return, for each choice as the next text, the logprobs of the tokens from ``first_difference`` on.

        The choices are sent as a tree after their common beginning, which is computed only once.
        """

    def warm(self, prompt: Prompt, pin: int) -> Report:
        """Compute the KV of a prompt into the prefix cache. If ``pin`` is not 0, pin it there for this many seconds."""

    def close(self) -> None:
        """Release the backend's resources."""


def session_name(root: str, branch: str) -> str:
    """Return the session name (``prompt_cache_key``) of a branch's calls.

    Args:
        root: unique id of the program's session.
        branch: path of the branch; a long path is hashed.
    """
    short = branch if len(branch) <= _LONGEST_PATH else hashlib.sha256(branch.encode()).hexdigest()
    return f"{root}/{short}"


def first_difference(base: Sequence[int], wholes: Sequence[Sequence[int]]) -> int:
    """Return the first position at which the tokens of the prompt and of the prompt with each choice differ.

    The position may be within the prompt, because the beginning of a choice may merge with the prompt's last token. The
    sums of logprobs from this position on can be compared between choices.

    Raises:
        CallFailed: a choice adds no token.
    """
    start = 0
    for tokens in zip(base, *wholes, strict=False):
        if len(set(tokens)) > 1:
            break
        start += 1
    if start >= min(map(len, wholes)):
        raise CallFailed("one of the choices adds no token to the prompt")
    return start


def choice_tree(base: Sequence[int], wholes: Sequence[Sequence[int]]) -> EndingTree:
    """Return the tree of choices after their common beginning.

    Args:
        base: tokens of the prompt.
        wholes: token ids of the prompt followed by each choice.

    Raises:
        CallFailed: a choice adds no token, or has no token in common with the prompt.
    """
    start = first_difference(base, wholes)
    if start == 0:
        raise CallFailed(
            "the choices differ in the first token of the prompt, which has no probability: begin with a text"
        )
    return EndingTree(array("i", wholes[0][:start]), [list(whole[start:]) for whole in wholes])


def check_text(name: str, value: Any) -> str:
    """Return a text. Raises ValueError, with the name of the argument, if the value is not a text."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} holds half of a surrogate pair, at position {error.start}") from error
    return value


def check_texts(name: str, values: Any) -> list[str]:
    """Return texts as a list.

    Raises ValueError, with the name of the argument, if a text is empty or of another type.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a list of strings, not {type(values).__name__}")
    listed = [check_text(f"{name}[{index}]", each) for index, each in enumerate(values)]
    if not all(listed):
        raise ValueError(f"{name}[{listed.index('')}] must not be empty")
    return listed


def check_choices(choices: Any) -> list[str]:
    """Return the choices as a list. Raises ValueError if there are none, one is empty, or one is not a string."""
    listed = check_texts("choices", choices)
    if not listed:
        raise ValueError("choices must have at least one string")
    return listed


def answer_format(schema: Any, regex: str | None, choices: Iterable[str] | None) -> AnswerFormat | None:
    """Return the requested answer format; None for free text. Raises ValueError for an invalid format, or several.

    Args:
        schema: a JSON Schema as a mapping, or any type that pydantic supports: a model, a dataclass, ``list[int]``.
    """
    given = {
        FormatKind.SCHEMA: None if schema is None else _json_schema(schema),
        FormatKind.REGEX: None if regex is None else check_text("regex", regex),
        FormatKind.CHOICES: None if choices is None else check_choices(choices),
    }
    formats = [AnswerFormat(kind, value) for kind, value in given.items() if value is not None]
    if len(formats) > 1:
        raise ValueError(f"{formats[0].kind} and {formats[1].kind} contradict each other: give one")
    return formats[0] if formats else None


def _json_schema(schema: Any) -> Any:
    if isinstance(schema, Mapping):
        try:
            json.dumps(dict(schema), allow_nan=False)
            return dict(schema)
        except (TypeError, ValueError) as error:
            raise ValueError(f"schema is not JSON: {error}") from error
    wanted = "must be a type that pydantic supports, or a JSON Schema as a dict"
    # Pydantic would evaluate a string as an annotation.
    if isinstance(schema, str):
        raise ValueError(f"schema {wanted}, not str")
    try:
        return TypeAdapter(schema).json_schema()
    except (PydanticUserError, SchemaError) as error:
        raise ValueError(f"schema {wanted}: {str(error).splitlines()[0]}") from error


def parse_value(text: str, schema: Any) -> Any:
    """Return an instance if ``schema`` is a type, parsed JSON for a JSON Schema, else the text. Raises ValueError."""
    if schema is None:
        return text
    return json.loads(text) if isinstance(schema, Mapping) else TypeAdapter(schema).validate_json(text)
