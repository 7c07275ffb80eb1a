"""Strings of the fewest tokens: finds the string that takes the fewest tokens among those that a schema permits.

The result depends on the vocabulary. For the pattern ``[ab]{6,8}``, if there is a token ``ba`` but no token of several
``a``, the string ``bababa`` takes three tokens and ``aaaaaa`` takes six. The search is breadth first over the states of
the string's automaton, one token at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..regex.ecma_regex import shortest
from ..regex.regex_parser import RegexNode
from ..regex.string_automaton import DEAD, START, AutomatonTooLarge, StringAutomaton, string_automaton
from ..vocabulary import Vocabulary

# Largest number of characters of a tried token, and of steps of tokens through one automaton.
MAX_CHARS = 24
MAX_STEPS = 2_000_000


class _Texts(NamedTuple):
    """Texts of tokens within a string.

    Attributes:
        texts: the texts, without the quotes of the string.
        codes: int32 [texts, MAX_CHARS], the texts' characters as indices into ``_Tokens.chars``; -1 after the last one.
        sizes: int32 [texts], number of characters of each text.
    """

    texts: list[str]
    codes: NDArray[np.int32]
    sizes: NDArray[np.int32]


class _Tokens:
    """The tokens of a vocabulary that may occur in a string: inside it, at its beginning and at its end.

    Attributes:
        chars: code points of all characters in these tokens, ascending.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        listed = (text for at, text in enumerate(vocabulary.tokens) if at not in vocabulary.special)
        found = [text for text in map(_decoded, listed) if text]
        parts = (
            [text for text in found if '"' not in text],
            [text[1:] for text in found if text[0] == '"' and '"' not in text[1:] and len(text) > 1],
            [text[:-1] for text in found if text[-1] == '"' and '"' not in text[:-1] and len(text) > 1],
        )
        self.chars = np.unique(np.array([ord(char) for part in parts for text in part for char in text], np.int32))
        self.inner, self.first, self.last = map(self._numbered, parts)

    def _numbered(self, texts: list[str]) -> _Texts:
        codes = np.full((len(texts), MAX_CHARS), -1, dtype=np.int32)
        for at, text in enumerate(texts):
            codes[at, : len(text)] = np.searchsorted(self.chars, [ord(char) for char in text])
        return _Texts(texts, codes, np.array([len(text) for text in texts], dtype=np.int32))


def _decoded(token: bytes) -> str:
    """Return the characters of a token in JSON; empty if it is too long, or contains partial characters."""
    try:
        text = token.decode()
    except UnicodeDecodeError:
        return ""
    return text if len(text) <= MAX_CHARS and min(text, default=" ") >= " " and "\\" not in text else ""


class _Reached(NamedTuple):
    """A state and a number of characters after some tokens, and the text of these tokens."""

    state: int
    length: int
    text: str


def string_of_fewest_tokens(automaton: StringAutomaton, vocabulary: Vocabulary) -> str | None:
    """Return a string of the fewest tokens in JSON; None if none is found within the limit of steps."""
    tokens = vocabulary.derived(_Tokens)
    search = _Search(automaton, tokens)
    reached = [_Reached(START, 0, ""), *search.after(_Reached(START, 0, ""), tokens.first)]
    while reached and search.left > 0:
        for each in reached:
            if search.may_end(each):
                return each.text
        closed = (last for each in reached for last in search.after(each, tokens.last) if search.may_end(last))
        if (ended := next(closed, None)) is not None:
            return ended.text
        reached = search.new(following for each in reached for following in search.after(each, tokens.inner))
    return None


def text_of_fewest_tokens(node: RegexNode, vocabulary: Vocabulary) -> str:
    """Return a text that an anchored expression matches and that takes few tokens, its shortest one if in doubt."""
    with suppress(AutomatonTooLarge):
        return string_of_fewest_tokens(string_automaton([node], []), vocabulary) or shortest(node)
    return shortest(node)


class _Search:
    """Advances an automaton by the texts of tokens.

    Attributes:
        left: number of steps that the search may still take.
    """

    def __init__(self, automaton: StringAutomaton, tokens: _Tokens) -> None:
        self._automaton = automaton
        self._delta = np.array(automaton.transitions, dtype=np.int32)
        self._classes = np.array([automaton.classes.of(code) for code in tokens.chars.tolist()], dtype=np.int32)
        self._last = automaton.last_count
        self._seen: set[tuple[int, int]] = set()
        self.left = MAX_STEPS

    def may_end(self, reached: _Reached) -> bool:
        return self._automaton.may_end(reached.state, reached.length)

    def after(self, reached: _Reached, tokens: _Texts) -> list[_Reached]:
        """Return the states that one more token reaches and from which the string can still end."""
        states = np.full(len(tokens.texts), reached.state, dtype=np.int32)
        active, at = np.arange(len(states)), 0
        while len(active) and self.left > 0:
            self.left -= len(active)
            states[active] = after = self._delta[states[active], self._classes[tokens.codes[active, at]]]
            at += 1
            active = active[(after != DEAD) & (tokens.sizes[active] > at)]
        if self.left <= 0:
            return []
        counts = np.minimum(reached.length + tokens.sizes, self._last)
        live = np.flatnonzero((states != DEAD) & self._automaton.can_finish[states, counts])
        pairs, chosen = np.unique(np.stack((states[live], counts[live])), axis=1, return_index=True)
        at = live[chosen].tolist()
        return [
            _Reached(state, count, reached.text + tokens.texts[each])
            for state, count, each in zip(*pairs.tolist(), at, strict=True)
        ]

    def new(self, reached: Iterable[_Reached]) -> list[_Reached]:
        """Return the states and numbers of characters that were not reached before."""
        found = []
        for each in reached:
            if (each.state, each.length) not in self._seen:
                self._seen.add((each.state, each.length))
                found.append(each)
        return found
