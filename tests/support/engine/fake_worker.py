"""A device without tensors: each KV cell holds a hash of all tokens up to it, and the next token follows from it.

A page that is stale, mixed up, freed too early or written by a neighbour changes the hash, and with it every token
that follows: what ``expected_tokens`` says then differs from what the engine sends.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rootgraft.engine.batch import (
    Batch,
    Masks,
    PageLoad,
    Row,
    RowResult,
    StateLoad,
    StepHandle,
    StepResult,
    TokenCheck,
    placeholder_token,
)
from rootgraft.engine.kv_cache.state_cache import StateSlots
from rootgraft.engine.types import Logprob, Pooler
from rootgraft.radix.namespace import ENDLESS

_MASK = (1 << 61) - 1


def chain(previous: int, token: int) -> int:
    """The content of a cell from the content of the one before and the cell's token."""
    return ((previous ^ token) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK


def adapter_code(digest: str) -> int:
    """What an adapter with this content adds to each token that it reads."""
    return int(digest[:10], 16) << 8


def next_token(content: int, vocab_size: int) -> int:
    """The token that the last cell's content leads to."""
    return (content >> 17) % vocab_size


def expected_tokens(
    prompt: Iterable[int], count: int, vocab_size: int, code: int = 0, adapted_from: int = 0
) -> list[int]:
    """What a sequence alone on a fresh engine generates, with an adapter's code from a position on."""
    content = 0
    for position, token in enumerate(prompt):
        content = chain(content, token ^ (code if position >= adapted_from else 0))
    tokens = []
    for _ in range(count):
        tokens.append(next_token(content, vocab_size))
        content = chain(content, tokens[-1] ^ code)
    return tokens


_LONG = 1 << 50  # read beside each token of a sequence beyond the switch of its rotary embedding


def expected_past_switch(prompt: list[int], count: int, vocab_size: int, switch: int) -> list[int]:
    """The same, where a sequence is computed anew from its first token once it is longer than ``switch``."""
    tokens = list(prompt)
    for _ in range(count):
        content = 0
        for token in tokens:
            content = chain(content, token ^ (_LONG if len(tokens) > switch else 0))
        tokens.append(next_token(content, vocab_size))
    return tokens[len(prompt) :]


@dataclass
class FakeStep:
    """A launched step. Where the worker overlaps, masks are waited for when it is drawn, else when it is read."""

    worker: FakeWorker
    batch: Batch
    number: int
    masks: Callable[[], Masks] | None = None

    def draw(self, masks: Callable[[], Masks] | None) -> None:
        self.worker.log.append(("draw", self.number))
        self.masks = masks
        if masks and self.worker.overlaps:
            filled = replace(given := masks(), words=given.words.copy())
            self.masks = lambda: filled

    def result(self) -> StepResult:
        self.worker.log.append(("read", self.number))
        return self.worker.compute(self.batch, self.masks)


class FakePages:
    """The pages and states of a fake pool, cell by cell 64 bits."""

    on_device = True

    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        self.form = "fake states" if worker.states else "fake"
        self.page_bytes = 8 * worker.page_size
        self.state_bytes = 8 if worker.states else 0
        self.refusal = ""

    def read_page(self, page: int) -> bytes:
        start = page * self._worker.page_size
        return array("q", self._worker.cells[start : start + self._worker.page_size]).tobytes()

    def read_state(self, slot: int) -> bytes:
        return array("q", [self._worker.state_of[slot]]).tobytes()

    def load(self, loads: Iterable[PageLoad | StateLoad]) -> None:
        for load in loads:
            if isinstance(load, StateLoad):
                [self._worker.state_of[load.slot]] = memoryview(bytes(load.payload)).cast("q").tolist()
                continue
            start = load.page * self._worker.page_size
            content = memoryview(bytes(load.payload)).cast("q").tolist()
            self._worker.cells[start : start + self._worker.page_size] = content


class FakeWorker:
    """Runs batches on integers, with the same rules as a device: rows read what earlier steps wrote."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        vocab_size: int = 11,
        max_model_len: int = 10**6,
        eos: tuple[int, ...] = (),
        adapters: Any = None,
        overlaps: bool = False,
        rope_switch: int = ENDLESS,
        states: StateSlots | None = None,
        draft: Any = None,
    ) -> None:
        self.rope_switch = rope_switch
        self.draft = draft
        self.states = states
        self.state_of = [-1] * (states.total if states else 0)  # in each slot: the content of the cell before it
        self.sources: dict[int, int] = {}  # slot of the state that a row reads next, -1 for none
        self.num_pages, self.page_size = num_pages, page_size
        self.vocab_size, self.num_logits, self.eos_ids = vocab_size, vocab_size, eos
        self.max_model_len = min(max_model_len, (num_pages - 1) * page_size - 1)
        self.summary = ("fake",)
        self.base_digest = "fake"
        self.kv_pages = FakePages(self)
        self.pooler = Pooler()
        self.adapters = adapters
        self.overlaps = overlaps
        self.log: list[tuple[str, int]] = []  # what was asked of it, with the number of the step
        self.slots: dict[int, str] = {}  # digests of the adapters in them, when a step was launched
        self.drawn: dict[int, int] = {}  # by the last step, by row
        self.pending: deque[tuple[Batch, dict[int, str]]] = deque()  # launched, and not computed yet
        self.num_launched = 0
        self.num_freed = 0
        self.cells = [-1] * (num_pages * page_size)
        self.tables: dict[int, list[int]] = {}
        self.adapted: dict[int, tuple[int, int]] = {}
        self.long: dict[int, bool] = {}
        self.named: dict[int, tuple[int, ...]] = {}  # tokens whose logprobs a row wants
        self.batches: list[Batch] = []
        self.failing_rows: set[int] = set()

    def launch(self, batch: Batch) -> StepHandle:
        """Compute a step as late as can be: when its result is read, or that of a later one.

        So whatever the engine changes that a step under way still needs, changes its tokens.
        """
        number, self.num_launched = self.num_launched, self.num_launched + 1
        self.log.append(("launch", number))
        self.pending.append((batch, dict(self.adapters._pinned) if self.adapters else {}))
        return FakeStep(self, batch, number)

    def close(self) -> None:
        """Nothing computes beside it."""

    def free_memory(self) -> None:
        self.num_freed += 1

    def compute(self, batch: Batch, masks: Callable[[], Masks] | None) -> StepResult:
        """Compute all steps up to this one."""
        while self.pending[0][0] is not batch:
            forgotten, self.slots = self.pending.popleft()
            self.run(forgotten)
        _, self.slots = self.pending.popleft()
        return self.run(batch, masks)

    def run(self, batch: Batch, masks: Callable[[], Masks] | None = None) -> StepResult:
        """Compute a step. Of the tokens that a mask allows, the next one at or after the hash's is drawn."""
        self.batches.append(batch)
        self.forced: set[int] = set()
        self.checks: Mapping[int, TokenCheck] = {}
        self.limited: set[int] = set()
        self.allowed = self._allowed(masks()) if masks else {}
        self.position = 0
        for start in batch.starts:
            self.tables[start.row] = []
            self.adapted[start.row] = start.slot, start.adapted_from
            self.long[start.row] = start.is_long
            self.named[start.row] = start.params.logprob_token_ids
            self.sources[start.row] = start.state
        for copy in batch.copies:
            if isinstance(copy, PageLoad | StateLoad):
                self.kv_pages.load([copy])
                continue
            for i in range(copy.num_tokens):
                self.cells[copy.target * self.page_size + i] = self.cells[copy.source * self.page_size + i]
        writes: dict[int, int] = {}
        self.saved: dict[int, int] = {}
        self.read: list[tuple[int, int]] = []  # slot and row
        results = tuple(self._row(row, writes) for row in batch.rows)
        assert all(slot not in self.saved or slot == row for slot, row in self.read), "a row writes what another reads"
        for slot, content in self.saved.items():
            self.state_of[slot] = content
        for cell, content in writes.items():
            self.cells[cell] = content
        return StepResult(results)

    def _row(self, row: Row, writes: dict[int, int]) -> RowResult:
        table = self.tables[row.row]
        del table[row.first_new_page :]
        assert len(table) == row.first_new_page, "a gap in the page table"
        table.extend(row.new_pages)
        content = self.cells[self._cell(table, row.start - 1)] if row.start else 0
        assert content >= 0, "reads a cell that nobody wrote"
        if self.states:
            source = self.sources[row.row] if row.state < 0 else row.state
            self.read.append((source, row.row))
            assert (self.state_of[source] if source >= 0 else 0) == content, "reads the state of other tokens"
        contents = []
        assert self.long[row.row] or row.start + len(row.tokens) <= self.rope_switch, "is not computed as a long one"
        for i, token in enumerate(row.tokens):
            if token < 0:
                assert token == placeholder_token(row.row), "waits for the token of another row"
                # None was drawn if the step before had only rows that have ended: then this one has ended too, and what
                # it draws is ignored. A row that goes on would show it by its answer.
                token = self.drawn.get(row.row, 0)
            content = chain(content, token ^ self._weights(row.row, row.start + i))
            contents.append(content)
            cell = self._cell(table, row.start + i)
            assert cell not in writes, "two rows write one cell"
            writes[cell] = content
        if self.states:
            self._save(row, contents)
        scores = tuple(Logprob(token, 0.0, 1, ()) for token in row.prompt_targets)
        first, self.position = self.position, self.position + row.num_positions
        if row.row in self.failing_rows:
            return RowResult(failed=True)
        result = self._draw(row, contents, first)
        if result.tokens:
            self.drawn[row.row] = result.tokens[-1]
        top = tuple((token, 0.0) for token in self.named[row.row])
        logprobs = tuple(Logprob(token, 0.0, 1, top) for token in result.tokens) if top else ()
        return replace(result, prompt_logprobs=scores, logprobs=logprobs)

    def _save(self, row: Row, contents: list[int]) -> None:
        """Leave the states: the row's own, and those that the batch asks for."""
        self.sources[row.row] = row.row
        for slot, content in [
            (row.row, contents[-1]),
            *((slot, contents[position - row.start - 1]) for position, slot in row.checkpoints),
        ]:
            assert slot not in self.saved, "two states go to one slot"
            self.saved[slot] = content

    def _draw(self, row: Row, contents: list[int], first: int) -> RowResult:
        """Tokens after the last known one and after each draft, as long as the drafts are those drawn."""
        drawn: list[int] = []
        for ahead in range(row.num_positions):
            token = next_token(contents[len(contents) - row.num_positions + ahead], self.vocab_size)
            allowed = self.allowed.get(first + ahead, range(self.vocab_size))
            if not allowed:
                return RowResult(tuple(drawn), failed=True)
            drawn.append(self.nearest(allowed, token, first + ahead))
            if ahead < row.num_drafts and drawn[-1] != row.drafts[ahead]:
                break
        num_forced = sum(first + i in self.forced for i in range(len(drawn)))
        is_limited = any(first + i in self.limited for i in range(len(drawn)))
        return RowResult(tuple(drawn), num_forced=num_forced, is_limited=is_limited)

    def nearest(self, allowed: Sequence[int], token: int, position: int) -> int:
        """Return the next allowed token at or after one, after which an end fits in the budget of tokens.

        Args:
            allowed: tokens in rising order, at least one; the first comes after the last.
        """
        check = self.checks.get(position)
        first, excluded = bisect_left(allowed, token), set[int]()
        for ahead in range(len(allowed)):
            chosen = allowed[(first + ahead) % len(allowed)]
            if chosen in excluded:
                continue
            if check is None or check.fits(chosen):
                if ahead:
                    self.limited.add(position)
                return chosen
            excluded.update(check.alike(chosen).tolist())
        raise AssertionError("no end fits behind any token that the grammar allows")

    def _weights(self, row: int, position: int) -> int:
        """What reads a token: 0 for the base model, else a number that follows from what is in the row's slot."""
        slot, first = self.adapted[row]
        code = adapter_code(self.slots[slot]) if slot >= 0 and position >= first else 0
        return code ^ (_LONG if self.long[row] else 0)

    def _allowed(self, masks: Masks) -> dict[int, list[int]]:
        bits = np.unpackbits(masks.words.view(np.uint8), axis=1, count=self.num_logits, bitorder="little")
        allowed = {position: np.flatnonzero(row).tolist() for position, row in zip(masks.positions, bits, strict=True)}
        self.forced = {position for position, token in zip(masks.positions, masks.forced, strict=True) if token >= 0}
        self.checks = {masks.positions[index]: check for index, check in masks.checks.items()}
        assert all(len(allowed[position]) == 1 for position in self.forced)
        return allowed

    def _cell(self, table: list[int], position: int) -> int:
        return table[position // self.page_size] * self.page_size + position % self.page_size
