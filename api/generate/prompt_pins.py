"""Prefix pins of a chat: how many tokens of its prompt each ``cache_control`` in tools and messages reaches to."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence

from ...engine.errors import RequestError
from ..protocol.chat import ChatRequest
from ..protocol.chat_messages import ChatMessage

Encode = Callable[[Sequence[ChatMessage]], Awaitable["array[int]"]]
"""Returns the tokens of some messages with the request's tools, without an answer's header."""

_NOTHING = ChatMessage(role="user", content="")


async def prefix_pins(body: ChatRequest, tokens: array[int], encode: Encode) -> tuple[tuple[int, float], ...]:
    """Return (tokens, seconds) for each mark. Up to a mark are the tokens that the prompt shares with its beginning."""
    return tuple([(await _reach(messages, tokens, encode), mark.seconds) for messages, mark in body.cache_points()])


async def _reach(messages: Sequence[ChatMessage], tokens: array[int], encode: Encode) -> int:
    """Return the number of tokens up to the end of some messages.

    Some templates want a user's message at the end, or refuse any such beginning: then all of the prompt counts.
    """
    for beginning in (messages, [*messages, _NOTHING]):
        try:
            if beginning:
                return num_shared(await encode(beginning), tokens)
        except RequestError:
            continue
    return len(tokens)


def num_shared(first: array[int], second: array[int]) -> int:
    """Return the length of the longest common beginning."""
    most = min(len(first), len(second))
    return bisect_left(range(1, most + 1), True, key=lambda length: first[:length] != second[:length])
