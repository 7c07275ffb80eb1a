"""Draft model or head: proposes tokens for many sequences at once, over KV pages and a prefix cache of its own.

The draft model follows the sequences of the target: its KV holds the tokens that are known, then its own drafts::

    tokens of the sequence   | prompt ... generated | next token: drawn by the target, not computed by either
    in the draft's pool      | known to be right    | drafts ahead, of which verification keeps some
                             0                 num_known

The draft model draws with the request's own parameters and with the seed and position of the target's draw, so that a
sampled draft is the token that the target would draw from the same probabilities. Its drafts are verified like any
other draft, so it cannot change an answer. Therefore it may read base weights, whatever the adapter, and ignore
penalties. Under a grammar it draws with the mask of each token: the matcher advances by the drafts, and goes back when
all are drawn.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

from ...radix.namespace import Namespace, Path
from ..batch import Batch, Masks, PageCopy, Row, RowStart, StepResult
from ..kv_cache.prefix_cache import Lease, PrefixCache
from ..sequence.mask_jobs import MaskJob, mask_jobs
from ..sequence.sequence import Sequence
from ..types import SamplingParams
from .token_cost import TokenCost

_MOST_CATCHING_UP = 256  # tokens that the draft model computes in one step of the target to catch up with it
_WORTH = 8  # tokens to catch up with for each token that a sequence may still generate, beyond which it has no drafts


def most_tokens(num_rows: int) -> int:
    """Return the most tokens of a step of the draft model, for so many running sequences."""
    return _MOST_CATCHING_UP + num_rows


class DraftRunner(Protocol):
    """The device's side of a draft model: ``executor.draft_worker.DraftWorker``, or a fake in tests.

    Attributes:
        num_pages: number of pages of the draft's KV pool.
        max_model_len: most tokens of a sequence.
        vocab_size: number of tokens that it can read.
        base_digest: digest that identifies its weights.
        num_skipped: number of first tokens of a sequence that it does not read. 1 for a head, which reads each token
            together with the target's hidden state of the token before.
    """

    num_pages: int
    max_model_len: int
    vocab_size: int
    base_digest: str
    num_skipped: int

    def run(self, batch: Batch, pages: Seq[Seq[int]], masks: Callable[[], Masks] | None = None) -> StepResult | None:
        """Compute a step. Returns None if the device has no memory for it.

        Args:
            pages: for each row, pages of the target's KV pool, whose cells from ``row.start`` on hold the positions
                before the row's tokens; none for a row that reads its own last draft.
            masks: waits for the step's masks; None if no row has a mask.
        """


@dataclass(slots=True)
class _Follower:
    """The draft model's side of a sequence.

    Attributes:
        line: row of the sequence in the draft model's page table and sampler.
        pages: the lease on its pages.
        num_known: tokens of the sequence in the draft's pool.
        start: first message to the draft model about the sequence, sent with its first row, then None.
        ahead: drafts in the pool after the known tokens.
        limit: largest number of drafts in this step.
        has_failed: whether the sequence can have no further drafts.
    """

    line: int
    pages: Lease
    num_known: int
    start: RowStart | None
    ahead: list[int] = field(default_factory=list)
    limit: int = 0
    has_failed: bool = False

    def follow(self, tokens: array[int], *, is_head: bool) -> None:
        """Count the drafts that the sequence has accepted, without its last token, as known; others are overwritten.

        A head overwrites all drafts, since it read them with its own hidden states in place of the target's.
        """
        for draft in () if is_head else self.ahead:
            if self.num_known == len(tokens) - 1 or tokens[self.num_known] != draft:
                break
            self.num_known += 1
        self.ahead.clear()


@dataclass(slots=True)
class _Step:
    """A step of the draft model while it is planned, and the sequences of its rows."""

    rows: list[Row] = field(default_factory=list)
    starts: list[RowStart] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    pages: list[Seq[int]] = field(default_factory=list)  # page table of each row in the target

    def add(
        self, sequence: Sequence, follower: _Follower, start: int, tokens: Seq[int], *, draws: bool, ahead: int
    ) -> None:
        """Add a row. The follower must have pages for its positions.

        Args:
            ahead: drafts before the token that it draws.
        """
        if follower.start is not None:
            self.starts.append(follower.start)
            follower.start = None
        if copy := follower.pages.take_copy():
            self.copies.append(copy)
        first, new = follower.pages.take_changes()
        lease, num_generated = sequence.lease, sequence.num_generated + ahead
        self.rows.append(Row(follower.line, start, tokens, first, new, draws, num_generated))
        self.sequences.append(sequence)
        self.pages.append(() if ahead or lease is None else lease.pages)


class ModelDrafter:
    """Runs a draft model. Reads sequences; keeps its own state of each from its first draft until ``leave``.

    Args:
        runner: the draft model.
        page_size: tokens in a page.
        fill_masks: begins to fill the masks of a step, and returns a function that waits for them.
        sharing: whether sequences share prefixes.
        num_rows: largest number of running sequences.
        clock: seconds, monotonic.

    Attributes:
        lacked_memory: whether the last ``draft`` broke off because the device had no memory for a step of the model.
    """

    def __init__(
        self,
        runner: DraftRunner,
        page_size: int,
        fill_masks: Callable[[Seq[MaskJob]], Callable[[], Masks]],
        *,
        sharing: bool,
        num_rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._page_size = page_size
        self._fill_masks = fill_masks
        self._cache = PrefixCache(runner.num_pages, page_size, sharing=sharing)
        self._num_rows = num_rows
        self._free_lines = list(range(num_rows - 1, -1, -1))
        self._clock = clock
        self._followers: dict[int, _Follower] = {}
        # Whether drafts of a sequence are worth reading the tokens that the draft model lacks, by sequence id.
        self._is_worth: dict[int, bool] = {}
        self._cost = TokenCost()
        self.lacked_memory = False

    def seconds(self, num_rows: int) -> float:
        """Return the expected seconds of one draft for each of so many rows; 0 before any was made."""
        return self._cost.seconds(num_rows)

    def can_follow(self, sequence: Sequence) -> bool:
        """Return whether a running sequence may have drafts: its prompt is read, and it is worth catching up with."""
        num_tokens = sequence.num_tokens - self._runner.num_skipped
        if sequence.prefilling or not 0 < num_tokens < self._runner.max_model_len:
            return False
        if sequence.matcher and not sequence.matcher.may_draft(sequence.remaining):
            return False
        lease = sequence.lease
        if self._runner.num_skipped and (lease is None or lease.num_tokens == sequence.num_computed):
            return False  # the target's first step has yet to copy the end of a prefix hit
        if (follower := self._followers.get(sequence.id)) is not None:
            return not follower.has_failed
        if sequence.id not in self._is_worth:
            most = num_tokens - 1
            missing = most - self._cache.match(self._path(sequence), self._tokens(sequence), most)
            self._is_worth[sequence.id] = missing <= _WORTH * sequence.remaining
        return self._is_worth[sequence.id]

    def draft(self, limits: Iterable[tuple[Sequence, int]]) -> dict[int, list[int]]:
        """Return drafts by sequence id, for each sequence that the draft model catches up with in this step.

        A sequence gets fewer drafts than its limit if pages are missing, if a draft ends it, if its mask allows no
        token of the draft model's vocabulary, or if the device has no memory for a step of the draft model.

        Args:
            limits: sequences to draft for, each with its largest number of drafts, at least 1.
        """
        self.lacked_memory = False
        step, left = _Step(), most_tokens(self._num_rows)
        for sequence, limit in limits:
            left -= self._catch_up(sequence, limit, left, step)
        drafts: dict[int, list[int]] = {}
        drawing = drawn = self._run(step, drafts)
        while drawing:
            step = _Step()
            for each in drawing:
                self._go_on(each, drafts[each.id], step)
            drawing = self._run(step, drafts)
        for each in drawn:
            if each.matcher:
                each.matcher.rollback_to(each.num_generated)
        return drafts

    def leave(self, sequence: Sequence) -> None:
        """Give the pages and the line of a sequence back, as it leaves its row."""
        self._is_worth.pop(sequence.id, None)
        if follower := self._followers.pop(sequence.id, None):
            self._cache.release(follower.pages, self._tokens(sequence), follower.num_known)
            self._free_lines.append(follower.line)

    def clear(self) -> None:
        """Forget all prefixes, while no sequence is followed."""
        assert not self._followers, "pages of running sequences"
        self._cache = PrefixCache(self._runner.num_pages, self._page_size, sharing=self._cache.sharing)

    def check(self) -> None:
        """Raise AssertionError or BrokenInvariant if pages, tree, leases and lines are inconsistent."""
        self._cache.check()
        lines = [*self._free_lines, *(each.line for each in self._followers.values())]
        assert sorted(lines) == list(range(self._num_rows)), f"lines {sorted(lines)} of {self._num_rows}"

    def _path(self, sequence: Sequence) -> Path:
        """Return the namespaces of the draft's KV for a sequence.

        A draft model computes KV with its base weights for all adapters, so its namespaces have no adapter. The KV of a
        head depends on the target's hidden states, so its namespaces are those of the target, extended by the token
        that the head skips.
        """
        path, digest = sequence.path, self._runner.base_digest
        if not self._runner.num_skipped:
            return Path(Namespace(digest, None, path.namespace.salt, path.namespace.tenant))
        base = f"{digest} {path.namespace.base} {sequence.tokens[0]}"
        return Path(replace(path.namespace, base=base), path.switch_at, path.before and replace(path.before, base=base))

    def _tokens(self, sequence: Sequence) -> array[int]:
        """The tokens that the draft model reads."""
        skipped = self._runner.num_skipped
        return sequence.tokens[skipped:] if skipped else sequence.tokens

    def _catch_up(self, sequence: Sequence, limit: int, most: int, step: _Step) -> int:
        """Let the draft model compute the missing tokens of a sequence. Returns how many tokens it will compute.

        Args:
            limit: largest number of drafts for the sequence after that.
            most: largest number of tokens to compute.
        """
        if most <= 0:
            return 0
        follower = self._followers.get(sequence.id) or self._begin(sequence)
        follower.limit = limit
        known = self._tokens(sequence)
        follower.follow(known, is_head=bool(self._runner.num_skipped))
        start = follower.num_known
        tokens = known[start : start + most]
        if max(tokens) >= self._runner.vocab_size:
            follower.has_failed = True
            return 0
        if not self._cache.grow(follower.pages, start + len(tokens)):
            if follower.start is not None:
                # The pages that it would copy may be evicted before the next step.
                self.leave(sequence)
            return 0
        draws = start + len(tokens) == len(known)
        step.add(sequence, follower, start, tokens, draws=draws, ahead=0)
        return len(tokens)

    def _begin(self, sequence: Sequence) -> _Follower:
        known = self._tokens(sequence)
        lease = self._cache.acquire(self._path(sequence), known, len(known) - 1)
        line, params, tokens = self._free_lines.pop(), _drafting(sequence.params), sequence.tokens[:]
        late = () if sequence.matcher else tuple(sequence.spec.late_ids)
        start = RowStart(line, params, tokens, sequence.num_prompt, late, sequence.spec.seed)
        follower = _Follower(line, lease, lease.num_tokens, start)
        self._followers[sequence.id] = follower
        return follower

    def _go_on(self, sequence: Sequence, drafts: list[int], step: _Step) -> None:
        """Let the draft model and the grammar read its last draft, if the sequence may have another one behind it."""
        follower, last = self._followers[sequence.id], drafts[-1]
        place = sequence.num_tokens - self._runner.num_skipped + len(drafts) - 1
        if len(drafts) == follower.limit or last in sequence.spec.stop_ids or place + 1 >= self._runner.max_model_len:
            return
        # A mask of a larger vocabulary forced a token that the draft model does not know.
        if last >= self._runner.vocab_size:
            return
        matcher = sequence.matcher
        if matcher and not (matcher.accept(last) and matcher.may_draft(sequence.remaining - len(drafts))):
            return
        if self._cache.grow(follower.pages, place + 1):
            step.add(sequence, follower, place, array("i", (last,)), draws=True, ahead=len(drafts))
            follower.ahead.append(last)

    def _run(self, step: _Step, drafts: dict[int, list[int]]) -> list[Sequence]:
        """Compute a step and add what it draws to the drafts. Returns the sequences that got one."""
        if not step.rows:
            return []
        batch = Batch(tuple(step.rows), tuple(step.starts), tuple(step.copies))
        owners = {row.row: sequence for row, sequence in zip(step.rows, step.sequences, strict=True)}
        began = self._clock()
        jobs = mask_jobs(batch, lambda row: owners[row.row])
        masks = self._fill_masks(jobs) if jobs else None
        result = self._runner.run(batch, step.pages, masks)
        if result is None:
            if masks is not None:
                masks()  # the mask thread uses the matchers until it is done
            self._drop(step)
            return []
        # A prompt takes less time for each token, so that its steps are not measured.
        if batch.num_tokens <= 2 * len(batch.rows):
            self._cost.observe(len(batch.rows), self._clock() - began)
        drawn = []
        for sequence, row, row_result in zip(step.sequences, batch.rows, result.rows, strict=True):
            follower, known = self._followers[sequence.id], self._tokens(sequence)
            if row.start < len(known):
                follower.num_known = row.start + len(row.tokens)
                self._cache.commit(follower.pages, known, follower.num_known)
            follower.has_failed |= row_result.failed and not sequence.matcher
            if row.draws:
                drafts.setdefault(sequence.id, []).extend(row_result.tokens)
            if row_result.tokens:
                drawn.append(sequence)
        return drawn

    def _drop(self, step: _Step) -> None:
        """Stop following the sequences of a step for which the device had no memory.

        The draft model may not have been told of their lines and new pages, and copies of pages may not have been made,
        so only KV that is in its tree is trusted. Drafts of earlier steps are as good as any.
        """
        self.lacked_memory = True
        for sequence in step.sequences:
            follower = self._followers[sequence.id]
            follower.num_known = min(follower.num_known, follower.pages.num_shared * self._page_size)
            self.leave(sequence)


def _drafting(params: SamplingParams) -> SamplingParams:
    """Return the parameters by which a draft is drawn: no logprobs, and no penalties, whose counts would be wrong."""
    return replace(
        params,
        logprobs=None,
        prompt_logprobs=None,
        logprob_token_ids=(),
        allowed_logprobs=False,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
    )
