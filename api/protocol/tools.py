"""Request fields ``tools`` and ``tool_choice``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag

from .base import Id, Refusal, StrictModel, rejected
from .cache_control import CacheControl
from .foreign_fields import foreign_rules

MAX_TOOLS = 256
MAX_QUOTED = 128
_NOT_HERE = "cannot be called here"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise rejected("must be 1 to 128 letters, digits, '_', '-' and '.'")
    return name


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise rejected("must have the type 'object': arguments are one", "type")
    return schema


class OtherTool(BaseModel):
    """A tool that cannot be called here, as of another type than ``function``: it is left out and named in a header.

    A declaration is no demand: an answer without the tool is one that the client has to expect anyway.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    type: Id
    name: Id | None = None
    cache_control: CacheControl | None = None


def by_tool_type(served: str) -> Discriminator:
    """Return a discriminator with the tags ``<served>``, of tools of a type or without one, and ``<other>``."""

    def form(value: Any) -> str:
        kind = value.get("type", served) if isinstance(value, dict) else getattr(value, "type", served)
        return "<other>" if isinstance(kind, str) and kind != served else "<served>"

    return Discriminator(form)


class FunctionName(StrictModel):
    """Name of the chosen function."""

    name: Id


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


AnyTool = Annotated[
    Annotated[Tool, Tag("<served>")] | Annotated[OtherTool, Tag("<other>")],
    by_tool_type("function"),
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)]


def functions_of(tools: Sequence[Tool | OtherTool]) -> list[Tool]:
    """Return the tools that can be called here."""
    return [tool for tool in tools if isinstance(tool, Tool)]


def tools_left_out(tools: Sequence[Any]) -> list[str]:
    """Return place and type of the tools that cannot be called, for the client."""
    return [f"tools[{index}] {tool.type}" for index, tool in enumerate(tools) if isinstance(tool, OtherTool)]


class NamedChoice(StrictModel):
    """Forces a call of one function."""

    type: Literal["function"]
    function: FunctionName


class OtherChoice(BaseModel):
    """One of several allowed tools that cannot be called here: the choice is among the others."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Id


AnyChoice = Annotated[
    Annotated[NamedChoice, Tag("<served>")] | Annotated[OtherChoice, Tag("<other>")],
    by_tool_type("function"),
]


class AllowedTools(StrictModel):
    """Restricts the choice to some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyChoice], Field(min_length=1, max_length=MAX_TOOLS)]


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


def check_tools(tools: Sequence[Tool | OtherTool], choice: str | NamedChoice | AllowedChoice) -> None:
    """Refuse repeated names, and a choice of tools that are not listed or cannot be called."""
    names: set[str] = set()
    others = {tool.name: tool.type for tool in tools if isinstance(tool, OtherTool) and tool.name is not None}
    for index, tool in enumerate(tools):
        if not isinstance(tool, Tool):
            continue
        if tool.function.name in names:
            raise rejected(f"repeats the name '{tool.function.name}'", "tools", index, "function", "name")
        names.add(tool.function.name)
    for name in _chosen(choice):
        if name not in names and name in others:
            kind = others[name][:MAX_QUOTED]
            raise rejected(
                f"names '{name[:MAX_QUOTED]}', a tool of the type '{kind}', which {_NOT_HERE}", "tool_choice"
            )
        if tools and name not in names:
            raise rejected(f"names '{name[:MAX_QUOTED]}', which is none of the 'tools'", "tool_choice")
    if not tools and choice not in ("none", "auto"):
        raise rejected("needs 'tools' to choose from", "tool_choice")
    if _must_call(choice) and not (names if isinstance(choice, str) else _chosen(choice)):
        raise rejected(f"needs a function to choose: a tool of another type {_NOT_HERE}", "tool_choice")


def _must_call(choice: str | NamedChoice | AllowedChoice) -> bool:
    """Whether the answer must be a call."""
    if isinstance(choice, AllowedChoice):
        return choice.allowed_tools.mode == "required"
    return choice not in ("none", "auto")


def _chosen(choice: str | NamedChoice | AllowedChoice) -> list[str]:
    if isinstance(choice, NamedChoice):
        return [choice.function.name]
    if isinstance(choice, AllowedChoice):
        return [tool.function.name for tool in choice.allowed_tools.tools if isinstance(tool, NamedChoice)]
    return []


def resolve_choice(
    tools: Sequence[Tool | OtherTool], choice: str | NamedChoice | AllowedChoice
) -> tuple[Literal["none", "auto", "required", "named"], list[Tool]]:
    """Return the mode of a checked choice, and the callable tools."""
    functions = functions_of(tools)
    if isinstance(choice, str):
        mode: Literal["none", "auto", "required"] = "none" if choice == "none" or not functions else choice  # type: ignore[assignment]
        return mode, functions
    chosen = [tool for tool in functions if tool.function.name in _chosen(choice)]
    if not chosen:
        return "none", functions
    return ("named" if isinstance(choice, NamedChoice) else choice.allowed_tools.mode), chosen
