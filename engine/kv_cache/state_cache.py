"""State cache: slots of state checkpoints, each the recurrent state after the last token of a page in the tree.

The only writer of the free slots. Every slot has one owner::

    free ----> a lease's pending checkpoints ----> a page ----> free
       reserve                               keep,       forget,
                                             cancel      reserve (eviction)

A page in the tree is never written again and stands for one path of tokens, so its checkpoint cannot become stale; and
it leaves the tree only through ``PrefixCache``, which forgets the checkpoint with it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...radix.invariants import BrokenInvariant

# States that are kept to undo drafts take at most 1 / _DRAFTS_SHARE of the budget.
_DRAFTS_SHARE = 8


@dataclass(frozen=True, slots=True)
class StateSlots:
    """Numbers of states in a pool: a working state for each row, then checkpoints, states before drafts, and padding.

    Attributes:
        num_rows: number of rows; the working state of a row has the slot of the row's number.
        num_checkpoints: number of slots for checkpoints, which follow the working states.
        interval: tokens from one checkpoint of a long prefix to the next, a multiple of the page size.
        num_drafts: number of slots for the states before the drafts of a step, which follow the checkpoints.
    """

    num_rows: int
    num_checkpoints: int
    interval: int
    num_drafts: int = 0

    @property
    def total(self) -> int:
        return self.num_rows + self.num_checkpoints + self.num_drafts + 1


def share_budget(
    num_bytes: int,
    page_size: int,
    page_bytes: int,
    state_bytes: int,
    num_rows: int,
    *,
    sharing: bool,
    most_drafts: int = 0,
) -> tuple[int, StateSlots]:
    """Divide a budget between pages of KV and recurrent states: return the number of pages, and the slots.

    A long prefix has a checkpoint at the end of each run of pages whose KV takes at least as many bytes as a state, so
    checkpoints never take more than half of what working states leave.

    Args:
        sharing: whether prefixes are kept; if not, there are no checkpoints.
        most_drafts: largest number of drafts of a step. There is a state for each, as far as these states take at most
            an eighth of the rest.
    """
    run = -(-state_bytes // page_bytes)  # pages from one checkpoint to the next
    left = max(0, num_bytes - (num_rows + 1) * state_bytes)
    num_drafts = min(most_drafts, left // (_DRAFTS_SHARE * state_bytes))
    left -= num_drafts * state_bytes
    if not sharing:
        return left // page_bytes, StateSlots(num_rows, 0, run * page_size, num_drafts)
    num_runs = left // (run * page_bytes + state_bytes)
    num_pages = (left - num_runs * state_bytes) // page_bytes
    return num_pages, StateSlots(num_rows, num_runs, run * page_size, num_drafts)


class StateCache:
    """Records which pages have a checkpoint, and in which slot.

    Attributes:
        interval: number of tokens between checkpoints, as in ``StateSlots``.
        num_evicted: number of checkpoints evicted since the start.

    Args:
        slots: slots of the pool.
        on_free: called with the slot of each checkpoint that a page loses.
    """

    def __init__(self, slots: StateSlots, on_free: Callable[[int], None] = lambda slot: None) -> None:
        self._on_free = on_free
        self.interval = slots.interval
        self.num_evicted = 0
        first = slots.num_rows
        self._slots = range(first, first + slots.num_checkpoints)
        self._free = list(reversed(self._slots))
        self._drafts = range(self._slots.stop, self._slots.stop + slots.num_drafts)
        self._free_drafts = list(reversed(self._drafts))
        self._kept: dict[str, OrderedDict[int, int]] = {}  # by tenant: slot of each page, in the order of use
        self._tenants: dict[int, str] = {}  # The tenant of each page.
        self._holds: Counter[int] = Counter()  # leases that are still to read a page's checkpoint

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_free_drafts(self) -> int:
        """Slots for states before drafts that no lease has."""
        return len(self._free_drafts)

    def reserve_draft(self) -> int:
        """Take a slot for the state before a draft. Raises IndexError without a free one."""
        return self._free_drafts.pop()

    def cancel_drafts(self, slots: Iterable[int]) -> None:
        """Give back slots for states before drafts, which no step is still to read or write."""
        self._free_drafts += slots

    @property
    def num_kept(self) -> int:
        return len(self._tenants)

    def longest(self, pages: Sequence[int]) -> int:
        """Return how many leading pages there are up to the last one with a checkpoint."""
        return next((count for count in range(len(pages), 0, -1) if pages[count - 1] in self._tenants), 0)

    def hold(self, page: int) -> int:
        """Return the slot of a page's checkpoint, which is not evicted until ``drop``."""
        kept = self._kept[self._tenants[page]]
        kept.move_to_end(page)
        self._holds[page] += 1
        return kept[page]

    def slot(self, page: int) -> int:
        """Return the slot of a page's checkpoint, which holds until the next call."""
        return self._kept[self._tenants[page]][page]

    @property
    def kept_slots(self) -> set[int]:
        return {slot for pages in self._kept.values() for slot in pages.values()}

    def drop(self, page: int) -> None:
        """End a ``hold``."""
        self._holds[page] -= 1
        if not self._holds[page]:
            del self._holds[page]

    def reserve(self) -> int | None:
        """Take a slot for a new checkpoint, by eviction if need be; None if all are in use."""
        if not self._free:
            self._evict()
        return self._free.pop() if self._free else None

    def cancel(self, slots: Iterable[int]) -> None:
        """Give slots back that hold no checkpoint."""
        self._free += slots

    def keep(self, page: int, slot: int, tenant: str) -> bool:
        """Make a reserved slot the checkpoint of a page in the tree. If the page has one, free the slot: False."""
        if page in self._tenants:
            self._free.append(slot)
            return False
        self._tenants[page] = tenant
        self._kept.setdefault(tenant, OrderedDict())[page] = slot
        return True

    def forget(self, pages: Iterable[int]) -> None:
        """Free the checkpoints of pages that leave the tree, which no lease is still to read."""
        for page in pages:
            if page in self._tenants:
                self._free.append(self._take(page))

    def check(
        self, tree_pages: Iterable[int], pending: Sequence[int], held: Iterable[int], drafted: Iterable[int]
    ) -> None:
        """Check that every slot has one owner. Raises BrokenInvariant.

        Args:
            tree_pages: all pages of the tree.
            pending: reserved slots of all leases.
            held: pages that leases hold, one page for each lease.
            drafted: slots of states before drafts of all leases.
        """
        if sorted([*self._free_drafts, *drafted]) != list(self._drafts):
            raise BrokenInvariant(f"free {sorted(self._free_drafts)} + used {sorted(drafted)} are not {self._drafts}")
        kept = {page: slot for pages in self._kept.values() for page, slot in pages.items()}
        owned = [*self._free, *pending, *kept.values()]
        if sorted(owned) != list(self._slots):
            raise BrokenInvariant(
                f"free {sorted(self._free)} + pending {sorted(pending)} + kept {kept} are not slots {self._slots}"
            )
        if not kept.keys() <= set(tree_pages):
            raise BrokenInvariant(f"checkpoints of pages outside the tree: {kept.keys() - set(tree_pages)}")
        if self._tenants.keys() != kept.keys() or self._holds != Counter(held) or not self._holds.keys() <= kept.keys():
            raise BrokenInvariant(f"pages {kept} with tenants {self._tenants} are held {self._holds}, by {list(held)}")

    def _evict(self) -> None:
        """Free the least recently used checkpoint of the tenant that has the most, held ones excepted."""
        for tenant in sorted(self._kept, key=lambda each: -len(self._kept[each])):
            page = next((page for page in self._kept[tenant] if page not in self._holds), None)
            if page is not None:
                self._free.append(self._take(page))
                self.num_evicted += 1
                return

    def _take(self, page: int) -> int:
        tenant = self._tenants.pop(page)
        pages = self._kept[tenant]
        slot = pages.pop(page)
        if not pages:
            del self._kept[tenant]
        self._on_free(slot)
        return slot
