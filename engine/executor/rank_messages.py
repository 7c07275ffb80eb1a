"""Messages of rank 0 to its followers: the plan of a step, and the rows of the head.

A message has a header of three 64-bit numbers: its number in the order of messages, its kind, and the number of bytes
of its content. The content of a step is a list of 64-bit numbers, followed by the bytes of the pages that the step
loads. All other contents, except adapters, are only such a list. Followers get the parts of a ``Batch`` that the
forward pass reads: no text, no sampling parameters, and no tokens that are already in the KV pool.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

from ..batch import Batch, PageCopy, PageLoad, PoolWrite, Row, RowStart, StateLoad
from ..types import SamplingParams

HEADER = struct.Struct("<qqq")
MOST_BYTES = 1 << 36  # bytes of an adapter's message: a longer one is malformed
_NO_PARAMS = SamplingParams()
_NUMBER = 8  # bytes of a number
_COPY, _LOAD_PAGE, _LOAD_STATE = range(3)


class Kind(IntEnum):
    """The action that a message requests of a follower."""

    STEP = 1
    LOGITS = 2
    BEST = 3
    INSTALL = 4
    CLEAR = 5
    LOAD = 6
    END = 7


class RankMessage(NamedTuple):
    """A message, with its number in the order of messages, counted from 1."""

    number: int
    kind: Kind
    content: bytes

    def to_bytes(self) -> bytes:
        return HEADER.pack(self.number, self.kind, len(self.content)) + self.content


def pack_numbers(numbers: Sequence[int]) -> bytes:
    """Return whole numbers as bytes."""
    return struct.pack(f"<{len(numbers)}q", *numbers)


def unpack_numbers(content: bytes) -> tuple[int, ...]:
    """Invert ``pack_numbers``."""
    return struct.unpack(f"<{len(content) // 8}q", content)


def pack_batch(batch: Batch) -> bytes:
    """Return what a forward pass reads of a batch."""
    numbers = [len(batch.starts), len(batch.copies), len(batch.rows)]
    for start in batch.starts:
        numbers += start.row, start.slot, start.adapted_from, int(start.is_long), start.state
    for copy in batch.copies:
        numbers += _write_numbers(copy)
    for row in batch.rows:
        counts = len(row.tokens), len(row.new_pages), len(row.prompt_targets), len(row.checkpoints)
        of_pass = row.row, row.start, row.first_new_page, int(row.draws), row.num_drafts, row.num_pooled, row.state
        numbers += *of_pass, *counts
    numbers += chain.from_iterable(chain(row.tokens, row.new_pages, *row.checkpoints) for row in batch.rows)
    loaded = (copy.payload for copy in batch.copies if not isinstance(copy, PageCopy))
    return b"".join((pack_numbers([len(numbers), *numbers]), *loaded))


def unpack_batch(content: bytes) -> Batch:
    """Invert ``pack_batch``."""
    (count,) = unpack_numbers(content[:_NUMBER])
    numbers = iter(unpack_numbers(content[_NUMBER : _NUMBER * (1 + count)]))
    num_starts, num_copies, num_rows = _take(numbers, 3)
    starts = tuple(_start(*_take(numbers, 5)) for _ in range(num_starts))
    fields = [_take(numbers, 4) for _ in range(num_copies)]
    copies = tuple(_writes(fields, memoryview(content)[_NUMBER * (1 + count) :]))
    fields = [_take(numbers, 11) for _ in range(num_rows)]
    return Batch(tuple(_row(numbers, *each) for each in fields), starts, copies)


def _write_numbers(write: PoolWrite) -> tuple[int, int, int, int]:
    """Return a copy or load as four numbers: kind, source, target, and the number of tokens copied or bytes loaded."""
    if isinstance(write, PageCopy):
        return _COPY, write.source, write.target, write.num_tokens
    if isinstance(write, PageLoad):
        return _LOAD_PAGE, 0, write.page, len(write.payload)
    return _LOAD_STATE, 0, write.slot, len(write.payload)


def _writes(fields: Sequence[Sequence[int]], payloads: memoryview) -> Iterator[PoolWrite]:
    begin = 0
    for kind, source, target, size in fields:
        if kind == _COPY:
            yield PageCopy(source, target, size)
            continue
        payload = payloads[begin : begin + size]
        begin += size
        yield PageLoad(target, payload) if kind == _LOAD_PAGE else StateLoad(target, payload)


def _start(row: int, slot: int, adapted_from: int, is_long: int, state: int) -> RowStart:
    return RowStart(row, _NO_PARAMS, (), 0, (), 0, slot, adapted_from, bool(is_long), state)


def _row(
    numbers: Iterator[int],
    row: int,
    start: int,
    first_new_page: int,
    draws: int,
    num_drafts: int,
    num_pooled: int,
    state: int,
    num_tokens: int,
    num_pages: int,
    num_targets: int,
    num_checkpoints: int,
) -> Row:
    tokens, pages = _take(numbers, num_tokens), tuple(_take(numbers, num_pages))
    checkpoints = tuple((position, slot) for position, slot in (_take(numbers, 2) for _ in range(num_checkpoints)))
    return Row(
        row=row,
        start=start,
        tokens=tokens,
        first_new_page=first_new_page,
        new_pages=pages,
        draws=bool(draws),
        num_generated=0,
        num_drafts=num_drafts,
        # Their values do not matter, as rank 0 alone reads the scores.
        prompt_targets=(0,) * num_targets,
        checkpoints=checkpoints,
        state=state,
        num_pooled=num_pooled,
    )


def _take(numbers: Iterator[int], count: int) -> list[int]:
    return [next(numbers) for _ in range(count)]
