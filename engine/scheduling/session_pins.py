"""Session pins: soft pins on the prefix of each live session's last call, and on prompts pinned by request.

Pins take no memory from running sequences, because pinned pages count as available; they are only evicted last. A
tenant's ordinary pages are evicted before the pages of its sessions. Prompts pinned by request are evicted after the
pages of all tenants (``radix.tenant_eviction``). So a sequence that fits the pool when it runs alone is always
admitted.

Both kinds of pins are limited, so that one tenant cannot evict everything that others have in the cache::

    sessions    at most 4,096 in all, which hold at most half of the pool. Beyond a limit, the tenant with the most
                sessions loses its oldest one. A call that needs more than half of the pool is not pinned. A tenant may
                keep at most 256 sessions, with a quarter of the pool, for longer than ``SESSION_SECONDS``; further ones
                are kept for ``SESSION_SECONDS``.
    prompts     at most 256 for each tenant, which hold at most a quarter of the pool; prompts of all tenants hold at
                most half of it. A longer prompt is pinned up to the limit. Several prefixes of one prompt may be
                pinned, each for its own time.
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ...radix.namespace import Path
from ...radix.soft_pins import PinKind, SoftPin
from ..kv_cache.prefix_cache import PrefixCache
from ..sequence.sequence import Sequence
from ..types import SESSION_SECONDS

MAX_SESSIONS = 4096
SESSIONS_SHARE = 0.5
MAX_PINS = 256
TENANT_SHARE = 0.25
PINS_SHARE = 0.5


@dataclass(slots=True, eq=False)
class _TimedPin:
    """A soft pin, and the monotonic time in seconds at which it ends."""

    pin: SoftPin
    until: float


@dataclass(slots=True, eq=False)
class _HeldSession(_TimedPin):
    """The pin of a session between two calls, and the namespaces of the session's last call."""

    path: Path


