"""Past conversations: stores the chats of one connection, which later requests may continue, up to a limit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ..exact_json import dumps_exact, loads_exact
from .socket_channel import BadMessage

_INHERITED = ("model", "tools")
"""Fields that a turn inherits from the previous turn unless it sets them, because the prompt begins with them."""


class PastConversations:
    """Chats by the id of their last request. If room is needed, the chat that was stored first is removed.

    Args:
        max_bytes: largest size of all conversations together, as JSON.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._kept

    def keep(self, request_id: str, body: dict[str, Any], answer: dict[str, Any]) -> None:
        """Store the messages of a request and its answer. An earlier request with this id is replaced."""
        fields = {name: body[name] for name in _INHERITED if name in body}
        data = dumps_exact({**fields, "messages": _with_answer(body, answer)})
        self._num_bytes += len(data) - len(self._kept.pop(request_id, b""))
        self._kept[request_id] = data
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept.popitem(last=False)[1])

    def with_turn(self, after: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body in which the messages of an earlier request and its answer precede the body's own messages.

        Raises:
            BadMessage: the earlier request is not stored, or ``messages`` is not a list.
        """
        if after not in self._kept:
            text = "'after' is not a chat of this connection, or the chat is no longer stored: send all messages."
            raise BadMessage(text, param="after", code="conversation_not_found")
        if not isinstance(body["messages"], list):
            raise BadMessage("'messages' must be a list.", param="messages", code="invalid_type")
        past = loads_exact(self._kept[after])
        return {**past, **body, "messages": [*past["messages"], *body["messages"]]}


def _with_answer(body: dict[str, Any], answer: dict[str, Any]) -> list[Any]:
    """Return the messages of a request and its answer, which may continue the last message.

    The messages may have any form, because a request that was cancelled at once was not validated.
    """
    messages = body["messages"] if isinstance(body["messages"], list) else []
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    said = _text(last.get("content"))
    text = answer["content"].removeprefix(said) if body.get("echo") else answer["content"]
    if not body.get("continue_final_message") or not last:
        return [*messages, {**answer, "content": text}]
    thought = f"{last.get('reasoning_content') or ''}{answer.get('reasoning_content', '')}"
    thoughts = {"reasoning_content": thought} if thought else {}
    return [*messages[:-1], {**last, **answer, "content": said + text, **thoughts}]


def _text(content: Any) -> str:
    parts = [{"text": content}] if isinstance(content, str) else content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "".join(text for text in texts if isinstance(text, str))
