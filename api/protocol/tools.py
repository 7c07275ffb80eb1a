"""Tools: the request fields ``tools`` and ``tool_choice``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from ...grammar.annotations import without_nulls
from .base import Id, Refusal, StrictModel, rejected
from .cache_control import CacheControl
from .foreign_fields import foreign_rules

MAX_TOOLS = 256
MAX_QUOTED = 128
# Largest number of characters of a custom tool's grammar; the same limit applies to all grammars.
MAX_DEFINITION = 64 << 10
CUSTOM_INPUT = "input"
_NOT_HERE = "cannot be called here"
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise rejected("must be 1 to 128 letters, digits, '_', '-' and '.'")
    return name


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise rejected("must have the type 'object', because arguments are an object", "type")
    try:
        return cast(dict[str, Any], without_nulls(schema))
    except RecursionError:
        return schema  # The grammar compiler refuses this schema, because it is nested too deeply.


class OtherTool(BaseModel):
    """A tool that cannot be called here, for example one of another type than ``function``.

    It is left out, and a response header names it. It is not refused, because a model need not call a tool: a client
    must accept an answer without a call anyway.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    type: Id
    name: Id | None = None
    cache_control: CacheControl | None = None


def by_tool_type(served: str, second: str = "") -> Discriminator:
    """Return a discriminator of tools. Its tag is ``<served>`` for the type ``served`` or no type, else ``<other>``.

    Args:
        second: another type, whose tag is ``<second>``.
    """

    def form(value: Any) -> str:
        kind = value.get("type", served) if isinstance(value, dict) else getattr(value, "type", served)
        if second and kind == second:
            return "<second>"
        return "<other>" if isinstance(kind, str) and kind != served else "<served>"

    return Discriminator(form)


class FunctionName(StrictModel):
    """Name of the chosen function."""

    name: Id


class Function(StrictModel):
    """A function tool. ``parameters`` is enforced even if ``strict`` is not set."""

    name: Annotated[str, AfterValidator(_check_name)]
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(_check_parameters)] | None = None
    strict: bool = False


class Tool(StrictModel):
    """A function tool in the form of chat requests."""

    refused: ClassVar[Mapping[str, Refusal]] = foreign_rules("tool").refused

    type: Literal["function"]
    function: Function
    cache_control: CacheControl | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool for the chat template.

        Missing descriptions and parameters are added, which many templates need.
        """
        function = {
            "name": self.function.name,
            "description": self.function.description or "",
            "parameters": self.function.parameters or {"type": "object", "properties": {}},
        }
        return {"type": "function", "function": function}


Definition = Annotated[str, Field(min_length=1, max_length=MAX_DEFINITION)]


class ToolGrammar(StrictModel):
    """The grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: Definition

    @model_validator(mode="after")
    def _check_groups(self) -> ToolGrammar:
        check_groups(self.syntax, self.definition)
        return self


# Matches the elements of a regular expression in JavaScript's syntax that matter for its groups.
_REGEX_PART = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|[()]", re.DOTALL)


def check_groups(syntax: str | None, definition: str | None) -> None:
    """Check that a regular expression closes exactly the groups that it opens, because it is embedded in another one.

    Raises:
        PydanticCustomError: the groups are not balanced.
    """
    depth = 0
    for part in _REGEX_PART.findall(definition or "") if syntax == "regex" else ():
        depth += (part == "(") - (part == ")")
        if depth < 0:
            break
    if depth:
        raise rejected("has a group that is not closed, or closes one that was not opened", "definition")


class InputFormat(StrictModel):
    """Format of a custom tool's input: free text, or text that a grammar describes."""

    type: Literal["text", "grammar"]
    grammar: ToolGrammar | None = None

    @model_validator(mode="after")
    def _check_type(self) -> InputFormat:
        if self.type == "grammar" and self.grammar is None:
            raise rejected("is required where 'type' is 'grammar'", "grammar")
        if self.type == "text" and self.grammar is not None:
            raise rejected("is only allowed with the type 'grammar', not with 'text'", "grammar")
        return self


class Custom(StrictModel):
    """The definition of a custom tool, whose input is one text."""

    name: Annotated[Id, AfterValidator(_check_name)]
    description: str | None = None
    format: InputFormat = InputFormat(type="text")


class TextTool(StrictModel):
    """A custom tool, whose input is a text.

    The model calls it as a function with one string argument, ``CUSTOM_INPUT``.
    """

    type: Literal["custom"]
    custom: Custom
    cache_control: CacheControl | None = None

    @property
    def lark(self) -> str | None:
        """The Lark grammar of the tool's input; None if it has none."""
        grammar = self.custom.format.grammar
        return grammar.definition if grammar is not None and grammar.syntax == "lark" else None

    @property
    def function(self) -> Function:
        """The function that represents the tool for the model.

        Its schema does not include a Lark grammar (see ``lark``).
        """
        grammar, text = self.custom.format.grammar, dict[str, Any](type="string")
        about = self.custom.description or ""
        if grammar is not None and grammar.syntax == "regex":
            text["pattern"] = f"^(?:{grammar.definition})$"
        if grammar is not None:
            about += f"\n\nThe input has this form ({grammar.syntax}):\n{grammar.definition}"
        schema = {
            "type": "object",
            "properties": {CUSTOM_INPUT: text},
            "required": [CUSTOM_INPUT],
            "additionalProperties": False,
        }
        return Function(name=self.custom.name, description=about.strip(), parameters=schema)

    def for_template(self) -> dict[str, Any]:
        """Return the tool for the chat template."""
        function = self.function
        schema = {
            "type": "object",
            "properties": {CUSTOM_INPUT: {"type": "string", "description": "The whole input, as text."}},
            "required": [CUSTOM_INPUT],
        }
        described = {"name": function.name, "description": function.description, "parameters": schema}
        return {"type": "function", "function": described}