class SessionPins:
    """Manages the soft pins of sessions and prompts. Only ``Scheduler`` changes it.

    Args:
        cache: prefix cache in which sessions and prompts are pinned.
        clock: returns monotonic time in seconds.
    """

    def __init__(self, cache: PrefixCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock
        self._sessions: OrderedDict[tuple[str, str], _HeldSession] = (
            OrderedDict()
        )  # By tenant and session name; the most recently used session is the last one.
        self._num_sessions: Counter[str] = Counter()
        # Pins of the sessions that are kept for longer than ``SESSION_SECONDS``, by tenant and session name.
        self._retained: dict[str, dict[str, SoftPin]] = {}
        self._prompts: dict[str, list[_TimedPin]] = {}  # Pins of prompts by tenant.
        # Time at which the next pin of a prompt ends.
        self._next_end = float("inf")
        self._next_session_end = float("inf")

    def add(self, sequence: Sequence) -> int:
        """Pin the pages that a finished sequence's request wants pinned; they were just released.

        Returns the pinned prompt tokens.
        """
        if sequence.spec.session and sequence.spec.session_seconds:
            name = sequence.spec.tenant, sequence.spec.session
            self.hold(*name, sequence.path, sequence.tokens, sequence.spec.session_seconds)
        elif sequence.spec.session:
            self.release(sequence.spec.tenant, sequence.spec.session)
            self._cache.demote(sequence.path, sequence.tokens)
        # Ends of the pins, by number of full pages. Pins that end on the same page count as one.
        ends: dict[int, float] = {}
        for num_tokens, seconds in sequence.spec.pins:
            num_pages = num_tokens // self._cache.page_size
            ends[num_pages] = max(seconds, ends.get(num_pages, 0.0))
        pinned = [self._pin_prompt(sequence, pages, seconds) for pages, seconds in ends.items() if pages and seconds]
        return max(pinned, default=0) * self._cache.page_size

    def expire(self) -> None:
        """End the pins whose time is up. Takes O(1) time if there are none."""
        now = self._clock()
        if self._next_session_end <= now:
            for name in [name for name, each in self._sessions.items() if each.until <= now]:
                self._end_session(name)
            self._next_session_end = min((each.until for each in self._sessions.values()), default=float("inf"))
        if self._next_end <= now:
            for tenant in tuple(self._prompts):
                self._end_prompts(tenant, [each for each in self._prompts[tenant] if each.until <= now])

    def release(self, tenant: str, session: str) -> bool:
        """End a session. The KV that only this session has used is evicted first among its tenant's pages.

        Returns False if the session is not held.
        """
        held = self._sessions.get((tenant, session))
        if held is None:
            return False
        node = held.pin.node
        self._end_session((tenant, session))
        if node is not None:
            self._cache.demote_node(node)
        return True

    def find(self, tenant: str, session: str) -> tuple[Path, array[int]] | None:
        """Return the namespaces and tokens of the pages that a session holds; None if it holds none."""
        held = self._sessions.get((tenant, session))
        if held is None or held.pin.node is None:
            return None
        return held.path, self._cache.tokens_to(held.pin.node)

    @property
    def names(self) -> list[tuple[str, str]]:
        """Tenant and name of each held session, the least recently used session first."""
        return list(self._sessions)

    def stats(self) -> dict[str, float]:
        """Return the current gauges for metrics."""
        self.expire()
        return {
            "sessions": len(self._sessions),
            "pages_of_sessions": self._cache.num_pinned(PinKind.SESSION),
            "pins": sum(map(len, self._prompts.values())),
            "pages_pinned": self._cache.num_pinned(PinKind.PIN),
        }

    def hold(self, tenant: str, session: str, path: Path, tokens: array[int], seconds: float = SESSION_SECONDS) -> None:
        """Pin the cached pages of a session's last call. The pin replaces the pin of the previous call.

        Args:
            seconds: requested duration of the pin. It is shortened to ``SESSION_SECONDS`` if the tenant's share of
                longer pins is used up.
        """
        name = tenant, session
        if name in self._sessions:
            self._end_session(name)
        most = SESSIONS_SHARE * self._cache.num_pages
        if len(tokens) > most * self._cache.page_size:
            return
        pin = self._cache.pin(path, tokens, len(tokens), PinKind.SESSION)
        if pin is None:
            return
        if seconds > SESSION_SECONDS and not self._retain(*name, pin):
            seconds = SESSION_SECONDS
        self._sessions[name] = held = _HeldSession(pin, self._clock() + seconds, path)
        self._next_session_end = min(self._next_session_end, held.until)
        self._num_sessions[tenant] += 1
        while len(self._sessions) > 1 and (
            len(self._sessions) > MAX_SESSIONS or self._cache.num_pinned(PinKind.SESSION) > most
        ):
            largest = max(self._num_sessions, key=self._num_sessions.__getitem__)
            self._end_session(next(name for name in self._sessions if name[0] == largest))

    def _retain(self, tenant: str, session: str, pin: SoftPin) -> bool:
        """Record a session that is kept for longer than ``SESSION_SECONDS``.

        Returns False if the tenant's share is used up.
        """
        own = self._retained.setdefault(tenant, {})
        num_pages = sum(self._cache.pinned_nodes([*own.values(), pin]).values())
        fits = len(own) < MAX_PINS and num_pages <= TENANT_SHARE * self._cache.num_pages
        if fits:
            own[session] = pin
        elif not own:
            del self._retained[tenant]
        return fits

    def _end_session(self, name: tuple[str, str]) -> None:
        self._cache.unpin(self._sessions.pop(name).pin)
        if own := self._retained.get(name[0]):
            own.pop(name[1], None)
            if not own:
                del self._retained[name[0]]
        self._num_sessions[name[0]] -= 1
        if not self._num_sessions[name[0]]:
            del self._num_sessions[name[0]]

    def _pin_prompt(self, sequence: Sequence, num_pages: int, seconds: float) -> int:
        """Pin the first pages of a prompt, within its tenant's share. Returns the number of pinned pages.

        The pin replaces those pins of the tenant on the same path that end sooner.
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
        """Return the number of pages by which a new pin exceeds its tenant's share, or the share of all tenants.

        These are the last pages of the pin's path.
        """
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
