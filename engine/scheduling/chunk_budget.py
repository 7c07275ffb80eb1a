"""Chunk budget: limits the time in which a step computes prompts while streams wait for their next tokens.

    |<------------ target inter-token latency ------------>|
    | the streams' own rows | prompts                | slack |

A stream is a sequence that generates tokens. ``StepCostModel`` predicts the seconds of the streams' rows, and prompts
get the rest of the target inter-token latency. Under load the streams alone would use up the target, and prompts would
be computed more slowly than new ones arrive. So prompts have a minimum share of a step, even if the step then exceeds
the target: a prompt takes at most ``slowdown`` times as long as it would take in chunks of the usual size beside the
same streams. The factor is 1.15 with a target of 100 ms, 1.6 with 50 ms, 4.8 with 20 ms. All prompts of a step together
always get at least ``LEAST`` tokens. Without streams there is no target.

``TokenLimit`` limits the number of all tokens of a step. It halves the limit after a step for which the device had too
little memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from math import inf

from ..batch import Batch
from ..sequence.sequence import Sequence
from ..types import Priority
from .step_cost_model import StepCostModel, StepWork, num_pairs, work_of

LEAST = 16  # Number of prompt tokens that a step may always compute.
STEPS_WITHOUT_ERROR = 1000  # Number of steps without a memory error after which the limit is doubled again.
# Fraction of the target for which a step is planned. It is less than 1, because the times of steps vary.
AIM = 0.9


class PrefillAllowance:
    """Time of one step that is available for prompts, and the sequences that use it.

    Args:
        cost: predicts the seconds of a chunk.
        seconds: limit on the seconds of all chunks together.
    """

    def __init__(self, cost: StepCostModel, seconds: float) -> None:
        self._cost = cost
        self._seconds = seconds
        # Tokens and seconds that each sequence has taken from the step's budget, by sequence id.
        self._taken: dict[int, tuple[int, float]] = {}

    def room(self, start: int, without: AbstractSet[int] = frozenset()) -> int:
        """Return the number of prompt tokens from position ``start`` on that fit into the remaining time.

        Args:
            without: ids of sequences whose chunks are not counted.
        """
        least, seconds = self._left(without)
        return max(1, least, self._cost.prefill_tokens(start, seconds)) if seconds > 0 else max(0, least)

    def take(self, number: int, start: int, end: int, *, is_cut: bool) -> None:
        """Count a chunk, positions ``start`` to ``end``, of the sequence with id ``number``.

        A chunk that was cut to fit (``is_cut``) uses up all remaining time.
        """
        whole = end - start, self._cost.prefill_seconds(start, end)
        self._taken[number] = (LEAST, inf) if is_cut else whole

    def give_back(self, number: int) -> None:
        """Undo ``take`` for a sequence. Does nothing if the sequence has taken nothing."""
        self._taken.pop(number, None)

    def num_drafts(self, most: int) -> int:
        """Return the number of draft tokens, at most ``most``, that fit beside the prompts.

        Without prompts, drafts are not limited.
        """
        return min(most, self._cost.draft_tokens(max(0.0, self._left()[1]))) if self._taken else most

    def _left(self, without: AbstractSet[int] = frozenset()) -> tuple[int, float]:
        """Return the remaining tokens of ``LEAST`` and the remaining seconds. Both may be negative."""
        taken = [each for number, each in self._taken.items() if number not in without]
        return LEAST - sum(tokens for tokens, _ in taken), self._seconds - sum(seconds for _, seconds in taken)


class ChunkBudget:
    """Sets the ``PrefillAllowance`` of each step, and learns the cost of a step from finished steps.

    Args:
        targets: target inter-token latency in seconds by a stream's priority class; a class without an entry has no
            target.
        most: largest number of tokens of a step.

    Attributes:
        limit: current limit on the tokens of a step.
    """

    def __init__(self, targets: Mapping[Priority, float], most: int) -> None:
        self.limit = TokenLimit(most)
        self._targets = targets
        self._usual = usual_chunk(most)
        self._cost = StepCostModel()

    def begin(self, running: Iterable[tuple[Sequence, int, int]]) -> PrefillAllowance | None:
        """Return the allowance of a step; None if the step has no stream with a target.

        Args:
            running: running sequences, each with the start and end of the positions that it needs computed. A sequence
                that needs a single token is a stream.
        """
        streams, starts = [], []
        for sequence, start, end in running:
            if end - start == 1:
                streams.append((sequence.priority, end))
            else:
                starts.append(start)
        target = min((self._targets[priority] for priority, _ in streams if priority in self._targets), default=0.0)
        if not target:
            return None
        own = self._cost.seconds(StepWork(len(streams), sum(end for _, end in streams)))
        start = starts[0] if starts else 0
        usual = self._cost.prefill_seconds(start, start + self._usual)
        return PrefillAllowance(self._cost, max(AIM * target - own, least_seconds(own, usual, slowdown(target))))

    @property
    def most_twice(self) -> int:
        """Largest number of tokens that a step may compute twice: for a waiting sequence and for a running one with the
        same prefix.

        With more such tokens, the waiting sequence waits until the running one has computed the prefix. Computing this
        number of tokens takes at most half as long as the fixed cost of a further step, and it is at most an eighth of
        a usual chunk.
        """
        return int(min(self._usual / 8, self._cost.overhead_tokens() / 2))

    def prefill_stats(self, running: Iterable[Sequence]) -> dict[str, float]:
        """Return the maximum rates of prefill (tokens and query-key pairs in a second), and the amounts in progress."""
        tokens, pairs = self._cost.prefill_rates(self._usual)
        computed = [each.num_computed for each in running if each.prefilling]
        return {
            "prefill_tokens_per_second": tokens,
            "prefill_pairs_per_second": pairs,
            "prefilling_tokens": sum(computed),
            "prefilling_pairs": sum(num_pairs(0, each) for each in computed),
        }

    def least_seconds(self, num_tokens: int) -> float:
        """Return a lower bound of a prompt's seconds, at the highest speed that is consistent with past steps."""
        tokens, pairs = self._cost.prefill_rates(self._usual)
        return num_tokens / tokens + num_pairs(0, num_tokens) / pairs

    def observe(self, batch: Batch, seconds: float) -> None:
        """Update the cost model with a step that took ``seconds``."""
        self._cost.observe(work_of(batch), seconds)


