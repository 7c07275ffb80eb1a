"""Dry run of a compiled grammar: random answers find failures, dead ends and slow masks before it is served.

Masks take long if the backend's lexer has many states: with repeats of large counts, complements and intersections of
long expressions, or many alternatives. A schema's grammar without any of these gets one short walk.

All streams wait for the slowest mask of a step, including its search for an end of the answer and its drafts. The
slowest mask of 300 schemas in use takes 1 ms with a vocabulary of 49,152 tokens and 5 ms with 131,072. So grammars that
are much slower are refused. A busy machine must not cause a refusal, so a walk with a slow mask is repeated, and the
least time of each mask counts.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ..emit.grammar_artifact import Backend, GrammarArtifact
from ..emit.lark_rules import FREE
from ..match.backends import Row
from ..match.matcher import GrammarFailure, Matcher
from ..vocabulary import Vocabulary
from .compiled_grammar import CompiledGrammar

WALKS = 2
TOKENS = 32
FEW_TOKENS = 8
# Token budget of the last walk, small enough that it searches for an end.
BUDGET = 200
# Limit on the processor time of a mask and of the draft after it. Harmless searches for an end take up to 30 ms, and
# more on a busy machine, so the limit is well above that. Other rows of a step do not wait for a mask that takes so
# long (`Matcher.is_slow`).
MAX_MASK_SECONDS = 0.08
# Number of walks in which a mask must exceed the limit for its grammar to be refused. On a busy machine the measured
# processor time also includes page faults, cold caches, and time that the host gave to other virtual machines.
MAX_SLOW_TIMES = 3
# A walk ends at the first mask that has not been below the limit yet, so each such mask costs a walk.
MAX_REPEATED_WALKS = 16
MAX_DRAFT = 16
MAX_DRAWN = 8  # tokens that are tried until one leaves room for an end
# A grammar of more bytes, or with larger repeats of a class or of a group, gets all walks.
PLAIN_BYTES = 8 << 10
PLAIN_REPEAT = 200
PLAIN_GROUP_REPEAT = 64
# Terminals that get walks of their own.
MAX_TERMINALS = 16
_TERMINAL = re.compile(r"^(T\d+): (.*)$", re.MULTILINE)
_REPEAT = re.compile(r"\{(\d*),?(\d*)\}")


class DryRunError(Exception):
    """The grammar compiles but fails, ends in a dead end, or is too slow."""


class _Walk(NamedTuple):
    """One random answer.

    Attributes:
        seed: seed of the random tokens.
        tokens: largest number of tokens that are drawn.
        budget: number of tokens within which the answer must end; None for no limit.
    """

    seed: int
    tokens: int
    budget: int | None


def check(compiled: CompiledGrammar, vocabulary: Vocabulary, clock: Callable[[], float] = time.thread_time) -> float:
    """Walk a few random answers, the same ones each time. Returns the seconds of the slowest mask.

    Args:
        clock: processor time of this thread, seconds.

    Raises:
        DryRunError: the backend fails, a state allows no token, or a mask takes too long.
    """
    slowest = _check_masks(compiled, vocabulary, clock)
    for alone in map(partial(CompiledGrammar, vocabulary=vocabulary), _terminals_alone(compiled.artifact)):
        slowest = max(slowest, _check_masks(alone, vocabulary, clock), check_search(alone, vocabulary, clock))
    return slowest


def check_search(
    compiled: CompiledGrammar, vocabulary: Vocabulary, clock: Callable[[], float] = time.thread_time
) -> float:
    """Walk an answer within a budget that needs searches for an end. Returns the seconds of the slowest mask.

    The shortest answer of the grammar must be known, as it is when the grammar is served. Finding it takes longer than
    any search that follows.

    Raises:
        DryRunError: as ``check``.
    """
    if _is_plain(compiled.artifact):
        return 0.0
    return _repeated_walk(compiled, vocabulary, _Walk(WALKS, TOKENS, BUDGET), clock)


def _check_masks(compiled: CompiledGrammar, vocabulary: Vocabulary, clock: Callable[[], float]) -> float:
    is_plain = _is_plain(compiled.artifact)
    tokens, walks = (FEW_TOKENS, 1) if is_plain else (TOKENS, WALKS)
    return max(_repeated_walk(compiled, vocabulary, _Walk(seed, tokens, None), clock) for seed in range(walks))


def _repeated_walk(compiled: CompiledGrammar, vocabulary: Vocabulary, walk: _Walk, clock: Callable[[], float]) -> float:
    """Walk an answer. While a mask is too slow, repeat the walk without cached results.

    Returns:
        Seconds of the slowest mask, by the least time that each mask took.

    Raises:
        DryRunError: as `check`.
    """
    least: list[float] = []
    ends: list[int] = []
    while (end := _walk(compiled.matcher(), vocabulary, walk, least, clock)) is not None:
        ends.append(end)
        if ends.count(end) == MAX_SLOW_TIMES or len(ends) == MAX_REPEATED_WALKS:
            took = f"{1e3 * least[end]:.0f} ms; the limit is {1e3 * MAX_MASK_SECONDS:.0f}"
            raise DryRunError(f"one mask took {took}")
        compiled = CompiledGrammar(compiled.artifact, vocabulary)
    return max(least)


def _terminals_alone(artifact: GrammarArtifact) -> Iterator[GrammarArtifact]:
    """Yield the terminals that combine a large repeat with another expression, each as a grammar of its own.

    A walk through a large grammar may end before it reaches them.
    """
    plain = replace(artifact, strings=(), shortest=(), texts=(), ends=(), lead_ins="", open_ended=False)
    plain = replace(plain, entries=(), has_memory=False)
    left = MAX_TERMINALS
    for text in _texts(artifact):
        listed = dict(_TERMINAL.findall(text))
        large = [name for name, body in listed.items() if " & " in body and any(map(_is_large, _REPEAT.finditer(body)))]
        lines = "\n".join(f"{name}: {body}" for name, body in listed.items())
        for name in large[:left] if len(listed) > 1 else ():
            left -= 1
            yield replace(plain, source=f"{FREE}start: {name}\n{lines}\n")


def _texts(artifact: GrammarArtifact) -> list[str]:
    """Return the texts of a grammar and of those inside of it."""
    if artifact.backend is not Backend.LLGUIDANCE:
        return []
    if artifact.lead_ins:
        return [grammar["lark_grammar"] for grammar in json.loads(artifact.source)["grammars"]]
    return [artifact.source]


def _is_plain(artifact: GrammarArtifact) -> bool:
    """Return whether a schema's grammar has none of the constructs known to make masks slow."""
    return (
        artifact.is_json
        and not artifact.ends
        and len(artifact.source) <= PLAIN_BYTES
        and not any(map(_is_large, _REPEAT.finditer(artifact.source)))
    )


