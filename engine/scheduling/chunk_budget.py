"""Chunk budget: how long a step may compute prompts while streams wait for their next tokens.

    |<------------ target inter-token latency ------------>|
    | the streams' own rows | prompts                | slack |

``StepCostModel`` predicts the seconds of the streams' rows, and prompts get the rest of the target. Under load the
streams alone would use up the target, and prompts would be computed more slowly than new ones arrive. So prompts have a
minimum share of a step, even if the step then exceeds the target: a prompt takes at most ``slowdown`` times as long as
it would in usual chunks beside the same streams. The factor is 1.15 with a target of 100 ms, 1.6 with 50 ms, 4.8 with
20 ms. Together the prompts of a step always get at least ``LEAST`` tokens. Without streams there is no target.

``TokenLimit`` bounds all tokens of a step. It halves the bound after a step for which the device had no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from math import inf

from ..batch import Batch
from ..sequence.sequence import Sequence
from ..types import Priority
from .step_cost_model import StepCostModel, StepWork, num_pairs, work_of

LEAST = 16  # prompt tokens that a step may always have
STEPS_WITHOUT_ERROR = 1000  # steps without an error after which twice as many tokens are tried
# A step is planned for this share of its target, as the times of steps vary.
AIM = 0.9


class PrefillAllowance:
    """Seconds of one step for prompts, and the sequences that use them.

    Args:
        cost: predicts the seconds of a chunk.
        seconds: limit on the seconds of all chunks together.
    """

    def __init__(self, cost: StepCostModel, seconds: float) -> None:
        self._cost = cost
        self._seconds = seconds
        self._taken: dict[int, tuple[int, float]] = {}  # tokens and seconds by sequence id

    def room(self, start: int, without: AbstractSet[int] = frozenset()) -> int:
        """Return how many tokens from position ``start`` on fit into the seconds left, 0 if none are left.

        Args:
            without: ids of sequences whose chunks are not counted.
        """
        least, seconds = self._left(without)
        return max(1, least, self._cost.prefill_tokens(start, seconds)) if seconds > 0 else max(0, least)

    def take(self, number: int, start: int, end: int, *, is_cut: bool) -> None:
        """Count a chunk of the sequence with id ``number``; one that was cut to fit takes all that is left."""
        whole = end - start, self._cost.prefill_seconds(start, end)
        self._taken[number] = (LEAST, inf) if is_cut else whole

    def give_back(self, number: int) -> None:
        """Undo ``take``, if there was any."""
        self._taken.pop(number, None)

    def num_drafts(self, most: int) -> int:
        """Return how many drafts, at most ``most``, fit beside the prompts; drafts alone are not limited."""
        return min(most, self._cost.draft_tokens(max(0.0, self._left()[1]))) if self._taken else most

    def _left(self, without: AbstractSet[int] = frozenset()) -> tuple[int, float]:
        """Return the tokens left of ``LEAST`` and the seconds left; a number is below 0 if more was taken."""
        taken = [each for number, each in self._taken.items() if number not in without]
        return LEAST - sum(tokens for tokens, _ in taken), self._seconds - sum(seconds for _, seconds in taken)


class ChunkBudget:
    """Sets the ``PrefillAllowance`` of each step, and learns the cost of a step from finished steps.

    Args:
        targets: target inter-token latency in seconds, by the priority class of a stream; a class without an entry has
            no limit.
        most: largest number of tokens of a step.

    Attributes:
        limit: present limit on the tokens of a step.
    """

    def __init__(self, targets: Mapping[Priority, float], most: int) -> None:
        self.limit = TokenLimit(most)
        self._targets = targets
        self._usual = usual_chunk(most)
        self._cost = StepCostModel()

    def begin(self, running: Iterable[tuple[Sequence, int, int]]) -> PrefillAllowance | None:
        """Return the allowance of a step; None if the step has no stream with a target.

        Args:
            running: running sequences, each with the start and end of the span that it wants computed. A sequence that
                wants a single token is a stream.
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
        """Most tokens that a step may compute twice: for a waiting sequence and for a running one with the same prefix.

        Otherwise the waiting sequence waits until the running one has computed the prefix. Computing these tokens takes
        at most half as long as the fixed cost of a further step, and they are at most an eighth of a usual chunk.
        """
        return int(min(self._usual / 8, self._cost.overhead_tokens() / 2))

    def prefill_stats(self, running: Iterable[Sequence]) -> dict[str, float]:
        """Return the most prompt tokens and query-key pairs that are computed in a second, and those in progress."""
        tokens, pairs = self._cost.prefill_rates(self._usual)
        computed = [each.num_computed for each in running if each.prefilling]
        return {
            "prefill_tokens_per_second": tokens,
            "prefill_pairs_per_second": pairs,
            "prefilling_tokens": sum(computed),
            "prefilling_pairs": sum(num_pairs(0, each) for each in computed),
        }

    def least_seconds(self, num_tokens: int) -> float:
        """Return the least seconds that a prompt takes, at the highest speed that the steps allow to believe in."""
        tokens, pairs = self._cost.prefill_rates(self._usual)
        return num_tokens / tokens + num_pairs(0, num_tokens) / pairs

    def observe(self, batch: Batch, seconds: float) -> None:
        """Learn from a step that took ``seconds``."""
        self._cost.observe(work_of(batch), seconds)


class TokenLimit:
    """Limit on the tokens of a step.

    Args:
        most: the limit while the device has enough memory.

    Attributes:
        tokens: the present limit.
    """

    def __init__(self, most: int) -> None:
        self.tokens = self._most = most
        self._steps = 0

    def halve(self, num_tokens: int) -> bool:
        """Lower the limit to half of a step's tokens. If the step had one token, return False and change nothing.

        The limit may become lower than the number of running sequences; then the sequences admitted last skip steps.
        """
        self._steps = 0
        wanted = min(self.tokens, num_tokens) // 2
        if not wanted:
            return False
        self.tokens = wanted
        return True

    def count_step(self) -> None:
        """Count a step that was computed."""
        if self.tokens < self._most:
            self._steps += 1
            if self._steps >= STEPS_WITHOUT_ERROR:
                self.tokens, self._steps = min(self._most, 2 * self.tokens), 0


def usual_chunk(most: int) -> int:
    """Return the prompt tokens of a usual step, given the largest number: the rest is kept for the end of a prompt."""
    return most - most // 5


def slowdown(target: float) -> float:
    """Return how many times slower a target inter-token latency, in seconds, may make prompts."""
    return 1 + 0.15 * (0.1 / target) ** 2


def least_seconds(own: float, usual: float, slower: float) -> float:
    """Return the seconds of prompts in each step with which prompts are ``slower`` times slower than in usual chunks.

    If each step has s seconds of prompts and ``own`` seconds of streams, a prompt needs (own + s) / s seconds of
    elapsed time for each second of its own work. In usual chunks of ``usual`` seconds it needs (own + usual) / usual.
    """
    return own * usual / (slower * own + (slower - 1) * usual)
