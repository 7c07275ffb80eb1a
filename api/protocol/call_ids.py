"""Ids of tool calls, for all protocols: assigns results to their calls, and sorts results in the order of the calls.

Clients send results in the order in which the calls have completed. Chat templates without ids identify a result only
by its position.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from .base import rejected

if TYPE_CHECKING:
    from .chat_messages import ChatMessage

_MOST_QUOTED = 128


class CallIdError(ValueError):
    """Raised if an id belongs to no call, or to a call that already has its result.

    The message continues the field's name.
    """


class CallPlace(NamedTuple):
    """The place of a call: the number of its turn, and the call's number among all calls."""

    turn: int
    number: int


class ToolCallIds:
    """The calls of a conversation in order, for finding the call of each result.

    A turn of the assistant ends with a result or with a message of another role. A later turn may reuse an id; a result
    belongs to the latest call with its id. If calls of one turn share an id, as some servers generate them, their
    results are assigned in order. Results with unknown ids are assigned in order to the calls without an id, which old
    clients send.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._count = 0
        self._open: dict[str, list[CallPlace]] = {}
        self._without_id: list[CallPlace] = []

    def end_turn(self) -> None:
        """End the current turn and start another one."""
        self._turn += 1

    def call(self, call_id: str | None) -> None:
        """Add a call to the current turn."""
        place = CallPlace(self._turn, self._count)
        self._count += 1
        if call_id is None:
            self._without_id.append(place)
            return
        waiting = self._open.get(call_id, [])
        self._open[call_id] = [*(each for each in waiting if each.turn == self._turn), place]

    def result(self, call_id: str) -> CallPlace:
        """Return the call of a result. Raises CallIdError for an unknown id, and for a second result of a call."""
        self.end_turn()
        waiting = self._open.get(call_id)
        if waiting:
            return waiting.pop(0)
        if waiting is not None:
            raise CallIdError(f"names '{call_id[:_MOST_QUOTED]}', a call that already has a result")
        if not self._without_id:
            raise CallIdError(f"names '{call_id[:_MOST_QUOTED]}', but there is no such call before it")
        return self._without_id.pop(0)


def in_call_order(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Sort the results of each turn in a chat in the order of their calls. Returns the messages.

    Only results change places, and only among themselves.

    Raises:
        PydanticCustomError: an id is unknown, or a call has two results.
    """
    calls = ToolCallIds()
    places: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, message in enumerate(messages):
        if message.role == "tool" and message.tool_call_id is not None:
            try:
                turn, call = calls.result(message.tool_call_id)
            except CallIdError as error:
                raise rejected(str(error), "messages", number, "tool_call_id") from None
            places[turn].append((call, number))
            continue
        if message.role != "assistant":
            calls.end_turn()
        for each in message.tool_calls:
            calls.call(each.id)
    ordered = list(messages)
    for results in places.values():
        for (_, here), (_, there) in zip(results, sorted(results), strict=True):
            ordered[here] = messages[there]
    return ordered
