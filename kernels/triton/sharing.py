"""Which rows of a decode step read the same keys: those whose lines of the page table begin alike.

Found on the host, once for a step and all its layers, from the page table that the host keeps: nothing is read back
from the device. Rows form a tree, as their prefixes do in the radix tree; a node of it is worth an item of its own
where enough rows share enough tokens, and is read by each row alone where not.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.signedinteger[Any]]

# To be measured. Below these the second kernel and the merge cost more than the reads that they save: the rows of one
# launch run close enough in time to find a short prefix in the cache of the device.
LEAST_SHARERS = 8
LEAST_TOKENS = 1024

ITEM_KEYS = 512  # of a shared prefix, for one program: enough programs for the device, few enough partial results


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


def pays(sharers: int, tokens: int) -> bool:
    """Whether so many rows should read so many tokens together."""
    return sharers >= LEAST_SHARERS and tokens >= LEAST_TOKENS


def find_shared_prefixes(
    page_table: Ints, query_len: Ints, context_len: Ints, page_size: int, device: torch.device
) -> SharedPrefixes | None:
    """The prefixes that are worth being read together, or None.

    Args:
        page_table: [R, P], the pages of each row in order.
        query_len: [R], new tokens of each row; only rows of one take part.
        context_len: [R], tokens of each row with KV, new ones included.
        page_size: tokens of a page.
        device: where the kernels run.
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
    return search.result(device) if search.items else None


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

    def result(self, device: torch.device) -> SharedPrefixes:
        """What was found, on the device, by one copy."""
        items, members = np.array(self.items), np.concatenate(self.members)
        parts = [items.ravel(), members.ravel(), self.end, self.count]
        flat = torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(device, non_blocking=True)
        on_items, on_members, end, count = flat.split([part.size for part in parts])
        return SharedPrefixes(
            items=on_items.view(-1, 4),
            members=on_members.view(-1, 2),
            end=end,
            count=count,
            most_members=int(items[:, 3].max()),
            most_results=int(self.count.max()),
        )
