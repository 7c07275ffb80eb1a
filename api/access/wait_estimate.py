"""Wait estimate: computes a lower bound of a new request's time to first token from measurements.

Requests wait for two resources, and the longer wait counts:

- *Prompts*: the tokens that must be computed first, at the highest speed that the engine's step cost model allows.
  Short prompts overtake long ones, so a short prompt waits only for other short ones.
- *Rows*: if no row is free, the running answers and the answers before this one must end. Their length and time per
  token are assumed to be those of the answers that ended last.

Anything that is not known counts as no wait: a speed that was not measured, the length of answers before enough answers
have ended, a prefix that may be cached, a sequence whose grammar may have to be compiled or whose adapter may have to
be loaded. The estimate changes only when an event occurs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Cost of a generated token and of a cached token relative to a prompt token, as in the engine's fair queueing.
OUTPUT_WEIGHT, CACHED_WEIGHT = 2.0, 0.1

_GROWTH, _FALL, _MOST = 1.5, 1.01, 16.0
"""Of a factor: for a late sequence, for one in time, and its largest value."""

_FEW, _MANY = 8, 64  # numbers of the last answers that count; fewer than the first number give no estimate


class Work(NamedTuple):
    """The work that waiting sequences cause in the engine. Works can be added and multiplied.

    Attributes:
        sequences: number of sequences.
        tokens: number of tokens of the sequences' prompts.
        new: prompt tokens that must be computed.
        pairs: number of query-key pairs of the tokens in ``new``.
        short_new, short_pairs: the part of ``new`` and ``pairs`` in prompts that overtake longer ones.
        answer: expected number of tokens of the sequences' answers.
        cost: cost of the sequences in units of fair queueing.
    """

    sequences: float = 0.0
    tokens: float = 0.0
    new: float = 0.0
    pairs: float = 0.0
    short_new: float = 0.0
    short_pairs: float = 0.0
    answer: float = 0.0
    cost: float = 0.0

    def plus(self, other: Work, times: float = 1.0) -> Work:
        """Return the sum of this work and ``times`` times another work."""
        return Work(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))

    def whole(self) -> Work:
        """Return the work, or ``NOTHING`` if no sequence is left, so that rounding errors do not accumulate."""
        return self if round(self.sequences) else NOTHING


NOTHING = Work()


def work_of(num_tokens: int, num_new: int, answer: float, short: float) -> Work:
    """Return the work of one sequence.

    Args:
        num_tokens: number of tokens of the sequence's prompt.
        num_new: number of these tokens whose KV is certainly not in the prefix cache.
        answer: expected number of tokens of the answer.
        short: largest number of tokens of a prompt that overtakes longer ones.
    """
    start = num_tokens - num_new
    pairs = (num_tokens * (num_tokens + 1) - start * (start + 1)) / 2
    is_short = num_tokens <= short
    cost = num_new + CACHED_WEIGHT * start + OUTPUT_WEIGHT * answer
    return Work(1, num_tokens, num_new, pairs, num_new * is_short, pairs * is_short, answer, cost)


@dataclass(frozen=True, slots=True)
class Capacity:
    """The engine's capacity according to its statistics. The defaults are for an engine without statistics.

    Attributes:
        rows: number of sequences that can run at the same time; 0 while it is not known.
        usable: number of these rows for which there are pages.
        running: number of sequences that have a row.
        deferred, deferred_tokens: number of sequences that wait for a grammar or an adapter, and number of their
            prompts' tokens.
        tokens_per_second, pairs_per_second: highest speed at which prompts are computed.
        computed, computed_pairs: the amounts of the prompts in progress that are already computed.
        short: largest number of tokens of a prompt that overtakes longer ones.
        steps: number of steps so far. A changed number indicates new statistics.
    """

    rows: float = 0.0
    usable: float = 0.0
    running: float = 0.0
    deferred: float = 0.0
    deferred_tokens: float = 0.0
    tokens_per_second: float = math.inf
    pairs_per_second: float = math.inf
    computed: float = 0.0
    computed_pairs: float = 0.0
    short: float = 0.0
    steps: float = 0.0

    @classmethod
    def told_by(cls, stats: Mapping[str, float]) -> Capacity:
        """Compute the capacity from the statistics of an engine, or from the sums of several engines' statistics."""
        if not stats.get("row_limit"):
            return cls()
        return cls(
            rows=stats["row_limit"],
            usable=stats["rows_usable"],
            running=stats["running"],
            deferred=stats["waiting_deferred"],
            deferred_tokens=stats["waiting_deferred_tokens"],
            tokens_per_second=stats["prefill_tokens_per_second"],
            pairs_per_second=stats["prefill_pairs_per_second"],
            computed=stats["prefilling_tokens"],
            computed_pairs=stats["prefilling_pairs"],
            short=stats["prefill_short_tokens"] / stats["engines"],
            steps=stats["steps"],
        )

    def prefill_seconds(self, ahead: Work, *, short: bool) -> float:
        """Return a lower bound of the seconds until the prompts before a short or a long prompt are computed."""
        tokens, pairs = (ahead.short_new, ahead.short_pairs) if short else (ahead.new, ahead.pairs)
        by_tokens = max(0.0, tokens - self.computed) / self.tokens_per_second
        return by_tokens + max(0.0, pairs - self.computed_pairs) / self.pairs_per_second

    def own_seconds(self, work: Work) -> float:
        """Return a lower bound of the seconds that the prompts of a work take."""
        return work.new / self.tokens_per_second + work.pairs / self.pairs_per_second

    def row_seconds(self, behind: float, hold: float, left: Sequence[float]) -> float:
        """Return the seconds until a number of rows has been released.

        Args:
            behind: number of rows that must be released; greater than 0.
            hold: seconds for which each earlier sequence keeps its row.
            left: remaining seconds for which the sequences with a token keep their rows. Other running sequences keep
                their rows for ``hold``. A row that lacks pages can be used as soon as another row is released.
        """
        begun = sorted(left)
        computing = max(0, round(self.running) - len(begun))
        lacking = max(0, round(self.rows) - len(begun) - computing)
        ends = begun[:1] * lacking + begun + [hold] * computing
        if not ends:
            return 0.0
        rounds, rest = divmod(math.ceil(behind) - 1, len(ends))
        return rounds * hold + ends[rest]


