"""What a branch asks a model, and what comes back, wherever the model runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from pydantic import TypeAdapter

from .errors import CallFailed
from .token_report import Report

Message = dict[str, str]
_LONGEST_PATH = 128


class FormatKind(StrEnum):
    """How the form of an answer is given."""

    SCHEMA = "schema"
    REGEX = "regex"
    CHOICES = "choices"


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """What an answer must follow: a JSON Schema, a regular expression, or one of several strings."""

    kind: FormatKind
    value: Any


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation, and who answers it.

    Attributes:
        messages: with ``role`` and ``content``. If the last one is the assistant's, the answer goes on from it.
        adapter: name of an adapter, None for the session's model.
        branch: path of the branch that asks. Its next call will go on from this one.
    """

    messages: tuple[Message, ...]
    adapter: str | None = None
    branch: str = ""

    @property
    def is_open(self) -> bool:
        """Whether the assistant's message has begun, so that the answer continues it."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def followed_by(self, text: str) -> Prompt:
        """The prompt with more text of the assistant's."""
        *before, last = self.messages if self.is_open else (*self.messages, {"role": "assistant", "content": ""})
        return replace(self, messages=(*before, {"role": "assistant", "content": last["content"] + text}))


@dataclass(frozen=True, slots=True)
class CallParams:
    """How an answer is drawn.

    Attributes:
        form: what it must follow, None for free text.
        max_tokens: most tokens of it.
        temperature: 0 is greedy.
        stop: strings that end it and are no part of it.
        seed: the same seed gives the same answer; None for a new one each time.
    """

    form: AnswerFormat | None
    max_tokens: int
    temperature: float
    stop: tuple[str, ...]
    seed: int | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer.

    Attributes:
        finish_reason: OpenAI's ``finish_reason``.
        shortest: tokens that the shortest answer of its form takes, if it was cut off and that is known.
    """

    text: str
    finish_reason: str
    report: Report
    shortest: int | None = None


class ModelBackend(Protocol):
    """Where the model runs. All methods may be called from several threads at once and raise ``CallFailed``."""

    def stream(self, prompt: Prompt, draw: CallParams) -> Generator[str, None, Completion]:
        """The pieces of an answer as they come; the generator returns the whole. Closing it gives the answer up."""

    def score(self, prompt: Prompt, choices: Sequence[str]) -> tuple[list[list[float]], Report]:
        """Log-probabilities of the tokens of each choice as the next text, from the first one that tells them apart
        from the prompt on."""

    def warm(self, prompt: Prompt, pin: int) -> Report:
        """Compute a prompt, so that it is in the cache, and pin it there for so many seconds, if not 0."""

    def close(self) -> None:
        """Let go of what the backend holds."""


def session_name(root: str, branch: str) -> str:
    """The name under which a branch's calls belong together on a server or an engine.

    Args:
        root: what no other session has.
        branch: its path; of a very long one a digest.
    """
    short = branch if len(branch) <= _LONGEST_PATH else hashlib.sha256(branch.encode()).hexdigest()
    return f"{root}/{short}"


def first_difference(base: Sequence[int], wholes: Sequence[Sequence[int]]) -> int:
    """Where the tokens of a prompt and of the prompt with each choice are no longer the same.

    A choice may change the token before it, so this may lie within the prompt; the sums are comparable all the same.

    Raises:
        CallFailed: a choice adds nothing.
    """
    start = 0
    for tokens in zip(base, *wholes, strict=False):
        if len(set(tokens)) > 1:
            break
        start += 1
    if start >= min(map(len, wholes)):
        raise CallFailed("one of the choices adds no token to the prompt")
    return start


def answer_format(schema: Any, regex: str | None, choices: Sequence[str] | None) -> AnswerFormat | None:
    """The one form that was given, None for free text. Raises ValueError for two.

    Args:
        schema: a JSON Schema as a mapping, or any type that pydantic knows: a model, a dataclass, ``list[int]``.
    """
    given = {
        FormatKind.SCHEMA: None if schema is None else _json_schema(schema),
        FormatKind.REGEX: regex,
        FormatKind.CHOICES: None if choices is None else list(choices),
    }
    forms = [AnswerFormat(kind, value) for kind, value in given.items() if value is not None]
    if len(forms) > 1:
        raise ValueError(f"{forms[0].kind} and {forms[1].kind} contradict each other: give one")
    return forms[0] if forms else None


def _json_schema(schema: Any) -> Any:
    return dict(schema) if isinstance(schema, Mapping) else TypeAdapter(schema).json_schema()


def parse_value(text: str, schema: Any) -> Any:
    """The answer as an instance of the type, as parsed JSON for a schema, else as it is. Raises ValueError."""
    if schema is None:
        return text
    return json.loads(text) if isinstance(schema, Mapping) else TypeAdapter(schema).validate_json(text)
