"""Session pins: soft pins on the prefix of each live session's last call, and on prompts pinned by request.

They take no memory from a running sequence. Pinned pages count as available and are evicted last: of a tenant first
ordinary pages, then those of sessions; prompts pinned by request go after the pages of all tenants
(``radix.tenant_eviction``). So a sequence that fits the pool alone is always admitted.

Both are bounded, so that one tenant cannot push out all that others have in the cache::

    sessions    4,096, with half of the pool; beyond it the tenant with the most of them loses its oldest. A call that
                takes more alone is not pinned
    prompts     256 a tenant, with a quarter of the pool, and half of it for all; a longer one is cut to what is left.
                Several beginnings of one prompt may be pinned, each for a time of its own
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ...radix.soft_pins import PinKind, SoftPin
from ..kv_cache.prefix_cache import PrefixCache
from ..sequence.sequence import Sequence

SESSION_SECONDS = 300.0
MAX_SESSIONS = 4096
SESSIONS_SHARE = 0.5
MAX_PINS = 256
TENANT_SHARE = 0.25
PINS_SHARE = 0.5


@dataclass(slots=True, eq=False)
class _TimedPin:
    """A soft pin, and when it ends."""

    pin: SoftPin
    until: float


class SessionPins:
    """Soft pins of sessions and prompts. Written by ``Scheduler``.

    Args:
        cache: in which they are pinned.
        clock: seconds, monotonic.
    """

    def __init__(self, cache: PrefixCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock
        self._sessions: OrderedDict[tuple[str, str], _TimedPin] = OrderedDict()  # by tenant and name, in order of use
        self._num_sessions: Counter[str] = Counter()
        self._prompts: dict[str, list[_TimedPin]] = {}  # by tenant
        self._next_end = float("inf")  # of a pinned prompt

    def add(self, sequence: Sequence) -> int:
        """Pin what a finished sequence asks for; its pages have just been released. Returns prompt tokens pinned."""
        if sequence.spec.session:
            self._pin_session(sequence)
        ends: dict[int, float] = {}  # by whole pages, as those that end on the same page are one
        for num_tokens, seconds in sequence.spec.pins:
            num_pages = num_tokens // self._cache.page_size
            ends[num_pages] = max(seconds, ends.get(num_pages, 0.0))
        pinned = [self._pin_prompt(sequence, pages, seconds) for pages, seconds in ends.items() if pages and seconds]
        return max(pinned, default=0) * self._cache.page_size

    def expire(self) -> None:
        """End the pins whose time is up. O(1) if there are none."""
        now = self._clock()
        while self._sessions and next(iter(self._sessions.values())).until <= now:
            self._end_session(next(iter(self._sessions)))
        if self._next_end <= now:
            for tenant in tuple(self._prompts):
                self._end_prompts(tenant, [each for each in self._prompts[tenant] if each.until <= now])

    def stats(self) -> dict[str, float]:
        """Return gauges for metrics, as of now."""
        self.expire()
        return {
            "sessions": len(self._sessions),
            "pages_of_sessions": self._cache.num_pinned(PinKind.SESSION),
            "pins": sum(map(len, self._prompts.values())),
            "pages_pinned": self._cache.num_pinned(PinKind.PIN),
        }

    def _pin_session(self, sequence: Sequence) -> None:
        """Pin all that a sequence has computed, in place of the last call of its session."""
        name = sequence.spec.tenant, sequence.spec.session
        if name in self._sessions:
            self._end_session(name)
        most = SESSIONS_SHARE * self._cache.num_pages
        if sequence.num_tokens > most * self._cache.page_size:
            return
        pin = self._cache.pin(sequence.path, sequence.tokens, sequence.num_tokens, PinKind.SESSION)
        if pin is None:
            return
        self._sessions[name] = _TimedPin(pin, self._clock() + SESSION_SECONDS)
        self._num_sessions[sequence.spec.tenant] += 1
        while len(self._sessions) > 1 and (
            len(self._sessions) > MAX_SESSIONS or self._cache.num_pinned(PinKind.SESSION) > most
        ):
            tenant = max(self._num_sessions, key=self._num_sessions.__getitem__)
            self._end_session(next(name for name in self._sessions if name[0] == tenant))

    def _end_session(self, name: tuple[str, str]) -> None:
        self._cache.unpin(self._sessions.pop(name).pin)
        self._num_sessions[name[0]] -= 1
        if not self._num_sessions[name[0]]:
            del self._num_sessions[name[0]]

    def _pin_prompt(self, sequence: Sequence, num_pages: int, seconds: float) -> int:
        """Pin the first pages of a prompt within its tenant's share. Returns how many are pinned.

        It replaces the tenant's pins on the same path that end sooner.
        """
        tenant, cache = sequence.spec.tenant, self._cache
        pin = cache.pin(sequence.path, sequence.tokens, num_pages * cache.page_size, PinKind.PIN)
        if pin is None:
            return 0
        until = self._clock() + seconds
        path = cache.pinned_nodes([pin])
        own = self._prompts.setdefault(tenant, [])
        replaced = [
            each for each in own if each.pin.node is pin.node or (each.pin.node in path and each.until <= until)
        ]
        self._end_prompts(tenant, replaced)
        own = self._prompts.setdefault(tenant, [])
        num_pages = sum(path.values())
        excess = self._excess([each.pin for each in own], pin) if len(own) < MAX_PINS else num_pages
        if excess:
            cache.unpin(pin)
            num_pages = max(0, num_pages - excess)
            pin = cache.pin(sequence.path, sequence.tokens, num_pages * cache.page_size, PinKind.PIN)
        if pin is not None:
            own.append(_TimedPin(pin, until))
            self._next_end = min(self._next_end, until)
        elif not own:
            del self._prompts[tenant]
        return num_pages

    def _excess(self, own: list[SoftPin], new: SoftPin) -> int:
        """Pages of a new pin, the last ones of its path, beyond its tenant's share or that of all tenants."""
        total = self._cache.num_pages
        of_tenant = sum(self._cache.pinned_nodes([*own, new]).values()) - int(TENANT_SHARE * total)
        of_all = self._cache.num_pinned(PinKind.PIN) - int(PINS_SHARE * total)
        return max(0, of_tenant, of_all)

    def _end_prompts(self, tenant: str, ended: list[_TimedPin]) -> None:
        for each in ended:
            self._cache.unpin(each.pin)
            self._prompts[tenant].remove(each)
        if not self._prompts[tenant]:
            del self._prompts[tenant]
        self._next_end = min((each.until for own in self._prompts.values() for each in own), default=float("inf"))
