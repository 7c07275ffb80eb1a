"""A few random answers before a grammar is let in: what would fail, end in a dead end or crawl, does so here."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import numpy as np

from grammar.matcher import GrammarFailure, Matcher
from grammar.states import Row
from grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from grammar.compiler import Compiled

WALKS = 2
TOKENS = 32
MAX_MASK_SECONDS = 0.25


class DryRunError(Exception):
    """Why a grammar that compiles would not serve."""


def check(compiled: Compiled, vocabulary: Vocabulary) -> None:
    """Walk a few random answers, the same ones each time.

    Raises:
        DryRunError: for a failure of the library, a place where no token is allowed, or a mask that takes too long.
    """
    for seed in range(WALKS):
        _walk(compiled.matcher(), vocabulary, random.Random(seed))


def _walk(matcher: Matcher, vocabulary: Vocabulary, rng: random.Random) -> None:
    row = np.zeros(vocabulary.num_words, dtype=np.int32)
    for _ in range(TOKENS):
        before = time.thread_time()
        try:
            matcher.fill_mask(row)
        except GrammarFailure as failure:
            raise DryRunError(f"too complex to follow: {failure}") from None
        seconds = time.thread_time() - before
        if seconds > MAX_MASK_SECONDS:
            raise DryRunError(f"one mask took {1e3 * seconds:.0f} ms; the limit is {1e3 * MAX_MASK_SECONDS:.0f}")
        if not matcher.accept(_random_token(row, rng)):
            raise DryRunError("a token is allowed by the mask and then refused")
        if matcher.is_done:
            return


def _random_token(row: Row, rng: random.Random) -> int:
    """One of the allowed tokens: a random word of the mask that has any, then a random bit of it."""
    words = np.flatnonzero(row)
    at = int(words[rng.randrange(len(words))])
    word = int(row.view(np.uint32)[at])
    bits = [bit for bit in range(32) if word >> bit & 1]
    return 32 * at + rng.choice(bits)
