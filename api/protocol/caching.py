"""How long a prompt stays in the prefix cache: OpenAI's ``prompt_cache_key`` and Anthropic's ``cache_control``."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from ...engine.types import MAX_PIN_SECONDS, MAX_SESSION_NAME
from .base import StrictModel, rejected

_TTL = re.compile(r"([1-9][0-9]{0,4})([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}

CacheKey = Annotated[str, Field(max_length=MAX_SESSION_NAME)]


def seconds_of(ttl: str) -> int:
    """The seconds of a time such as ``90s``, ``5m`` or ``1h``. ValueError if it is none."""
    match = _TTL.fullmatch(ttl)
    if match is None:
        raise ValueError(f"no time: {ttl!r}")
    return int(match[1]) * _SECONDS[match[2]]


def _check_ttl(ttl: str) -> str:
    if not _TTL.fullmatch(ttl) or seconds_of(ttl) > MAX_PIN_SECONDS:
        raise rejected("must be a time such as '90s', '5m' or '1h', of at most 24 hours")
    return ttl


class CacheControl(StrictModel):
    """Pin the whole prompt, for ``ttl`` after the answer's end."""

    type: Literal["ephemeral"]
    ttl: Annotated[str, AfterValidator(_check_ttl)] = "5m"
