"""Anthropic's ``cache_control``: a mark that pins a prompt, or its beginning, in the prefix cache for some time."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator

from ...engine.types import MAX_PIN_SECONDS
from .base import StrictModel, rejected

_TTL = re.compile(r"([1-9][0-9]{0,4})([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def _check_ttl(ttl: str) -> str:
    match = _TTL.fullmatch(ttl)
    if match is None or _seconds(match) > MAX_PIN_SECONDS:
        raise rejected("must be a time such as '90s', '5m' or '1h', of at most 24 hours")
    return ttl


def _seconds(match: re.Match[str]) -> int:
    return int(match[1]) * _SECONDS[match[2]]


class CacheControl(StrictModel):
    """Pin a prompt in the prefix cache until ``ttl`` has passed after the answer.

    On a request, the mark pins the whole prompt; on a message or tool, it pins the prompt up to the end of that part.
    """

    type: Literal["ephemeral"]
    ttl: Annotated[str, AfterValidator(_check_ttl)] = "5m"

    @property
    def seconds(self) -> float:
        """The ``ttl`` in seconds."""
        match = _TTL.fullmatch(self.ttl)
        assert match is not None, "the ttl was validated"
        return float(_seconds(match))
