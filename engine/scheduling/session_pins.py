"""What stays in the prefix cache for calls to come: the path of each living session's last call, and pins.

Neither takes memory from a running sequence. Held pages count as available and are evicted where nothing else is
left: of a tenant first ordinary pages, then those of sessions, and pinned ones after those of all tenants
(``radix.tenant_eviction``). So whatever is held, a sequence that fits the pool alone is admitted.

Both are bounded, so that one tenant's do not push out all that others have in the cache::

    sessions    4,096, with half of the pool; beyond it the tenant with the most of them loses its oldest. A call that
                takes more alone is not held
    pins        256 a tenant, with a quarter of the pool, and half of it for all; a longer one is cut to what is left
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
class _Kept:
    """A hold, and when it ends."""

    hold: SoftPin
    until: float


class SessionPins:
    """Holds of sessions and pins. Written by ``Scheduler``.

    Args:
        cache: where they are held.
        clock: seconds, monotonic.
    """

    def __init__(self, cache: PrefixCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock
        self._sessions: OrderedDict[tuple[str, str], _Kept] = OrderedDict()  # by tenant and name, in order of use
        self._num_sessions: Counter[str] = Counter()
        self._pins: dict[str, list[_Kept]] = {}
        self._next_end = float("inf")  # of a pin

    def note(self, sequence: Sequence) -> int:
        """Take the end of a sequence whose pages have just been released. Returns tokens of its prompt pinned."""
        if sequence.session:
            self._note_session(sequence)
        return self._pin(sequence) * self._cache.page_size if sequence.pin_seconds else 0

    def expire(self) -> None:
        """End what has been held for its time. O(1) when there is nothing to end."""
        now = self._clock()
        while self._sessions and next(iter(self._sessions.values())).until <= now:
            self._end_session(next(iter(self._sessions)))
        if self._next_end <= now:
            for tenant in tuple(self._pins):
                self._end_pins(tenant, [pin for pin in self._pins[tenant] if pin.until <= now])

    def stats(self) -> dict[str, float]:
        """Gauges for the metrics, as of now."""
        self.expire()
        return {
            "sessions": len(self._sessions),
            "pages_of_sessions": self._cache.num_held(PinKind.SESSION),
            "pins": sum(map(len, self._pins.values())),
            "pages_pinned": self._cache.num_held(PinKind.PIN),
        }

    def _note_session(self, sequence: Sequence) -> None:
        """Hold all that a sequence has computed instead of what its session had before."""
        name = sequence.tenant, sequence.session
        if name in self._sessions:
            self._end_session(name)
        most = SESSIONS_SHARE * self._cache.num_pages
        if sequence.num_tokens > most * self._cache.page_size:
            return
        hold = self._cache.keep(sequence.path, sequence.tokens, sequence.num_tokens, PinKind.SESSION)
        if hold is None:
            return
        self._sessions[name] = _Kept(hold, self._clock() + SESSION_SECONDS)
        self._num_sessions[sequence.tenant] += 1
        while len(self._sessions) > 1 and (
            len(self._sessions) > MAX_SESSIONS or self._cache.num_held(PinKind.SESSION) > most
        ):
            tenant = max(self._num_sessions, key=self._num_sessions.__getitem__)
            self._end_session(next(name for name in self._sessions if name[0] == tenant))

    def _end_session(self, name: tuple[str, str]) -> None:
        self._cache.unpin(self._sessions.pop(name).hold)
        self._num_sessions[name[0]] -= 1
        if not self._num_sessions[name[0]]:
            del self._num_sessions[name[0]]

    def _pin(self, sequence: Sequence) -> int:
        """Pin a prompt, as far as its tenant's share goes. Returns whole pages pinned.

        It takes the place of the tenant's pins on the same path that end sooner.
        """
        tenant, cache = sequence.tenant, self._cache
        hold = cache.keep(sequence.path, sequence.tokens, sequence.num_prompt, PinKind.PIN)
        if hold is None:
            return 0
        until = self._clock() + sequence.pin_seconds
        path = cache.held([hold])
        own = self._pins.setdefault(tenant, [])
        replaced = [pin for pin in own if pin.hold.node is hold.node or (pin.hold.node in path and pin.until <= until)]
        self._end_pins(tenant, replaced)
        own = self._pins.setdefault(tenant, [])
        num_pages = sum(path.values())
        excess = self._excess([pin.hold for pin in own], hold) if len(own) < MAX_PINS else num_pages
        if excess:
            cache.unpin(hold)
            num_pages = max(0, num_pages - excess)
            hold = cache.keep(sequence.path, sequence.tokens, num_pages * cache.page_size, PinKind.PIN)
        if hold is not None:
            own.append(_Kept(hold, until))
            self._next_end = min(self._next_end, until)
        elif not own:
            del self._pins[tenant]
        return num_pages

    def _excess(self, own: list[SoftPin], new: SoftPin) -> int:
        """Pages by which a pin goes beyond its tenant's share or that of all; they are the last of its path."""
        total = self._cache.num_pages
        of_tenant = sum(self._cache.held([*own, new]).values()) - int(TENANT_SHARE * total)
        of_all = self._cache.num_held(PinKind.PIN) - int(PINS_SHARE * total)
        return max(0, of_tenant, of_all)

    def _end_pins(self, tenant: str, ended: list[_Kept]) -> None:
        for pin in ended:
            self._cache.unpin(pin.hold)
            self._pins[tenant].remove(pin)
        if not self._pins[tenant]:
            del self._pins[tenant]
        self._next_end = min((pin.until for pins in self._pins.values() for pin in pins), default=float("inf"))
