"""Patterns by their source, read once."""

from __future__ import annotations

from functools import lru_cache

from .ecma_regex import Pattern, parse


@lru_cache(maxsize=4096)
def read_pattern(source: str, wide: bool = False) -> Pattern:
    """`ecma_regex.parse`, remembered.

    Raises:
        RegexError: for a pattern that cannot be used.
    """
    return parse(source, wide=wide)


def pattern_matches(source: str, text: str, wide: bool = False) -> bool:
    """Whether a text satisfies a pattern."""
    return read_pattern(source, wide).matches(text)
