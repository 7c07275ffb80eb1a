"""Thought rules: the thought before an answer, for what depends on its end: a grammar, or a budget of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ThoughtRules:
    """The thought before one answer.

    Attributes:
        start: text of the mark that begins it.
        end: text of the mark that ends it.
        is_open: whether the prompt ends inside it. Else the answer may begin with the start mark, after white space.
        budget: most tokens of the thought; None for no limit but that of the answer.
        lead: text that comes between the thought and the grammar's answer.
        newlines: most newlines after the end mark that are not part of the grammar's answer.
    """

    start: str
    end: str
    is_open: bool
    budget: int | None = None
    lead: str = ""
    newlines: int = 0
