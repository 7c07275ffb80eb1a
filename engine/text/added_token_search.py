"""Added-token search: finds added tokens in a text, leftmost and longest first, with a regular expression in trie form.

Python's ``re`` tries the branches of an alternation one by one. With a plain list of tokens, each position of a text
would therefore cost as many steps as there are tokens. In a trie, the branches of a node begin with different
characters, so a position costs at most (length of a token) x (different characters) steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

# Number of characters that one search covers. The search holds the interpreter's lock (GIL) for this long.
_WINDOW: Final = 1 << 14
_LONGEST: Final = 512  # Largest number of characters of a token that is searched for.
_MOST_LISTED: Final = 32  # Largest number of tokens that branch deeper than the limit below.
# Limit on the depth of nested groups, because ``re`` allows some hundreds. Deeper branches become a plain alternation.
_DEEPEST: Final = 64


class _TooDeep(Exception):
    """Raised if more tokens than ``_MOST_LISTED`` branch deeper than ``_DEEPEST``."""


class AddedTokenSearch:
    """Finds the positions at which tokens start in a text.

    Args:
        texts: texts of the tokens; at least one, and none of them empty.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._pattern = re.compile(_alternation(sorted(set(texts)), 0))
        self._overlap = max(map(len, texts)) - 1

    def starts(self, text: str) -> Iterator[int]:
        """Yield the start of each token in ascending order.

        The tokens do not overlap. The GIL is released between two searches.
        """
        at = 0
        while at < len(text):
            end = at + _WINDOW
            found = self._pattern.search(text, at, end + self._overlap)
            # A token that starts at ``end`` or later may be cut off, so the next window finds it.
            if found is None or found.start() >= end:
                at = end
            else:
                yield found.start()
                at = found.end()


def search_of(added: Sequence[Mapping[str, Any]]) -> AddedTokenSearch | None:
    """Return the search for the tokens that the library finds before normalization; None if no search is exact and
    fast.

    The result is None in these cases: there are no such tokens; a token includes the spaces around it or matches only
    whole words, so that its extent depends on the text around it; or tokens are very long or very similar, so that a
    search would take long.

    Args:
        added: the added tokens, as in ``tokenizer.json``.
    """
    tokens = [token for token in added if not token.get("normalized") and token["content"]]
    texts = [token["content"] for token in tokens]
    # Below a certain depth of the trie, the remaining texts are a plain alternation. So the cost of a position is at
    # most a token's length plus the number of texts in one alternation. Both are limited here, because the tokens come
    # from a model's publisher, who is not trusted.
    if max(map(len, texts), default=0) > _LONGEST:
        return None
    if not tokens or any(token.get(flag) for token in tokens for flag in ("lstrip", "rstrip", "single_word")):
        return None
    try:
        return AddedTokenSearch(texts)
    except _TooDeep:
        return None


def _common_prefix(first: str, last: str) -> str:
    """Return the longest prefix that all texts of a sorted list share, given its first and last text."""
    for length, (a, b) in enumerate(zip(first, last, strict=False)):
        if a != b:
            return first[:length]
    return first


def _alternation(texts: list[str], depth: int) -> str:
    """Return a pattern that matches the longest of the sorted, distinct ``texts`` at a position.

    A text may be empty.
    """
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
