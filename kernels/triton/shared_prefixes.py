"""Search for shared prefixes in a decode step: rows whose page tables begin with the same pages.

The search runs on the host, once in each step for all layers, on the host's page table, so nothing is read back from
the device. The rows' prefixes form a tree, as in the radix tree. If enough rows share enough tokens of a node, the node
becomes an item, whose keys are read once for all these rows. All other keys are read by each row separately.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..layouts.attention_arguments import SharedPrefixes
from ..layouts.staging import refill

Ints = NDArray[np.signedinteger[Any]]

# Measured on an H200: below these limits the additional programs and the merge take more time than the reads would. A
# short prefix stays in the device's cache, so the other rows of the launch read it fast.
LEAST_SHARERS = 8
LEAST_TOKENS = 1024
LEAST_READS = 32768  # sharers times tokens

ITEM_KEYS = 512  # keys of an item: enough programs for the device, few enough partial results

# Capacity of a captured pass. Longer prefixes have items of more keys, so that every step fits.
MOST_ITEMS = 64
MOST_RESULTS = 32  # partial results of a row


class StaticSharedPrefixes:
    """Static buffers for the shared prefixes of passes captured in CUDA graphs.

    Args:
        num_rows: R, the largest number of rows of a pass.
        device: device on which the kernels run.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._num_rows = num_rows
        self._sizes = (4 * MOST_ITEMS, 2 * MOST_RESULTS * num_rows, num_rows, num_rows)
        self._flat = torch.zeros(sum(self._sizes), dtype=torch.int32, device=device)

    def prefixes(self, num_rows: int) -> SharedPrefixes:
        """Return the buffers for a captured pass of so many rows, with launch sizes for the full capacity."""
        items, members, end, count = self._flat.split(self._sizes)
        return SharedPrefixes(
            items.view(-1, 4), members.view(-1, 2), end[:num_rows], count[:num_rows], num_rows, MOST_RESULTS
        )

    def holds(self, shared: SharedPrefixes) -> bool:
        return len(shared.items) <= MOST_ITEMS and shared.most_results <= MOST_RESULTS

    def fill(self, shared: SharedPrefixes) -> None:
        """Copy prefixes from the host into the buffers for the next replay, without waiting."""
        flat = np.zeros(len(self._flat), np.int32)
        begin = 0
        for part, size in zip((shared.items, shared.members, shared.end, shared.count), self._sizes, strict=True):
            values = part.numpy().ravel()
            flat[begin : begin + len(values)] = values
            begin += size
        refill(self._flat, flat)


def pays(sharers: int, tokens: int) -> bool:
    return sharers >= LEAST_SHARERS and tokens >= LEAST_TOKENS and sharers * tokens >= LEAST_READS


def find_shared_prefixes(page_table: Ints, query_len: Ints, context_len: Ints, page_size: int) -> SharedPrefixes | None:
    """Find the prefixes that rows should read together. Returns tensors on the host, or None if there are none.

    Args:
        page_table: [R, P], the pages of each row in order.
        query_len: [R], new tokens of each row; only rows with one token share.
        context_len: [R], tokens of each row with KV, new ones included.
        page_size: tokens of a page.
    """
    rows = np.flatnonzero(query_len == 1)
    if len(rows) < LEAST_SHARERS:
        return None
    # A row does not share the page of its last token, so that each row has keys of its own.
    shareable = (context_len[rows] - 1) // page_size
    lines = page_table[rows]
    order = np.array(sorted(range(len(rows)), key=lambda i: lines[i].tobytes()))
    common, item_keys = _common_pages(lines[order], shareable[order]), ITEM_KEYS
    while True:
        search = _Search(rows[order], page_size, common, len(page_table), item_keys)
        search.visit(0, len(rows), 0)
        if search.fits or item_keys > lines.shape[1] * page_size:
            break
        item_keys *= 2
    # Where even whole prefixes are too many, each row reads its own keys.
    return search.result() if search.items and search.fits else None


def _common_pages(lines: Ints, shareable: Ints) -> Ints:
    """Count the leading pages that each row has in common with the next: [R, P], [R] -> [R - 1]."""
    differ = np.column_stack([lines[1:] != lines[:-1], np.ones(len(lines) - 1, bool)])
    common: Ints = np.minimum(differ.argmax(axis=1), np.minimum(shareable[1:], shareable[:-1]))
    return common


@dataclass(slots=True)
class _Search:
    """Depth-first walk of the prefix tree, collecting items.

    Attributes:
        rows: indices of the rows, sorted by their pages; they are the leaves of the tree in order.
        page_size: number of tokens in a page.
        common: for each of these rows but the last, the number of leading pages that it shares with the next one.
        num_rows: number of rows of the whole batch, R.
        item_keys: largest number of keys of an item.
    """

    rows: Ints
    page_size: int
    common: Ints
    num_rows: int
    item_keys: int
    items: list[tuple[int, int, int, int]] = field(default_factory=list)
    members: list[Ints] = field(default_factory=list)
    end: Ints = field(init=False)
    count: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.end = np.zeros(self.num_rows, np.int32)
        self.count = np.zeros(self.num_rows, np.int32)

    def visit(self, low: int, high: int, begin: int) -> None:
        """Add an item for the pages that leaves [low, high) share from ``begin`` on if that saves time; visit children.

        Without an item for this node, the items of its children begin at ``begin`` too.
        """
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
        for first in range(begin, end, self.item_keys):
            self.items.append((first, min(first + self.item_keys, end), sum(map(len, self.members)), len(rows)))
            self.members.append(np.column_stack([rows, self.count[rows]]))
            self.count[rows] += 1
        self.end[rows] = end

    @property
    def fits(self) -> bool:
        """Whether a captured pass has room for the items and for the partial results of each row."""
        return len(self.items) <= MOST_ITEMS and int(self.count.max()) <= MOST_RESULTS

    def result(self) -> SharedPrefixes:
        """Return the collected items as tensors."""
        items, members = np.array(self.items, np.int32), np.concatenate(self.members).astype(np.int32)
        return SharedPrefixes(
            items=torch.from_numpy(items),
            members=torch.from_numpy(members),
            end=torch.from_numpy(self.end),
            count=torch.from_numpy(self.count),
            most_members=int(items[:, 3].max()),
            most_results=int(self.count.max()),
        )
