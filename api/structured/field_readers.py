"""Field readers: compute the field probabilities of the answers to one request from the deltas as they arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ...engine.text.field_probabilities import FieldReader
from ...engine.types import AllowedLogprobs
from ...grammar.schema.answer_fields import AnswerFields
from ...grammar.spec import GrammarSpec
from .thought_plan import ThoughtPlan

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TextDelta

_BLANKS = b" \t\r\n"


class FieldReaders:
    """Computes the field probabilities of all answers to one request.

    Args:
        schema: the grammar of the answers, of the kind JSON Schema.
        token_bytes: returns the bytes of a token.
        ends: tokens without text in an answer.
        thought: rules for recognizing the reasoning before the answer; None without reasoning.
    """

    def __init__(
        self,
        schema: GrammarSpec,
        token_bytes: Callable[[int], bytes],
        ends: frozenset[int],
        thought: ThoughtPlan | None,
    ) -> None:
        self._fields = AnswerFields(schema.value())
        self._token_bytes = token_bytes
        self._ends = ends
        self._thought = thought
        self._answers: dict[tuple[int, int], tuple[FieldReader, _ThoughtSkip | None]] = {}

    def read(self, delta: TextDelta) -> TextDelta:
        """Return the delta with the probabilities of those fields that its tokens complete."""
        if not delta.allowed:
            return delta
        key = delta.prompt, delta.index
        if key not in self._answers:
            skip = None if self._thought is None else _ThoughtSkip(self._thought)
            self._answers[key] = FieldReader(self._fields, self._token_bytes, self._ends), skip
        reader, skip = self._answers[key]
        read = [each for each in delta.allowed if skip is None or skip.is_of_answer(each, self._token_bytes)]
        return replace(delta, allowed=(), fields=tuple(found for each in read for found in reader.push(each)))


class _ThoughtSkip:
    """Skips the tokens of the reasoning.

    Its end mark and the lead of the answer must both end at the end of a token.
    """

    def __init__(self, plan: ThoughtPlan) -> None:
        self._start = plan.format.start.encode()
        self._marks = [mark.encode() for mark in (plan.format.end, plan.format.lead) if mark]
        self._is_thought: bool | None = True if plan.is_open else None  # None before the first text.
        self._text = b""

    def is_of_answer(self, drawn: AllowedLogprobs, token_bytes: Callable[[int], bytes]) -> bool:
        """Return whether a token belongs to the answer."""
        if not self._marks:
            return True
        text = token_bytes(drawn.token)
        if self._is_thought is None:
            self._is_thought = self._begins(text)
        if self._is_thought is False:
            return True
        self._text += text
        while self._marks and self._marks[0] in self._text:
            self._text = self._text.partition(self._marks.pop(0))[2]
        return False

    def _begins(self, text: bytes) -> bool | None:
        text = text.lstrip(_BLANKS)
        return None if not text else text.startswith(self._start[:1])
