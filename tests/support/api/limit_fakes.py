"""A clock, limited keys, and refusals for the tests of rate and queue limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rootgraft.api.access.api_keys import Key
from rootgraft.api.errors import Rejection


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def limited(requests: int | None = None, tokens: int | None = None) -> Key:
    return Key("k", b"", "t", requests_per_minute=requests, tokens_per_minute=tokens)


def refused(call: Callable[[], Any]) -> tuple[int, str, int]:
    """Status, reason and seconds of a refusal."""
    with pytest.raises(Rejection) as caught:
        call()
    headers = caught.value.headers or {}
    return caught.value.status_code, caught.value.reason, int(headers["retry-after"])
