"""Added-token search: where a text names added tokens, leftmost longest, by a regular expression in a trie's shape.

Python's ``re`` tries the branches of an alternation one by one, so a plain list of tokens costs each position of a text
as many steps as there are tokens. In a trie's shape the branches of a node begin with different characters, and a
position costs at most (length of a token) x (different characters), however many tokens there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

_WINDOW: Final = 1 << 14  # characters of one search, which holds the interpreter's lock
_LONGEST: Final = 512  # characters of a token that is searched for
_MOST_LISTED: Final = 32  # tokens that branch deeper than that
_DEEPEST: Final = 64  # nested groups, of which ``re`` takes some hundreds; tokens that branch deeper are listed there


class _TooDeep(Exception):
    """Too many tokens branch deeper than the trie."""


class AddedTokenSearch:
    """Finds the starts of tokens in a text.

    Args:
        texts: texts of the tokens: at least one text, none of them empty.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._pattern = re.compile(_alternation(sorted(set(texts)), 0))
        self._overlap = max(map(len, texts)) - 1

    def starts(self, text: str) -> Iterator[int]:
        """Yield the rising starts of tokens, none of which overlap. Other threads run between two windows."""
        at = 0
        while at < len(text):
            end = at + _WINDOW
            found = self._pattern.search(text, at, end + self._overlap)
            # Beyond ``end`` a token could be cut off.
            if found is None or found.start() >= end:
                at = end
            else:
                yield found.start()
                at = found.end()


def search_of(added: Sequence[Mapping[str, Any]]) -> AddedTokenSearch | None:
    """Return the search for the tokens that the library finds before normalization.

    None if there are none, or if one swallows spaces around it or matches whole words only, so that what it takes
    depends on more than the token; and if a search would take long, as tokens are very long or alike.

    Args:
        added: the added tokens, as in ``tokenizer.json``.
    """
    tokens = [token for token in added if not token.get("normalized") and token["content"]]
    texts = [token["content"] for token in tokens]
    # A position costs at most a token's length and what is listed beyond the trie: tokens are a publisher's data.
    if max(map(len, texts), default=0) > _LONGEST:
        return None
    if not tokens or any(token.get(flag) for token in tokens for flag in ("lstrip", "rstrip", "single_word")):
        return None
    try:
        return AddedTokenSearch(texts)
    except _TooDeep:
        return None


def _common_prefix(first: str, last: str) -> str:
    """Return what all texts of a sorted list begin with."""
    for length, (a, b) in enumerate(zip(first, last, strict=False)):
        if a != b:
            return first[:length]
    return first


def _alternation(texts: list[str], depth: int) -> str:
    """Return a pattern of the longest of ``texts`` (sorted, distinct) that fits; an empty text is one that fits."""
    if depth == _DEEPEST:
        if len(texts) > _MOST_LISTED:
            raise _TooDeep
        return "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
    branches = []
    for _, group in groupby(filter(None, texts), key=lambda text: text[0]):
        members = list(group)
        prefix = _common_prefix(members[0], members[-1])
        rests = [text[len(prefix) :] for text in members]
        branches.append(re.escape(prefix) + (f"(?:{_alternation(rests, depth + 1)})" if len(rests) > 1 else ""))
    return "|".join([*branches, *([""] if texts[0] == "" else [])])