def _is_large(repeat: re.Match[str]) -> bool:
    most = max(int(repeat[1] or 0), int(repeat[2] or 0))
    is_group = repeat.string[max(0, repeat.start() - 1)] == ")"
    return most > (PLAIN_GROUP_REPEAT if is_group else PLAIN_REPEAT)


def _walk(
    matcher: Matcher, vocabulary: Vocabulary, walk: _Walk, least: list[float], clock: Callable[[], float]
) -> int | None:
    """Walk an answer up to the first mask that was over the time limit in every walk so far.

    Args:
        least: the least seconds of each mask in all walks so far; updated.

    Returns:
        The index of this mask; None if there is none.
    """
    row = np.zeros(vocabulary.num_words, dtype=np.int32)
    rng = random.Random(walk.seed)
    for step in range(walk.tokens):
        before = clock()
        try:
            check = matcher.fill_grammar_mask(row, None if walk.budget is None else walk.budget - step)
        except GrammarFailure as failure:
            raise DryRunError(f"too complex to follow: {failure}") from None
        if walk.budget is not None:
            matcher.draft(MAX_DRAFT)
        seconds = clock() - before
        if step == len(least):
            least.append(seconds)
        least[step] = min(least[step], seconds)
        if least[step] > MAX_MASK_SECONDS:
            return step
        token = _random_token(row, rng)
        for _ in range(MAX_DRAWN if check is not None else 0):
            if check is None or check.fits(token):
                break
            token = _random_token(row, rng)
        if not matcher.accept(token):
            raise DryRunError("a token is allowed by the mask and then refused")
        if matcher.is_done:
            break
    return None


def _random_token(row: Row, rng: random.Random) -> int:
    """Draw an allowed token: a random nonzero word of the mask, then a random bit of it."""
    words = row.nonzero()[0]
    index = int(words[rng.randrange(len(words))])
    word = int(row[index]) & 0xFFFFFFFF
    for _ in range(rng.randrange(word.bit_count())):
        word &= word - 1  # without its lowest bit
    return 32 * index + (word & -word).bit_length() - 1
