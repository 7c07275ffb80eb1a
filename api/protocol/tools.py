"""The tools of a request, and which of them may or must be called."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from .base import StrictModel, rejected

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise rejected("must be 1 to 128 letters, digits, '_', '-' and '.'")
    return name


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise rejected("must have the type 'object': arguments are one", "type")
    return schema


def _check_kind(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "function":
        raise rejected("must be 'function': other kinds of tools are not supported", "type")
    return value


class FunctionName(StrictModel):
    """The function of a choice."""

    name: str


class Function(StrictModel):
    """A function that the model may call. Arguments hold ``parameters`` whether it is ``strict`` or not."""

    name: Annotated[str, AfterValidator(_check_name)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_check_parameters)] | None = None
    strict: bool = False


class Tool(StrictModel):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates know it; many fail on one without description or parameters."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


Tools = Annotated[list[Annotated[Tool, BeforeValidator(_check_kind)]], Field(max_length=MAX_TOOLS)]


class NamedChoice(StrictModel):
    """One function, and a call of it."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    """Some of the tools, to be called or left alone."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(StrictModel):
    """OpenAI's way to keep the list of tools and allow some of them."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>"
    if not isinstance(value, dict):
        return None
    return "<allowed>" if value.get("type") == "allowed_tools" else "<named>"


BY_CHOICE_FORM = Discriminator(
    _choice_form,
    custom_error_type="rejected",
    custom_error_message="must be 'none', 'auto', 'required' or an object that names a function",
)
"""Tells the three forms of a choice apart: chats and responses differ in what an object looks like inside."""

ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedChoice, Tag("<named>")]
    | Annotated[AllowedChoice, Tag("<allowed>")],
    BY_CHOICE_FORM,
]


def check_tools(tools: Sequence[Tool], choice: str | NamedChoice | AllowedChoice) -> None:
    """Names are different, and a choice is of tools that are there."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in names:
            raise rejected(f"repeats the name '{tool.function.name}'", "tools", index, "function", "name")
        names.add(tool.function.name)
    if not tools and choice not in ("none", "auto"):
        raise rejected("needs 'tools' to choose from", "tool_choice")
    for name in _chosen(choice):
        if name not in names:
            raise rejected(f"names '{name[:128]}', which is none of the 'tools'", "tool_choice")


def _chosen(choice: str | NamedChoice | AllowedChoice) -> list[str]:
    if isinstance(choice, NamedChoice):
        return [choice.function.name]
    if isinstance(choice, AllowedChoice):
        return [tool.function.name for tool in choice.allowed_tools.tools]
    return []


def narrowed(
    tools: Sequence[Tool], choice: str | NamedChoice | AllowedChoice
) -> tuple[Literal["none", "auto", "required", "named"], list[Tool]]:
    """The mode of a checked choice, and the tools that may be called."""
    if isinstance(choice, str):
        mode: Literal["none", "auto", "required"] = "none" if choice == "none" or not tools else choice  # type: ignore[assignment]
        return mode, list(tools)
    chosen = [tool for tool in tools if tool.function.name in _chosen(choice)]
    return ("named" if isinstance(choice, NamedChoice) else choice.allowed_tools.mode), chosen
