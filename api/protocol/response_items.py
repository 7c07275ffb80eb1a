"""The items of a response's ``input``: messages, function calls, their outputs, and references to earlier items."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from .base import StrictModel, rejected, string_or_list
from .chat_messages import CacheBreakpoint

MAX_ITEMS = 4096

_PART_KINDS = {"input_image": "images", "input_file": "files", "input_audio": "audio", "refusal": "refusals"}
_TEXT_PARTS = ("input_text", "output_text", "text")
_FORMS = {
    "message": "<message>",
    "function_call": "<call>",
    "function_call_output": "<output>",
    "item_reference": "<reference>",
}

Status = Literal["in_progress", "completed", "incomplete"]


def _check_part(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind not in _TEXT_PARTS:
        what = _PART_KINDS.get(kind, "this kind of part")
        raise rejected(f"must be 'input_text' or 'output_text': {what} cannot be taken", "type")
    return value


class ResponseTextPart(StrictModel):
    """A piece of text of either side. What came with it in an answer of ours may be sent back, and is left alone."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)
    prompt_cache_breakpoint: CacheBreakpoint | None = None


Texts = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[Annotated[ResponseTextPart, BeforeValidator(_check_part)]], Tag("<list>")],
    Discriminator(
        string_or_list, custom_error_type="rejected", custom_error_message="must be a string or a list of text parts"
    ),
]


def text_of(content: str | list[ResponseTextPart]) -> str:
    """The content as one string."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(StrictModel):
    """A message of any side. ``phase`` is a mark of OpenAI's models, which ours do not read."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(StrictModel):
    """A function that the model called in an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class OutputItem(StrictModel):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: Texts
    id: str | None = None
    status: Status | None = None


class ReferenceItem(StrictModel):
    """An item of an earlier response that is stored here, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: str


def _item_form(value: Any) -> str | None:
    """Discriminator: items of clients often have no type, and a message is known by its role then."""
    if not isinstance(value, dict):
        return None
    if value.get("type") is None:
        return "<message>" if "role" in value else "<reference>" if "id" in value else None
    kind = value["type"]
    return _FORMS.get(kind) if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<call>")]
    | Annotated[OutputItem, Tag("<output>")]
    | Annotated[ReferenceItem, Tag("<reference>")],
    Discriminator(
        _item_form,
        custom_error_type="rejected",
        custom_error_message="must be a message, a function_call, a function_call_output or an item_reference: other "
        "items cannot be taken",
    ),
]

Input = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[InputItem], Tag("<list>"), Field(max_length=MAX_ITEMS)],
    Discriminator(
        string_or_list, custom_error_type="rejected", custom_error_message="must be a string or a list of items"
    ),
]
