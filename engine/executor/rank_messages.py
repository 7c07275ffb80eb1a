"""Messages of rank 0 to its followers: the plan of a step, the rows of the head, and shards of adapters.

A message has a header of three 64-bit numbers: its place in the order, its kind, and the bytes of its content. All but
adapters are lists of 64-bit numbers. Of a ``Batch`` the followers get what their forward pass reads: no text, no
parameters of draws, and no tokens that are in the KV pool already.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.lora_ops import Factors
from ...kernels.memory import lazy_zeros
from ...lora.prepare_factors import PreparedAdapter
from ..batch import Batch, PageCopy, Row, RowStart
from ..types import SamplingParams

HEADER = struct.Struct("<qqq")
MOST_BYTES = 1 << 36  # bytes of an adapter's message: a longer one is malformed
_Place = tuple[int, str, list[int]]
_NO_PARAMS = SamplingParams()
_LENGTH = struct.Struct("<q")


class Kind(IntEnum):
    """What a message asks of a follower."""

    STEP = 1
    LOGITS = 2
    BEST = 3
    INSTALL = 4
    CLEAR = 5
    END = 6


class RankMessage(NamedTuple):
    """A message in its place of the order, counted from 1."""

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
    """Return what a forward pass reads of a batch.

    Raises:
        ValueError: it loads pages from elsewhere, of which rank 0 has its own part alone.
    """
    copies = [copy for copy in batch.copies if isinstance(copy, PageCopy)]
    if len(copies) < len(batch.copies):
        raise ValueError("pages that were kept elsewhere cannot be loaded by several ranks")
    numbers = [len(batch.starts), len(copies), len(batch.rows)]
    for start in batch.starts:
        numbers += start.row, start.slot, start.adapted_from, int(start.is_long), start.state
    for copy in copies:
        numbers += copy.source, copy.target, copy.num_tokens
    for row in batch.rows:
        counts = len(row.tokens), len(row.new_pages), len(row.prompt_targets), len(row.checkpoints)
        of_pass = row.row, row.start, row.first_new_page, int(row.draws), row.num_drafts, row.num_pooled, row.state
        numbers += *of_pass, *counts
    numbers += chain.from_iterable(chain(row.tokens, row.new_pages, *row.checkpoints) for row in batch.rows)
    return pack_numbers(numbers)


def unpack_batch(content: bytes) -> Batch:
    """Invert ``pack_batch``."""
    numbers = iter(unpack_numbers(content))
    num_starts, num_copies, num_rows = _take(numbers, 3)
    starts = tuple(_start(*_take(numbers, 5)) for _ in range(num_starts))
    copies = tuple(PageCopy(*_take(numbers, 3)) for _ in range(num_copies))
    fields = [_take(numbers, 11) for _ in range(num_rows)]
    return Batch(tuple(_row(numbers, *each) for each in fields), starts, copies)


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


def pack_adapter(slot: int, adapter: PreparedAdapter) -> bytes:
    """Return a slot and the factors of an adapter, which brings no weights of its own."""
    places = {name: (list(part.ranks), _places(adapter.block, part)) for name, part in adapter.factors.items()}
    head = json.dumps([slot, adapter.digest, places]).encode()
    return b"".join((_LENGTH.pack(len(head)), head, adapter.block.numpy().tobytes()))


def unpack_adapter(content: bytes, *, pinned: bool) -> tuple[int, PreparedAdapter]:
    """Invert ``pack_adapter``; for a GPU the adapter's memory is ``pinned``."""
    (length,) = _LENGTH.unpack_from(content)
    begin = _LENGTH.size + length
    slot, digest, places = json.loads(content[_LENGTH.size : begin])
    size = len(content) - begin
    block = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else lazy_zeros((size,), torch.uint8)
    if size:
        block.copy_(torch.frombuffer(bytearray(content[begin:]), dtype=torch.uint8))
    factors = {name: _factors(block, ranks, parts) for name, (ranks, parts) in places.items()}
    return slot, PreparedAdapter(factors, digest, (), 0, block.nbytes, block)


def _places(block: Tensor, part: Factors) -> list[_Place | None]:
    """Where the tensors of ``Factors`` are in the block, by offset, type and shape."""
    return [
        None
        if tensor is None
        else (tensor.data_ptr() - block.data_ptr(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for tensor in (part.a, part.scale, part.b, part.gain, part.add)
    ]


def _factors(block: Tensor, ranks: list[int], places: list[_Place | None]) -> Factors:
    found = [None if place is None else _tensor(block, *place) for place in places]
    a, scale, b, gain, add = found
    assert a is not None and scale is not None and b is not None
    return Factors(a, scale, tuple(ranks), b, gain, add)


def _tensor(block: Tensor, offset: int, dtype: str, shape: list[int]) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    return block[offset : offset + size].view(kind).view(shape)
