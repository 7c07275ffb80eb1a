"""Output items: builds the items of a response and their streaming events.

thought:  output_item.added, content_part.added, reasoning_text.delta ..., reasoning_text.done, content_part.done,
          output_item.done
message:  output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done,
          output_item.done
call:     output_item.added, function_call_arguments.delta ..., function_call_arguments.done, output_item.done
custom:   output_item.added, custom_tool_call_input.delta ..., custom_tool_call_input.done, output_item.done
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..generate.logprob_formats import chat_logprobs
from ..structured.tool_parser import ToolParser
from ..structured.tool_plan import Arguments, CallStart, Content
from .conversation import new_id

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TextDelta

Event = tuple[str, dict[str, Any]]
"""Type of an event, and its fields without type and sequence number."""


class OutputItems:
    """Builds the output items of one answer.

    Args:
        parser: parser of tool calls; None without tools.
        num_logprobs: number of likeliest tokens with logprobs at each position; None for no logprobs.
        thinks: whether reasoning may precede the answer. Logprobs of reasoning tokens are left out.

    Attributes:
        items: the items. The last one is incomplete while it is open.
    """

    def __init__(self, parser: ToolParser | None, num_logprobs: int | None, *, thinks: bool = False) -> None:
        self.items: list[dict[str, Any]] = []
        self._parser = parser
        self._num_logprobs = num_logprobs
        self._thinks = thinks
        # Logprobs of tokens that may belong to the reasoning or to a call.
        self._held_logprobs: list[dict[str, Any]] = []
        self._open = False
        self._pieces: list[str] = []

    def take(self, delta: TextDelta) -> list[Event]:
        """Add a delta. Returns its events. The delta's logprobs are sent with the first text event."""
        logprobs = self._logprobs(delta)
        events = self._add_thought(delta.reasoning) if delta.reasoning else []
        if self._is_open("reasoning") and not delta.text:
            logprobs = []
        shows_logprobs = delta.logprobs and (self._is_open("message") or not self._thinks)
        pieces: list[Any] = [Content(delta.text)] if delta.text or shows_logprobs else []
        if self._parser is not None:
            pieces = self._parser.push(delta.text)
            if delta.finish is not None:
                pieces += self._parser.finish()
        logprobs = [*self._held_logprobs, *logprobs]
        is_over = self._is_in_call or (self._is_open("reasoning") and not delta.text)
        self._held_logprobs = [] if pieces or is_over else logprobs
        for piece in pieces:
            match piece:
                case Content():
                    # In chats this newline joins the text to the text before a call. Here the text is an item of its
                    # own.
                    text = piece.text.removeprefix("\n") if self._is_in_call else piece.text
                    events += self._add_text(text, logprobs)
                    logprobs = []
                case CallStart():
                    events += self._begin_call(piece)
                    logprobs = []
                case Arguments():
                    events.append(self._add_arguments(piece.text))
        return events

    def finish(self, status: str) -> list[Event]:
        """Close the open item with this status. Returns the events. An answer without items gets an empty message."""
        events = [] if self.items else self._begin_message()
        return events + self._close(status)

    def _logprobs(self, delta: TextDelta) -> list[dict[str, Any]]:
        if self._num_logprobs is None:
            return []
        entries: list[dict[str, Any]] = chat_logprobs(delta.logprobs, self._num_logprobs)["content"]
        return entries

    @property
    def _position(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _add(self, item: dict[str, Any]) -> list[Event]:
        events = self._close("completed")
        self.items.append(item)
        self._open, self._pieces = True, []
        return [*events, ("response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)})]

    def _is_open(self, kind: str) -> bool:
        return self._open and self.items[-1]["type"] == kind

    @property
    def _is_in_call(self) -> bool:
        return self._open and self.items[-1]["type"] in ("function_call", "custom_tool_call")

    def _add_thought(self, text: str) -> list[Event]:
        events: list[Event] = []
        if not self._is_open("reasoning"):
            item: dict[str, Any] = {
                "id": new_id("rs"),
                "type": "reasoning",
                "status": "in_progress",
                "summary": [],
                "content": [],
            }
            events = self._add(item)
            item["content"] = [{"type": "reasoning_text", "text": ""}]
            added = {**self._position, "content_index": 0, "part": {"type": "reasoning_text", "text": ""}}
            events.append(("response.content_part.added", added))
        self._pieces.append(text)
        return [*events, ("response.reasoning_text.delta", {**self._position, "content_index": 0, "delta": text})]

    def _begin_message(self) -> list[Event]:
        item: dict[str, Any] = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [],
        }
        events = self._add(item)
        item["content"] = [_text_part()]
        added = {**self._position, "content_index": 0, "part": _text_part()}
        return [*events, ("response.content_part.added", added)]

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        events = [] if self._is_open("message") else self._begin_message()
        self._pieces.append(text)
        self.items[-1]["content"][0]["logprobs"] += logprobs
        delta = {**self._position, "content_index": 0, "delta": text, "logprobs": logprobs}
        return [*events, ("response.output_text.delta", delta)]

    def _begin_call(self, call: CallStart) -> list[Event]:
        begun = {"status": "in_progress", "call_id": call.id, "name": call.name}
        if call.is_custom:
            return self._add({"id": new_id("ctc"), "type": "custom_tool_call", **begun, "input": ""})
        return self._add({"id": new_id("fc"), "type": "function_call", **begun, "arguments": ""})

    def _add_arguments(self, text: str) -> Event:
        self._pieces.append(text)
        kind = "custom_tool_call_input" if self._is_open("custom_tool_call") else "function_call_arguments"
        return f"response.{kind}.delta", {**self._position, "delta": text}

    def _close(self, status: str) -> list[Event]:
        """Close the open item, if there is one. Returns its last events."""
        if not self._open:
            return []
        self._open = False
        item, text = self.items[-1], "".join(self._pieces)
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "message":
            part = item["content"][0]
            part["text"] = text
            position = {**self._position, "content_index": 0}
            events.append(("response.output_text.done", {**position, "text": text, "logprobs": part["logprobs"]}))
            events.append(("response.content_part.done", {**position, "part": part}))
        elif item["type"] == "reasoning":
            part = item["content"][0]
            part["text"] = text
            position = {**self._position, "content_index": 0}
            events.append(("response.reasoning_text.done", {**position, "text": text}))
            events.append(("response.content_part.done", {**position, "part": part}))
        elif item["type"] == "custom_tool_call":
            item["input"] = text
            events.append(("response.custom_tool_call_input.done", {**self._position, "input": text}))
        else:
            item["arguments"] = text
            done = {**self._position, "name": item["name"], "arguments": text}
            events.append(("response.function_call_arguments.done", done))
        return [*events, ("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})]


def _text_part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