class AnswerMeter:
    """Low estimates of the length of answers and of their seconds per token.

    Each is computed from the last few answers and from the last many answers, and the smaller result is used. So
    shorter or faster answers take effect at once, and longer or slower ones only after many of them.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[int, float]] = deque(maxlen=_MANY)

    def add(self, num_tokens: int, seconds: float) -> None:
        """Count an answer that occupied a row for ``seconds`` after its first token."""
        self._ended.append((num_tokens, seconds))

    @property
    def tokens(self) -> float:
        """Expected number of tokens of an answer: the mean minus its standard error; 0 after too few answers."""
        return min(map(_low_mean, ([each for each, _ in part] for part in self._parts())), default=0.0)

    @property
    def seconds_per_token(self) -> float:
        """Seconds for which a row is occupied per token; 0 while too few answers have ended."""
        rates = (sum(seconds for _, seconds in part) / sum(tokens for tokens, _ in part) for part in self._parts())
        return min(rates, default=0.0)

    def _parts(self) -> list[list[tuple[int, float]]]:
        ended = list(self._ended)
        return [ended[-_FEW:], ended] if len(ended) >= _FEW else []


class WaitCorrection:
    """Factor of estimated waits, which are lower bounds, so that few requests are late that were expected in time.

    An estimate leaves out what it cannot know: requests of earlier priority classes that arrive later, turns of late
    sequences, steps that are slower than the fastest ones. So the factor grows with each sequence that is late, and
    falls slowly with each that is in time and with time: multiplicative increase and decrease, whose balance is where
    ``log(_FALL) / log(_GROWTH)`` of them are late.
    """

    def __init__(self) -> None:
        self._factor, self._at = 1.0, -math.inf

    def add(self, now: float, half_life: float, *, is_late: bool) -> None:
        """Count a sequence that was expected to be in time."""
        changed = self.factor(now, half_life) * (_GROWTH if is_late else 1 / _FALL)
        self._factor, self._at = min(max(1.0, changed), _MOST), now

    def factor(self, now: float, half_life: float) -> float:
        """Return the factor, at least 1. Without sequences, what exceeds 1 halves in ``half_life`` seconds."""
        return 1.0 + (self._factor - 1.0) * math.exp2((self._at - now) / half_life)


def _low_mean(values: list[int]) -> float:
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((each - mean) ** 2 for each in values) / len(values))
    return max(0.0, mean - deviation / math.sqrt(len(values)))
