"""Conversation: converts a response's ``input`` and the turns of ``previous_response_id`` to chat messages."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from ...engine.errors import RequestError
from ..exact_json import loads_exact
from ..large_bodies import beside_loop, note_more
from ..protocol.call_ids import CallIdError, ToolCallIds
from ..protocol.chat_messages import ChatMessage, FunctionCall, ToolCall
from ..protocol.response_items import (
    CallItem,
    CustomCallItem,
    InputItem,
    MessageItem,
    OtherItem,
    OutputItem,
    ReasoningItem,
    ReferenceItem,
    text_of,
)
from ..protocol.responses import CountInputTokensRequest, ResponseRequest
from ..storage.response_store import ResponseStore, packed

_ITEMS: TypeAdapter[list[Any]] = TypeAdapter(list[InputItem])
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def new_id(kind: str) -> str:
    """Return a new id: the kind, as in ``_ID_PREFIXES`` or ``resp``, an underscore and 48 hexadecimal digits."""
    return f"{kind}_{uuid.uuid4().hex}{uuid.uuid4().hex[:16]}"


class Conversation:
    """The input items of a response and of the responses before it.

    Args:
        earlier: turns of the previous response, in their stored form.
        turn: complete items of this response's own input.

    Attributes:
        turns: all turns in the stored form of ``ResponseStore``.
        item_ids: ids of the items in this response's own input.
    """

    def __init__(self, earlier: Sequence[bytes], turn: list[dict[str, Any]]) -> None:
        self.turns = (*earlier, packed(turn))
        self.item_ids = tuple(item["id"] for item in turn)
        self._earlier = [item for part in earlier for item in loads_exact(part)]
        self._turn = turn

    def messages(self, instructions: str | None) -> list[ChatMessage]:
        """Translate all items to chat messages, this response's instructions first.

        Raises:
            RequestError: an output belongs to no earlier call, or to a call that already has an output; or there are no
                messages.
        """
        messages = [] if instructions is None else [ChatMessage(role="system", content=instructions)]
        calls, left_out = ToolCallIds(), set[str | None]()
        # The reasoning for the assistant's next message.
        thought: str | None = None
        items = _ITEMS.validate_python([*self._earlier, *self._turn])
        for position, item in enumerate(items, -len(self._earlier)):
            match item:
                case ReasoningItem():
                    thought = (thought or "") + item.text or None
                case MessageItem(role="assistant"):
                    _add_answer(messages, text_of(item.content), thought)
                    thought = None
                case MessageItem():
                    _add_lone_thought(messages, thought)
                    thought = None
                    messages.append(ChatMessage(role=item.role, content=text_of(item.content)))
                    calls.end_turn()
                case OtherItem():
                    left_out.add(item.call_id)
                case OutputItem() if item.call_id in left_out:
                    continue
                case CallItem() | CustomCallItem():
                    calls.call(item.call_id)
                    _add_call(messages, item, thought)
                    thought = None
                case OutputItem():
                    try:
                        calls.result(item.call_id)
                    except CallIdError as error:
                        field = f"input[{position}].call_id"
                        raise RequestError(f"'{field}' {error}.", param=field) from None
                    content = text_of(item.output)
                    messages.append(ChatMessage(role="tool", content=content, tool_call_id=item.call_id))
        _add_lone_thought(messages, thought)
        if not messages:
            raise RequestError("'input' needs a message: items of other tools are ignored.", param="input")
        return messages


def _add_answer(messages: list[ChatMessage], text: str, thought: str | None) -> None:
    """Add a text of the assistant. After calls without results it belongs to their message, as in a chat's answer."""
    last = messages[-1] if messages else None
    if thought is None and last is not None and last.role == "assistant" and last.tool_calls:
        last.content = "\n".join(each for each in (last.text, text) if each) or last.content
    else:
        messages.append(ChatMessage(role="assistant", content=text, reasoning_content=thought))


def _add_lone_thought(messages: list[ChatMessage], thought: str | None) -> None:
    """Add an answer that was cut off in its reasoning, so that its turn is not missing."""
    if thought is not None:
        messages.append(ChatMessage(role="assistant", content="", reasoning_content=thought))


def _add_call(messages: list[ChatMessage], item: CallItem | CustomCallItem, thought: str | None) -> None:
    """Add a call to the assistant's last message. Consecutive calls and the text before them form one message.

    Reasoning starts a new message.
    """
    call = ToolCall(id=item.call_id, function=FunctionCall(name=item.name, arguments=item.arguments))
    if messages and messages[-1].role == "assistant" and thought is None:
        messages[-1].tool_calls.append(call)
    else:
        messages.append(ChatMessage(role="assistant", tool_calls=[call], reasoning_content=thought))


async def load_conversation(
    body: ResponseRequest | CountInputTokensRequest, store: ResponseStore, owner: str, connection: str = ""
) -> Conversation:
    """Load the conversation of a request.

    Args:
        connection: id of the request's WebSocket connection. The request may continue responses of this connection even
            if they are not stored.

    Raises:
        RequestError: a referenced response or item is not stored.
    """
    earlier: tuple[bytes, ...] = ()
    if body.previous_response_id is not None:
        record = store.get(owner, body.previous_response_id, connection)
        if record is None or record.job is not None:
            problem = "not found" if record is None else "not finished yet"
            raise RequestError(
                f"'previous_response_id': the response '{body.previous_response_id[:128]}' is {problem}.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        earlier = record.conversation()
    note_more(sum(len(part) for part in earlier))
    items = [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    found = {
        index: _found(item, index, store, owner, connection)
        for index, item in enumerate(items)
        if isinstance(item, ReferenceItem)
    }
    return await beside_loop(partial(_conversation, earlier, items, found))


def _conversation(
    earlier: tuple[bytes, ...], items: Sequence[InputItem], found: Mapping[int, dict[str, Any]]
) -> Conversation:
    """Build the conversation from its items. References are replaced by the items found for them."""
    turn = [found[at] if isinstance(item, ReferenceItem) else _complete(item) for at, item in enumerate(items)]
    return Conversation(earlier, turn)


def _found(item: ReferenceItem, index: int, store: ResponseStore, owner: str, connection: str) -> dict[str, Any]:
    found = store.find_item(owner, item.id, connection)
    if found is None:
        raise RequestError(
            f"'input[{index}].id': the item '{item.id[:128]}' is not stored.", param=f"input[{index}].id"
        )
    return found


def _complete(item: MessageItem | CallItem | CustomCallItem | OutputItem | ReasoningItem | OtherItem) -> dict[str, Any]:
    """Complete an item with an id, a status and its texts as parts, in the form in which OpenAI lists items."""
    if isinstance(item, OtherItem):
        return {**item.model_dump(exclude_none=True), "id": item.id or new_id("item")}
    if isinstance(item, ReasoningItem):
        return {**item.model_dump(exclude_none=True), "id": item.id or new_id("rs")}
    fields = item.model_dump(exclude_none=True, exclude={"content", "output"})
    fields["id"] = item.id or new_id(_ID_PREFIXES[item.type])
    fields["status"] = item.status or "completed"
    if isinstance(item, MessageItem):
        kind = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = [_part(kind, text_of(item.content))]
    elif isinstance(item, OutputItem):
        fields["output"] = text_of(item.output)
    return fields


def _part(kind: str, text: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return {"type": kind, "text": text, **extra}
