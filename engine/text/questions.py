"""Typed questions about an input: builds the text of a question in the prompt, and the labels that may answer it.

A question is appended to the user's last turn::

    <input>

    Question: Which team should handle this?
    A: billing - invoices and refunds
    B: support
    Answer with the letter of one option only.

The labels of options are single letters, or pairs of letters if there are more than 26 options. The labels of levels
are digits. All have the same length, so no label is a prefix of another one. With ``Labels.VALUES``, the texts of the
options are the labels, for example for an adapter that was trained to answer with these texts.
"""

from __future__ import annotations

import string
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import product
from typing import Any

from ..errors import RequestError
from .tokenizer import Tokenizer

YES_NO = ("Yes", "No")


class QuestionKind(StrEnum):
    """Kind of a question: yes or no, one of several options, or a level on a scale."""

    PREDICATE = "predicate"
    CHOICE = "choice"
    SCORE = "score"


class Labels(StrEnum):
    """Form of the model's answer: a short label of an option, or the text of the option."""

    LETTERS = "letters"
    VALUES = "values"


@dataclass(frozen=True, slots=True)
class Option:
    """A possible answer to a question. ``description`` is "" if there is none."""

    text: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class TypedQuestion:
    """A question with its options. The options of a predicate are ``YES_NO``.

    Attributes:
        field: name of the question's field in the request, for error messages.
    """

    kind: QuestionKind
    instructions: str
    options: tuple[Option, ...]
    labels_by: Labels = Labels.LETTERS
    field: str = "questions"

    @property
    def labels(self) -> tuple[str, ...]:
        """The texts with which the model may answer; one for each option."""
        if self.labels_by is Labels.VALUES or self.kind is QuestionKind.PREDICATE:
            return tuple(option.text for option in self.options)
        alphabet = string.digits if self.kind is QuestionKind.SCORE else string.ascii_uppercase
        return _codes(alphabet, len(self.options))

    @property
    def text(self) -> str:
        """The text of the question in the prompt, from "Question:" to a last line on the form of the answer."""
        lines = [f"Question: {self.instructions.strip()}"]
        is_code = self.labels_by is Labels.LETTERS
        if self.kind is QuestionKind.PREDICATE:
            lines += [f"{each.text}: {each.description}" for each in self.options if each.description]
            return "\n".join([*lines, "Answer with Yes or No only."])
        for label, option in zip(self.labels, self.options, strict=True):
            shown = f"{label}: {option.text}" if is_code else f"- {option.text}"
            lines.append(f"{shown} - {option.description}" if option.description else shown)
        return "\n".join([*lines, self._last_line])

    @property
    def _last_line(self) -> str:
        what = "level" if self.kind is QuestionKind.SCORE else "option"
        if self.labels_by is Labels.VALUES:
            return f"Answer with the text of one {what} only."
        how = "number" if self.kind is QuestionKind.SCORE else "letter" if len(self.options) <= 26 else "letters"
        return f"Answer with the {how} of one {what} only."


def asking(messages: Sequence[dict[str, Any]], question: TypedQuestion) -> list[dict[str, Any]]:
    """Return a conversation that asks a question: in its last message if that is the user's, else in a new message."""
    *before, last = messages
    if last["role"] == "user":
        return [*before, {**last, "content": f"{last['content']}\n\n{question.text}"}]
    return [*messages, {"role": "user", "content": question.text}]


@lru_cache(maxsize=1024)
def _codes(alphabet: str, count: int) -> tuple[str, ...]:
    """Return ``count`` codes of equal length over the alphabet, in lexicographic order."""
    width = 1
    while len(alphabet) ** width < count:
        width += 1
    return tuple("".join(each) for each, _ in zip(product(alphabet, repeat=width), range(count), strict=False))


@dataclass(frozen=True, slots=True)
class QuestionTokens:
    """A question in tokens.

    Attributes:
        prompt: tokens of the prompt, up to the beginning of the answer.
        endings: token lists that may follow the prompt, label by label. If a label must be ended by a further token,
            the label has one ending for each such token.
        num_ends: number of endings of each label; 1 if labels need no further token.
    """

    prompt: array[int]
    endings: tuple[tuple[int, ...], ...]
    num_ends: int = 1


class QuestionEncoder:
    """Encodes the prompts and labels of questions about one input.

    The common beginning of all prompts is encoded only once, provided that the first prompt has the same tokens when it
    is encoded as a whole and in two parts. In every prompt, the second part begins with the word "Question:".

    Args:
        end_tokens: tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, end_tokens: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._head: tuple[str, array[int]] | None = None
        self._is_cut: bool | None = None
        self._known: dict[tuple[str, str], tuple[int, ...]] = {}

    def encode(self, text: str, question: TypedQuestion) -> QuestionTokens:
        """Encode a question.

        Args:
            text: the whole prompt as rendered by the chat template, which includes the text of the question.

        Raises:
            RequestError: a label adds no token, or two labels have the same tokens.
        """
        start = text.rfind(question.text)
        before = text[: max(0, start)]
        behind = text[start + len(question.text) :] if start >= 0 else ""
        labels = [self._label(question, label, behind) for label in question.labels]
        first: dict[tuple[int, ...], int] = {}
        for index, label in enumerate(labels):
            if (same := first.setdefault(label, index)) != index:
                raise RequestError(
                    f"'{question.field}': answers {same} and {index} are the same tokens for this model, so they have "
                    "one probability together.",
                    param=question.field,
                )
        ends = self._end_tokens if _is_begun_by_another(first) else ()
        endings = tuple((*label, end) for label in labels for end in ends) if ends else tuple(labels)
        return QuestionTokens(self._prompt(text, before), endings, len(ends) or 1)

    def _prompt(self, text: str, before: str) -> array[int]:
        if before and self._is_cut is None:
            head, whole = self._encode(before), self._encode(text)
            self._head, self._is_cut = (before, head), head + self._encode(text[len(before) :]) == whole
            return whole
        if self._head is not None and self._is_cut and self._head[0] == before:
            return self._head[1] + self._encode(text[len(before) :])
        return self._encode(text)

    def _label(self, question: TypedQuestion, label: str, behind: str) -> tuple[int, ...]:
        """Return the tokens that a label adds to the prompt.

        If it would change the prompt's last tokens, it is encoded alone.
        """
        context = question.text.rpartition("\n")[2] + behind
        if cuts := list(self._tokenizer.cuts(context)):
            context = context[cuts[-1] :]
        key = context, label
        if key not in self._known:
            base, whole = self._encode(context), self._encode(context + label)
            is_kept = len(whole) > len(base) and whole[: len(base)] == base
            self._known[key] = tuple(whole[len(base) :] if is_kept else self._encode(label))
        if not self._known[key]:
            raise RequestError(
                f"'{question.field}': the answer {label!r} adds no token to the prompt.", param=question.field
            )
        return self._known[key]

    def _encode(self, text: str) -> array[int]:
        return self._tokenizer.encode(text, False)


def _is_begun_by_another(labels: dict[tuple[int, ...], int]) -> bool:
    """Return whether the tokens of one label are a prefix of the tokens of another label."""
    lengths = {len(label) for label in labels}
    return any(label[:length] in labels for label in labels for length in lengths if length < len(label))
