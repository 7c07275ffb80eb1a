"""The items of a response while its answer comes, and the events that tell of them.

message:  output_item.added, content_part.added, output_text.delta ..., output_text.done, content_part.done,
          output_item.done
call:     output_item.added, function_call_arguments.delta ..., function_call_arguments.done, output_item.done
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..generate.logprob_formats import chat_logprobs
from ..structured.tool_parser import Arguments, CallStart, Content, ToolParser, ToolPlan
from .conversation import new_id

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TextDelta

Event = tuple[str, dict[str, Any]]
"""Type of an event, and its fields but for type and sequence number."""


class OutputItems:
    """Builds the items of one answer.

    Args:
        plan: how calls are read out of the text; None where there are none.
        num_logprobs: how many of the best tokens to list beside each; None for no logprobs.

    Attributes:
        items: complete, but for the last while it is open.
    """

    def __init__(self, plan: ToolPlan | None, num_logprobs: int | None) -> None:
        self.items: list[dict[str, Any]] = []
        self._parser = None if plan is None else ToolParser(plan)
        self._num_logprobs = num_logprobs
        self._open = False
        self._pieces: list[str] = []

    def take(self, delta: TextDelta) -> list[Event]:
        """The events for what came. Logprobs go with the first text of it."""
        found: list[Any] = [Content(delta.text)] if delta.text or delta.logprobs else []
        if self._parser is not None:
            found = self._parser.push(delta.text)
            if delta.finish is not None:
                found += self._parser.finish()
        logprobs = self._logprobs(delta)
        events: list[Event] = []
        for piece in found:
            match piece:
                case Content():
                    events += self._say(piece.text, logprobs)
                    logprobs = []
                case CallStart():
                    events += self._begin_call(piece)
                case Arguments():
                    events.append(self._argue(piece.text))
        return events

    def finish(self, status: str) -> list[Event]:
        """Close the last item with this status. An answer without items gets an empty message."""
        events = [] if self.items else self._begin_message()
        return events + self._close(status)

    def _logprobs(self, delta: TextDelta) -> list[dict[str, Any]]:
        if self._num_logprobs is None:
            return []
        entries: list[dict[str, Any]] = chat_logprobs(delta.logprobs, self._num_logprobs)["content"]
        return entries

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _add(self, item: dict[str, Any]) -> list[Event]:
        events = self._close("completed")
        self.items.append(item)
        self._open, self._pieces = True, []
        return [*events, ("response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)})]

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
        added = {**self._place, "content_index": 0, "part": _text_part()}
        return [*events, ("response.content_part.added", added)]

    def _say(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        is_message = self._open and self.items[-1]["type"] == "message"
        events = [] if is_message else self._begin_message()
        self._pieces.append(text)
        self.items[-1]["content"][0]["logprobs"] += logprobs
        delta = {**self._place, "content_index": 0, "delta": text, "logprobs": logprobs}
        return [*events, ("response.output_text.delta", delta)]

    def _begin_call(self, call: CallStart) -> list[Event]:
        return self._add(
            {
                "id": new_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": call.id,
                "name": call.name,
                "arguments": "",
            }
        )

    def _argue(self, text: str) -> Event:
        self._pieces.append(text)
        return "response.function_call_arguments.delta", {**self._place, "delta": text}

    def _close(self, status: str) -> list[Event]:
        """The last events of the open item, if there is one."""
        if not self._open:
            return []
        self._open = False
        item, text = self.items[-1], "".join(self._pieces)
        item["status"] = status
        events: list[Event] = []
        if item["type"] == "message":
            part = item["content"][0]
            part["text"] = text
            place = {**self._place, "content_index": 0}
            events.append(("response.output_text.done", {**place, "text": text, "logprobs": part["logprobs"]}))
            events.append(("response.content_part.done", {**place, "part": part}))
        else:
            item["arguments"] = text
            done = {**self._place, "name": item["name"], "arguments": text}
            events.append(("response.function_call_arguments.done", done))
        return [*events, ("response.output_item.done", {"output_index": len(self.items) - 1, "item": item})]


def _text_part() -> dict[str, Any]:
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
