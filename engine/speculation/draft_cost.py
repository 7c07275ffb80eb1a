"""Draft cost: which drafts of a step pay, by their acceptance rates and by measured seconds, for each batch size."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from .token_cost import TokenCost

_MARGIN = 1.1  # factor by which a draft's probability must exceed its estimated cost
_LOWEST_COST = 0.01  # no draft is free
_SHARED = 0.5  # share of a step's fixed cost that an accepted draft saves beside other rows
_LEAST_GAIN = 0.05  # share of a step without drafts; a smaller gain cannot be told from noise
_TRIAL_STEPS = 32  # steps with drafts before a trial is judged
_MOST_LOST = 4.0  # time that a trial may lose before it is judged, in steps
_SHORTEST_WAIT = 64  # steps without drafts after a failed trial, doubled by each further one
_LONGEST_WAIT = 4096
_RAISE = 2.0  # drafts that promise so many times as much as those that failed are tried during the wait
_PLAIN_WEIGHT = 0.125  # weight of the last step in the mean time of steps without drafts
_OUTLIER = 4.0  # a step this many times longer than without drafts counts as that long: something else ran


@dataclass(slots=True)
class DraftChoice:
    """The drafts of a step that are worth their cost.

    Attributes:
        counts: number of drafts by run.
        gain: number of tokens that the drafts are expected to gain, less the tokens that steps without drafts would
            draw in the same time.
    """

    counts: list[int]
    gain: float = 0.0


@dataclass(slots=True)
class _Trial:
    """Trial of drafts at one batch size. Gains are measured in units of a step without drafts.

    A trial ends after a number of steps with drafts, or as soon as the measured gain is clearly negative. If the gain
    is negative, drafts are not used for a number of steps, which doubles with every such trial. So drafts cost about
    one step in sixteen at first, and fewer later. Drafts with a much larger expected gain are used even in this time.

    Attributes:
        brought: measured gain of the steps since the last trial ended.
        promised: expected gain of the same steps.
        bar: least expected gain with which drafts are used.
        wait: number of steps for which the next failed trial stops drafts.
        left: number of steps without drafts until ``bar`` is 0 again.
    """

    brought: float = 0.0
    promised: float = 0.0
    steps: int = 0
    bar: float = 0.0
    wait: int = _SHORTEST_WAIT
    left: int = 0

    def observe(self, promised: float, brought: float) -> None:
        """Count a step with drafts."""
        self.brought, self.promised, self.steps = self.brought + brought, self.promised + promised, self.steps + 1
        if self.brought > -_MOST_LOST and self.steps < _TRIAL_STEPS:
            return
        if self.brought < 0:
            self.bar = max(self.bar, _RAISE * self.promised / self.steps)
            self.left, self.wait = self.wait, min(2 * self.wait, _LONGEST_WAIT)
        else:
            self.bar, self.left, self.wait = 0.0, 0, max(self.wait // 2, _SHORTEST_WAIT)
        self.brought, self.promised, self.steps = 0.0, 0.0, 0

    def pass_by(self) -> None:
        """Count a step without drafts."""
        if self.left:
            self.left -= 1
            if not self.left:
                self.bar = 0.0


class DraftCost:
    """Learns the cost of drafts from the steps in which every token is at a sampling position.

    Steps are grouped by the number of their rows that draw: 1, 2, 3 to 4, 5 to 8 and so on. Each group has its own
    linear model of seconds by tokens, and its own trial. The trial compares the gain that follows from the linear model
    and the acceptance rates with a measured gain. The measured gain is computed from the tokens and seconds of steps
    with drafts, and the seconds of steps with the same number of rows without drafts.
    """

    def __init__(self) -> None:
        self._all = TokenCost()
        self._by_size: dict[int, TokenCost] = {}
        self._plain: dict[int, float] = {}  # seconds of a step without drafts, by its rows
        self._trials: dict[int, _Trial] = {}

    def threshold(self, num_rows: int) -> float:
        """Return the least acceptance probability, 0 to 1, at which the first draft of a step pays."""
        own = self._by_size.get(_size(num_rows))
        found = self._all.threshold(num_rows) if own is None else own.threshold(num_rows, self._all)
        return min(1.0, max(_LOWEST_COST, _MARGIN * found))

    def worth(self, num_rows: int) -> float:
        """Return the worth of an accepted draft, in tokens.

        An accepted draft saves its row a token of a later step. It saves a whole step only in so far as other rows end
        earlier too: if a row ends before others, the others still pay the fixed cost.
        """
        own = self.threshold(num_rows)
        return 1.0 if num_rows == 1 else own + _SHARED * (1.0 - own)

    def least_gain(self, num_rows: int) -> float:
        """Return the tokens, net of their cost, that a step's drafts must be expected to gain."""
        trial = self._trials.get(_size(num_rows))
        return num_rows * max(_LEAST_GAIN, trial.bar if trial else 0.0)

    def choose(self, runs: Seq[Seq[float]], num_rows: int, limit: int) -> DraftChoice:
        """Return the drafts that maximise expected tokens a second: none if they do not gain enough.

        Of R rows and D drafts of which A are expected to be accepted, a step draws R + A tokens in base + slope (R + D)
        seconds, where A counts as ``worth`` says. Drafts are added in the order of their probability, as long as each
        raises the quotient.

        Args:
            runs: for each run of drafts, the probability of each draft that it is accepted if the drafts before it are.
            num_rows: rows that draw, R.
            limit: largest number of drafts.
        """
        choice = DraftChoice([0] * len(runs))
        price = self.threshold(num_rows) / num_rows  # cost of a draft, as a share of a step without drafts
        worth = self.worth(num_rows)
        heap = [(-rates[0], index) for index, rates in enumerate(runs) if rates]
        heapify(heap)
        tokens, cost = float(num_rows), 1.0
        while heap and limit:
            chance, index = -heap[0][0], heap[0][1]
            if worth * chance * cost <= price * tokens:
                break
            tokens, cost, limit = tokens + worth * chance, cost + price, limit - 1
            choice.counts[index] += 1
            count, rates = choice.counts[index], runs[index]
            if count < len(rates):
                heapreplace(heap, (-chance * rates[count], index))
            else:
                heappop(heap)
        choice.gain = tokens - cost * num_rows
        return choice if choice.gain > self.least_gain(num_rows) else DraftChoice([0] * len(runs))

    def draft_length(self, rates: Seq[float], num_rows: int, seconds: float, most: int) -> int:
        """Return how many drafts of a draft model for each row maximise expected tokens a second; 0 for no drafts.

        Args:
            rates: acceptance rate of each row that would draft.
            num_rows: rows that draw.
            seconds: seconds that one draft for each row of ``rates`` takes.
            most: drafts of a row.
        """
        step = self._seconds(num_rows)
        if not step:
            return 0
        # Cost of each draft, as a share of a step without drafts.
        each = self.threshold(num_rows) / num_rows * len(rates) + seconds / step
        best, best_gain, best_speed = 0, 0.0, float(num_rows)
        tokens, chances, worth = float(num_rows), list(rates), self.worth(num_rows)
        for length in range(1, most + 1):
            tokens += worth * sum(chances)
            speed = tokens / (1 + length * each)
            if speed > best_speed:
                best, best_gain, best_speed = length, tokens - (1 + length * each) * num_rows, speed
            chances = [chance * rate for chance, rate in zip(chances, rates, strict=True)]
        return best if best_gain > self.least_gain(num_rows) else 0

    def tokens_in(self, seconds: float, num_rows: int) -> float:
        """Return the tokens that steps of so many rows without drafts draw in some seconds."""
        step = self._seconds(num_rows)
        return num_rows * seconds / step if step else 0.0

    def _seconds(self, num_rows: int) -> float:
        """Return the seconds of a step without drafts, 0 if unknown."""
        return self._plain.get(num_rows) or self._all.seconds(num_rows)

    def observe(
        self, num_rows: int, num_tokens: int, seconds: float, num_drawn: int, gain: float, drafting: float = 0.0
    ) -> None:
        """Learn from a step.

        Args:
            num_rows: rows, all of which draw.
            num_tokens: tokens computed, drafts included.
            seconds: seconds that the step took.
            num_drawn: tokens drawn, accepted drafts included.
            gain: gain that was expected of the step's drafts, 0 without drafts.
            drafting: seconds of the step that a draft model took.
        """
        size = _size(num_rows)
        self._all.observe(num_tokens, seconds - drafting)
        self._by_size.setdefault(size, TokenCost()).observe(num_tokens, seconds - drafting)
        plain = self._plain.get(num_rows)
        if num_tokens == num_rows and not drafting:
            limited = seconds if plain is None else min(seconds, _OUTLIER * plain)
            self._plain[num_rows] = limited if plain is None else plain + _PLAIN_WEIGHT * (limited - plain)
            if size in self._trials:
                self._trials[size].pass_by()
        elif plain:
            accepted = self.worth(num_rows) * (num_drawn - num_rows) / num_rows
            brought = 1 + accepted - min(seconds / plain, _OUTLIER)
            self._trials.setdefault(size, _Trial()).observe(gain / num_rows, brought)


def _size(num_rows: int) -> int:
    """Return the class of a number of rows: 0 for 1, then by powers of two."""
    return (num_rows - 1).bit_length()
