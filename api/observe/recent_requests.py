"""Recent requests: the last requests of a server process and sums by caller, without any texts, for the live page."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

MOST_REQUESTS: Final = 50
"""Number of requests that are kept; as many failed requests are kept in addition."""
MOST_CALLERS: Final = 100
"""Number of callers that are kept, those with the latest requests."""
_SHOWN = (
    *("request_id", "method", "path", "status", "seconds", "key", "tenant", "model", "adapter", "prompt_tokens"),
    *("cached_tokens", "completion_tokens", "first_token_seconds", "finished", "error"),
)
_LONGEST_PATH = 80


@dataclass(slots=True)
class CallerUsage:
    """Sums of one caller since the process began.

    Attributes:
        key: name of the caller's key; "" without keys.
        tenant: name of the key's tenant.
        requests: number of requests that have ended; ``failed`` of them had an error status or an error in their
            stream.
        prompt_tokens, cached_tokens, completion_tokens: token counts of the caller's generations.
        last: time at which the caller's last request ended, in seconds since 1970.
    """

    key: str
    tenant: str
    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    last: float = 0.0


class RecentRequests:
    """Keeps the last requests, the last failed requests, and sums for each caller.

    Failed requests are kept separately, so that later successful ones do not displace them.

    Args:
        clock: returns seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._requests: deque[dict[str, Any]] = deque(maxlen=MOST_REQUESTS)
        self._failures: deque[dict[str, Any]] = deque(maxlen=MOST_REQUESTS)
        self._callers: OrderedDict[tuple[str, str], CallerUsage] = OrderedDict()
        self._count = self._failed = 0

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add a request that has ended, given as its entry in the access log."""
        shown = {name: entry[name] for name in _SHOWN if entry.get(name) is not None}
        shown |= {"at": self._clock(), "path": str(entry["path"])[:_LONGEST_PATH]}
        is_failure = entry["status"] >= 400 or entry["status"] == 0 or entry.get("error") is not None
        self._requests.append(shown)
        self._count += 1
        if is_failure:
            self._failures.append(shown)
            self._failed += 1
        self._add_to_caller(shown, is_failure)

    def _add_to_caller(self, shown: Mapping[str, Any], is_failure: bool) -> None:
        name = (shown.get("key", ""), shown.get("tenant", ""))
        caller = self._callers.pop(name, None) or CallerUsage(*name)
        self._callers[name] = caller
        if len(self._callers) > MOST_CALLERS:
            self._callers.popitem(last=False)
        caller.requests += 1
        caller.failed += is_failure
        caller.last = shown["at"]
        for tokens in ("prompt_tokens", "cached_tokens", "completion_tokens"):
            setattr(caller, tokens, getattr(caller, tokens) + shown.get(tokens, 0))

    def state(self) -> dict[str, Any]:
        """Return counts, the last requests and failures (newest first), and the callers (latest request first)."""
        return {
            "now": self._clock(),
            "count": self._count,
            "failed": self._failed,
            "last": list(reversed(self._requests)),
            "failures": list(reversed(self._failures)),
            "callers": list(reversed(self._callers.values())),
        }
