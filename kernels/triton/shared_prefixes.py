"""Which rows of a decode step read the same keys: those whose lines of the page table begin alike.

Found on the host, once for a step and all its layers, from the page table that the host keeps: nothing is read back
from the device. Rows form a tree, as their prefixes do in the radix tree; a node of it is worth an item of its own
where enough rows share enough tokens, and is read by each row alone where not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..layouts.staging import refill, to_device

Ints = NDArray[np.signedinteger[Any]]

# To be measured. Below these the second kernel and the merge cost more than the reads that they save: the rows of one
# launch run close enough in time to find a short prefix in the cache of the device.
LEAST_SHARERS = 8
LEAST_TOKENS = 1024

ITEM_KEYS = 512  # of a shared prefix, for one program: enough programs for the device, few enough partial results

# In a captured pass. Beyond these, prefixes are so long that what launches cost is little beside them.
MOST_ITEMS = 64
MOST_RESULTS = 32  # of a row


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Keys that rows of a batch read together.

    Attributes:
        items: [I, 4] int32: keys begin, end; index of the first member, number of members. An item without members is
            skipped, so a captured batch may have more items than it needs.
        members: [M, 2] int32: row; which of the row's partial results this is. Members of an item lie side by side.
        end: [R] int32, where the keys begin that a row reads alone.
        count: [R] int32, partial results that a row gets from items.
        most_members: of an item.
        most_results: the largest of ``count``.
    """

    items: Tensor
    members: Tensor
    end: Tensor
    count: Tensor
    most_members: int
    most_results: int

    def to(self, device: torch.device) -> SharedPrefixes:
        """The same on a device, by one copy."""
        parts = [part.numpy() for part in (self.items, self.members, self.end, self.count)]
        flat = to_device(np.concatenate([part.ravel() for part in parts]), device)
        items, members, end, count = flat.split([part.size for part in parts])
        return replace(self, items=items.view(-1, 4), members=members.view(-1, 2), end=end, count=count)


class StaticSharedPrefixes:
    """Shared prefixes that stay where they are, for passes that are captured and replayed.

    Args:
        num_rows: R, the most rows of a pass.
        device: where the kernels run.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._sizes = (4 * MOST_ITEMS, 2 * MOST_RESULTS * num_rows, num_rows, num_rows)
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)

    def prefixes(self, num_rows: int) -> SharedPrefixes:
        """What a captured pass of so many rows reads: its launches are made for all that there may be."""
        items, members, end, count = self._flat.split(self._sizes)
        return SharedPrefixes(
            items.view(-1, 4), members.view(-1, 2), end[:num_rows], count[:num_rows], num_rows, MOST_RESULTS
        )

    def holds(self, shared: SharedPrefixes) -> bool:
        """Whether there is room for these."""
        return len(shared.items) <= MOST_ITEMS and shared.most_results <= MOST_RESULTS

    def fill(self, shared: SharedPrefixes) -> None:
        """Make the next replay one of these, which are on the host; waits for nothing."""
        flat = np.zeros(len(self._flat), np.int32)
        begin = 0
        for part, size in zip((shared.items, shared.members, shared.end, shared.count), self._sizes, strict=True):
            values = part.numpy().ravel()
            flat[begin : begin + len(values)] = values
            begin += size
        refill(self._flat, flat)


def pays(sharers: int, tokens: int) -> bool:
    """Whether so many rows should read so many tokens together."""
    return sharers >= LEAST_SHARERS and tokens >= LEAST_TOKENS


def find_shared_prefixes(page_table: Ints, query_len: Ints, context_len: Ints, page_size: int) -> SharedPrefixes | None:
    """The prefixes that are worth being read together, on the host, or None.

    Args:
        page_table: [R, P], the pages of each row in order.
        query_len: [R], new tokens of each row; only rows of one take part.
        context_len: [R], tokens of each row with KV, new ones included.
        page_size: tokens of a page.
    """
    rows = np.flatnonzero(query_len == 1)
    if len(rows) < LEAST_SHARERS:
        return None
    # Pages that a row may share: not the one of its last token, so that something is left to each row.
    shareable = (context_len[rows] - 1) // page_size
    lines = page_table[rows]
    order = np.array(sorted(range(len(rows)), key=lambda i: lines[i].tobytes()))
    search = _Search(rows[order], page_size, _common_pages(lines[order], shareable[order]), len(page_table))
    search.visit(0, len(rows), 0)
    return search.result() if search.items else None


def _common_pages(lines: Ints, shareable: Ints) -> Ints:
    """How many leading pages each line has in common with the next: [R, P], [R] -> [R - 1]."""
    differ = np.column_stack([lines[1:] != lines[:-1], np.ones(len(lines) - 1, bool)])
    common: Ints = np.minimum(differ.argmax(axis=1), np.minimum(shareable[1:], shareable[:-1]))
    return common


@dataclass(slots=True)
class _Search:
    """A walk from the root of the tree of rows, which lie in the order of its leaves."""

    rows: Ints
    page_size: int
    common: Ints
    num_rows: int
    items: list[tuple[int, int, int, int]] = field(default_factory=list)
    members: list[Ints] = field(default_factory=list)
    end: Ints = field(init=False)
    count: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.end = np.zeros(self.num_rows, np.int32)
        self.count = np.zeros(self.num_rows, np.int32)

    def visit(self, low: int, high: int, begin: int) -> None:
        """The rows [low, high), of which all keys before page ``begin`` are taken care of."""
        common = self.common[low : high - 1]
        level = int(common.min())
        if pays(high - low, (level - begin) * self.page_size):
            self._add(self.rows[low:high], begin * self.page_size, level * self.page_size)
            begin = level
        cuts = [low, *(low + 1 + np.flatnonzero(common == level)), high]
        for first, last in itertools.pairwise(cuts):
            if last - first >= LEAST_SHARERS:
                self.visit(first, last, begin)

    def _add(self, rows: Ints, begin: int, end: int) -> None:
        for first in range(begin, end, ITEM_KEYS):
            self.items.append((first, min(first + ITEM_KEYS, end), sum(map(len, self.members)), len(rows)))
            self.members.append(np.column_stack([rows, self.count[rows]]))
            self.count[rows] += 1
        self.end[rows] = end

    def result(self) -> SharedPrefixes:
        """What was found."""
        items, members = np.array(self.items, np.int32), np.concatenate(self.members).astype(np.int32)
        return SharedPrefixes(
            items=torch.from_numpy(items),
            members=torch.from_numpy(members),
            end=torch.from_numpy(self.end),
            count=torch.from_numpy(self.count),
            most_members=int(items[:, 3].max()),
            most_results=int(self.count.max()),
        )