class TokenLimit:
    """Limit on the number of tokens of a step, which adapts to the device's memory.

    Args:
        most: the limit while the device has enough memory.

    Attributes:
        tokens: the current limit.
    """

    def __init__(self, most: int) -> None:
        self.tokens = self._most = most
        self._steps = 0

    def halve(self, num_tokens: int) -> bool:
        """Set the limit to half of a step's tokens. Returns False, without a change, if the step had one token.

        The limit may become lower than the number of running sequences. Then the sequences that were admitted last skip
        steps.
        """
        self._steps = 0
        wanted = min(self.tokens, num_tokens) // 2
        if not wanted:
            return False
        self.tokens = wanted
        return True

    def count_step(self) -> None:
        """Count a step without a memory error. After ``STEPS_WITHOUT_ERROR`` of them, the limit is doubled."""
        if self.tokens < self._most:
            self._steps += 1
            if self._steps >= STEPS_WITHOUT_ERROR:
                self.tokens, self._steps = min(self._most, 2 * self.tokens), 0


def usual_chunk(most: int) -> int:
    """Return the usual number of prompt tokens of a step, given the largest number.

    The rest is kept for the ends of prompts.
    """
    return most - most // 5


def slowdown(target: float) -> float:
    """Return the factor by which a target inter-token latency, in seconds, may slow prompts down."""
    return 1 + 0.15 * (0.1 / target) ** 2


def least_seconds(own: float, usual: float, slower: float) -> float:
    """Return the seconds of prompts in each step with which prompts take ``slower`` times as long as in usual chunks.

    If each step has s seconds of prompts and ``own`` seconds of streams, a prompt needs (own + s) / s seconds of
    elapsed time for each second of its own work. In usual chunks of ``usual`` seconds it needs (own + usual) / usual
    seconds.
    """
    return own * usual / (slower * own + (slower - 1) * usual)
