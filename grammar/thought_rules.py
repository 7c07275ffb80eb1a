"""Thought rules: the thought before an answer, for what depends on its end: a grammar, or a budget of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtRules:
    """The thought before one answer.

    Attributes:
        start: text of the mark before the thought.
        end: text of the mark after the thought.
        is_open: whether the prompt ends inside the thought. Otherwise the answer may begin with the start mark, after
            white space.
        budget: largest number of tokens of the thought; None for no limit except that of the answer.
        lead: text between the thought and the grammar's answer.
        newlines: largest number of newlines after the end mark that are not part of the grammar's answer.
    """

    start: str
    end: str
    is_open: bool
    budget: int | None = None
    lead: str = ""
    newlines: int = 0