CallableTool = Tool | TextTool
AnyTool = Annotated[
    Annotated[Tool, Tag("<served>")] | Annotated[TextTool, Tag("<second>")] | Annotated[OtherTool, Tag("<other>")],
    by_tool_type("function", "custom"),
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)]


def functions_of(tools: Sequence[CallableTool | OtherTool]) -> list[CallableTool]:
    """Return the tools that can be called here."""
    return [tool for tool in tools if isinstance(tool, CallableTool)]


def tools_left_out(tools: Sequence[Any]) -> list[str]:
    """Return the places and types of the tools that cannot be called, so that the client is told about them."""
    return [f"tools[{index}] {tool.type}" for index, tool in enumerate(tools) if isinstance(tool, OtherTool)]


class NamedChoice(StrictModel):
    """A choice that forces a call of one function."""

    type: Literal["function"]
    function: FunctionName


class CustomChoice(StrictModel):
    """A choice that forces a call of one custom tool."""

    type: Literal["custom"]
    custom: FunctionName

    @property
    def function(self) -> FunctionName:
        """The name of the chosen tool."""
        return self.custom


class OtherChoice(BaseModel):
    """An allowed tool that cannot be called here. The model chooses among the other allowed tools."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Id


AnyChoice = Annotated[
    Annotated[NamedChoice, Tag("<served>")]
    | Annotated[CustomChoice, Tag("<second>")]
    | Annotated[OtherChoice, Tag("<other>")],
    by_tool_type("function", "custom"),
]


class AllowedTools(StrictModel):
    """The tools that ``allowed_tools`` allows."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(StrictModel):
    """OpenAI's ``allowed_tools``: the prompt lists all tools, but only some may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice_form(value: Any) -> str | None:
    if isinstance(value, str):
        return "<word>"
    if not isinstance(value, dict):
        return None
    return {"allowed_tools": "<allowed>", "custom": "<custom>"}.get(str(value.get("type")), "<named>")


BY_CHOICE_FORM = Discriminator(
    _choice_form,
    custom_error_type="rejected",
    custom_error_message="must be 'none', 'auto', 'required' or an object that names a function",
)
"""Discriminator of ``tool_choice``, whose objects have different forms in chats and in responses."""

ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")]
    | Annotated[NamedChoice, Tag("<named>")]
    | Annotated[CustomChoice, Tag("<custom>")]
    | Annotated[AllowedChoice, Tag("<allowed>")],
    BY_CHOICE_FORM,
]


Chosen = str | NamedChoice | CustomChoice | AllowedChoice
"""A parsed ``tool_choice``."""


def check_tools(tools: Sequence[CallableTool | OtherTool], choice: Chosen) -> None:
    """Refuse repeated names, and a choice of tools that are not listed or cannot be called."""
    names: set[str] = set()
    others = {tool.name: tool.type for tool in tools if isinstance(tool, OtherTool) and tool.name is not None}
    for index, tool in enumerate(tools):
        if not isinstance(tool, CallableTool):
            continue
        name = tool.custom.name if isinstance(tool, TextTool) else tool.function.name
        if name in names:
            raise rejected(f"repeats the name '{name}'", "tools", index, tool.type, "name")
        names.add(name)
    for name in _chosen(choice):
        if name not in names and name in others:
            kind = others[name][:MAX_QUOTED]
            raise rejected(
                f"names '{name[:MAX_QUOTED]}', a tool of the type '{kind}', which {_NOT_HERE}", "tool_choice"
            )
        if tools and name not in names:
            raise rejected(f"names '{name[:MAX_QUOTED]}', which is not in 'tools'", "tool_choice")
    if not tools and choice not in ("none", "auto"):
        raise rejected("needs 'tools' to choose from", "tool_choice")
    if _must_call(choice) and not (names if isinstance(choice, str) else _chosen(choice)):
        raise rejected(f"needs a function to choose: a tool of another type {_NOT_HERE}", "tool_choice")


def _must_call(choice: Chosen) -> bool:
    """Return whether the answer must be a call."""
    if isinstance(choice, AllowedChoice):
        return choice.allowed_tools.mode == "required"
    return choice not in ("none", "auto")


def _chosen(choice: Chosen) -> list[str]:
    if isinstance(choice, NamedChoice | CustomChoice):
        return [choice.function.name]
    if isinstance(choice, AllowedChoice):
        return [tool.function.name for tool in choice.allowed_tools.tools if not isinstance(tool, OtherChoice)]
    return []


def resolve_choice(
    tools: Sequence[CallableTool | OtherTool], choice: Chosen
) -> tuple[Literal["none", "auto", "required", "named"], list[CallableTool]]:
    """Return the mode of a checked choice, and the tools that may be called."""
    functions = functions_of(tools)
    if isinstance(choice, str):
        mode: Literal["none", "auto", "required"] = "none" if choice == "none" or not functions else choice  # type: ignore[assignment]
        return mode, functions
    chosen = [tool for tool in functions if tool.function.name in _chosen(choice)]
    if not chosen:
        return "none", functions
    return (choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else "named"), chosen
