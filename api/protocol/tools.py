"""Request fields ``tools`` and ``tool_choice``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from .base import Refusal, StrictModel, rejected
from .cache_control import CacheControl
from .foreign_fields import foreign_rules

MAX_TOOLS = 256
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise rejected("must be 1 to 128 letters, digits, '_', '-' and '.'")
    return name


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise rejected("must have the type 'object': arguments are one", "type")
    return schema


def check_tool_type(value: Any) -> Any:
    """Refuse tools other than functions, before the fields are validated."""
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "function":
        raise rejected("must be 'function': other kinds of tools are not supported", "type")
    return value


class FunctionName(StrictModel):
    """Name of the chosen function."""

    name: str


class Function(StrictModel):
    """A function tool. ``parameters`` is enforced whether it is ``strict`` or not."""

    name: Annotated[str, AfterValidator(_check_name)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_check_parameters)] | None = None
    strict: bool = False


class Tool(StrictModel):
    """A tool; only functions are supported."""

    refused: ClassVar[Mapping[str, Refusal]] = foreign_rules("tool").refused

    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None

    def for_template(self) -> dict[str, Any]:
        """The tool for the chat template; many templates fail without a description or parameters."""
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


Tools = Annotated[list[Annotated[Tool, BeforeValidator(check_tool_type)]], Field(max_length=MAX_TOOLS)]


class NamedChoice(StrictModel):
    """Forces a call of one function."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    """Restricts the choice to some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(StrictModel):
    """OpenAI's ``allowed_tools``: the prompt lists all tools, and some may be called."""

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
"""Discriminator of ``tool_choice``, whose objects differ between chat and responses."""

ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedChoice, Tag("<named>")]
    | Annotated[AllowedChoice, Tag("<allowed>")],
    BY_CHOICE_FORM,
]


def check_tools(tools: Sequence[Tool], choice: str | NamedChoice | AllowedChoice) -> None:
    """Refuse repeated names, and a choice of tools that are not listed."""
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


def resolve_choice(
    tools: Sequence[Tool], choice: str | NamedChoice | AllowedChoice
) -> tuple[Literal["none", "auto", "required", "named"], list[Tool]]:
    """Return the mode of a checked choice, and the callable tools."""
    if isinstance(choice, str):
        mode: Literal["none", "auto", "required"] = "none" if choice == "none" or not tools else choice  # type: ignore[assignment]
        return mode, list(tools)
    chosen = [tool for tool in tools if tool.function.name in _chosen(choice)]
    return ("named" if isinstance(choice, NamedChoice) else choice.allowed_tools.mode), chosen
