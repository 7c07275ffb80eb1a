"""Thought probe: derives the marks around a model's reasoning from the text that a chat template renders for it.

The template renders an answer with reasoning and one without. The text between the turn's header and the reasoning is
the start mark, and the text between the reasoning and the answer is the end mark. Text that also precedes an answer
without reasoning belongs to neither mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .template_marks import MARK, shared_beginning

Render = Callable[[Sequence[dict[str, Any]], bool], str]
"""Renders messages, with or without the header of the answer. Returns "" if the template refuses the messages."""

_THOUGHT, _ANSWER = "Probe of a thought.", "Probe of an answer."
_QUESTION = {"role": "user", "content": "Probe of a question."}
_KEYS = ("reasoning_content", "reasoning", "thinking")
# Matches a mark, or two marks with a word between them: ``<|open|>think<|sep|>``.
_GROUP = re.compile(r"(?:<\|[^<>]*\|>\w+<\|[^<>]*\|>|<[^<>]*>|\[[A-Z_/ ]+\])")


@dataclass(frozen=True, slots=True)
class ProbedThought:
    """The marks that a template writes around reasoning.

    Attributes:
        start, end: marks before and after the reasoning.
        lead: mark before the content of an answer.
        in_messages: whether the end mark ends with the header of the next message.
    """

    start: str
    end: str
    lead: str = ""
    in_messages: bool = False


def probed_thought(render: Render) -> ProbedThought | None:
    """Return the marks around reasoning; None if the template does not render reasoning or writes no marks."""
    header = render([_QUESTION], True)
    plain = render([_QUESTION, {"role": "assistant", "content": _ANSWER}], False).partition(_ANSWER)[0]
    for key in _KEYS:
        message = {"role": "assistant", "content": _ANSWER, key: _THOUGHT}
        before, shown, rest = render([_QUESTION, message], False).partition(_THOUGHT)
        between, answered, _ = rest.partition(_ANSWER)
        if shown and answered and (found := _marks(header, plain, before, between)) is not None:
            return found
    return None


def _marks(header: str, plain: str, before: str, between: str) -> ProbedThought | None:
    """Return the marks around reasoning, from rendered texts.

    Args:
        header: text up to the position at which the model begins to generate.
        plain: text up to an answer without reasoning.
        before: text up to the reasoning.
        between: text between the reasoning and its answer.
    """
    both = before.startswith(header) and plain.startswith(header)
    start = before[len(header) if both else shared_beginning(before, plain) :].rstrip()
    if not start.strip():
        return _empty_before(before, between)
    lead = plain[shared_beginning(plain, header) :]
    lead = lead if lead.strip() and between.endswith(lead) and between.strip() != lead.strip() else ""
    end = between.removesuffix(lead).strip()
    if not MARK.search(end) or not MARK.search(start):
        return None
    in_messages = _ends_with_header(end, header)
    # A space after a header belongs to the name of the next message's recipient, so it is kept.
    return ProbedThought(start if in_messages else start.lstrip(), end, lead, in_messages=in_messages)


def _empty_before(before: str, between: str) -> ProbedThought | None:
    """Return the marks if turns without reasoning have an empty one.

    The last mark before the reasoning is its start.
    """
    starts = [mark for mark in _GROUP.finditer(before) if not before[mark.end() :].strip()]
    rest = between.lstrip()
    end = _GROUP.match(rest)
    if not starts or end is None:
        return None
    return ProbedThought(starts[-1][0], end[0], rest[end.end() :].strip())


def _ends_with_header(end: str, header: str) -> bool:
    """Return whether an end mark consists of the end of the reasoning message and the header of the next message."""
    marks = list(MARK.finditer(end))
    return len(marks) > 1 and header.endswith(end[marks[1].start() :])
