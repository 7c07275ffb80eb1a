"""Message blocks: builds the content blocks of an answer and their streaming events.

The events of a block are content_block_start; text_delta, thinking_delta or input_json_delta events; a signature_delta
at the end of reasoning; content_block_stop.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from ..structured.tool_parser import ToolParser, arguments_json
from ..structured.tool_plan import Arguments, CallStart, Content

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TextDelta

MessageEvent = dict[str, Any]
"""The data of an event, including its ``type``."""


class MessageBlocks:
    """Builds the content blocks of one answer.

    Args:
        parser: parser of tool calls; None without tools.

    Attributes:
        calls: whether the answer calls tools.
    """

    def __init__(self, parser: ToolParser | None) -> None:
        self.calls = False
        self._parser = parser
        self._blocks: list[dict[str, Any]] = []
        # Kind of the open block; None if no block is open.
        self._kind: str | None = None
        self._pieces: list[str] = []

    def take(self, delta: TextDelta) -> list[MessageEvent]:
        """Add a delta. Returns its events."""
        events = self._add("thinking", delta.reasoning) if delta.reasoning else []
        pieces: list[Any] = [Content(delta.text)] if delta.text else []
        if self._parser is not None:
            pieces = self._parser.push(delta.text)
            if delta.finish is not None:
                pieces += self._parser.finish()
        for piece in pieces:
            match piece:
                case Content():
                    # In chats this newline joins the text to the text before a call. Here the text is a block of its
                    # own.
                    text = piece.text.removeprefix("\n") if self._kind == "tool_use" else piece.text
                    events += self._add("text", text)
                case CallStart():
                    self.calls = True
                    events += self._begin({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
                case Arguments():
                    events += self._add("tool_use", piece.text)
        return events

    def finish(self) -> list[MessageEvent]:
        """Close the open block, if there is one. Returns its last events."""
        if self._kind is None:
            return []
        kind, text, block, index = self._kind, "".join(self._pieces), self._blocks[-1], len(self._blocks) - 1
        self._kind, self._pieces = None, []
        events: list[MessageEvent] = []
        if kind == "tool_use":
            block["input"] = arguments_json(text)
        else:
            block[kind] = text
        if kind == "thinking":
            block["signature"] = hashlib.sha256(text.encode()).hexdigest()
            events = [_delta(index, "signature_delta", "signature", block["signature"])]
        return [*events, {"type": "content_block_stop", "index": index}]

    def content(self) -> list[dict[str, Any]]:
        """Return the closed blocks."""
        return self._blocks

    def _begin(self, block: dict[str, Any]) -> list[MessageEvent]:
        events = self.finish()
        self._kind = block["type"]
        self._blocks.append(block)
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": {**block}}]

    def _add(self, kind: str, text: str) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        if self._kind != kind:
            empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            events = self._begin(empty)
        self._pieces.append(text)
        delta, field = _DELTAS[kind]
        return [*events, _delta(len(self._blocks) - 1, delta, field, text)] if text else events


_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _delta(index: int, kind: str, field: str, text: str) -> MessageEvent:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, field: text}}
