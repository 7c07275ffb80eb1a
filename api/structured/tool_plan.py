"""Tool plan: rules for parsing tool calls out of an answer, and the events that the parser emits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

from ...engine.errors import GrammarRefused
from ...grammar.errors import GrammarError
from ...grammar.spec import GrammarSpec
from .tool_formats import ToolFormat


class Reading(Enum):
    """The way in which an answer is parsed."""

    ARGUMENTS = auto()
    """The answer consists of the arguments of one call."""
    JSON = auto()
    """The answer is one call or an array of calls, as JSON."""
    TRIGGERED = auto()
    """The answer is free text, with calls in the model's format."""


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """Rules for parsing tool calls out of an answer. They are built together with the answer's grammar.

    Attributes:
        arguments: grammar of each function's arguments, by function name.
        types: for each function, the types that each parameter may have; needed for styles in which strings have no
            quotes.
        prefill: start of the answer, appended to the prompt.
        named: the function of ``Reading.ARGUMENTS``.
        schema_fields: pairs of a JSON Pointer into the grammar and the request field whose schema is embedded there.
        custom: names of the functions that represent custom tools; their only argument is a text.
        starts: texts with which free text may not begin, in formats in which calls can only begin the answer.
    """

    format: ToolFormat
    reading: Reading
    arguments: Mapping[str, GrammarSpec]
    types: Mapping[str, Mapping[str, frozenset[str]]] = field(default_factory=dict, kw_only=True)
    custom: frozenset[str] = field(default=frozenset(), kw_only=True)
    prefill: str = ""
    named: str = ""
    schema_fields: tuple[tuple[str, str], ...] = ()
    starts: tuple[str, ...] = ()

    def locate(self, error: GrammarError | GrammarRefused) -> GrammarRefused:
        """Return an error of the grammar with the request's field, and with the keyword and pointer in the field's
        schema.

        An error outside of the request's schemas is attributed to all tools together, because clients do not know the
        grammar around the schemas.
        """
        for root, name in self.schema_fields:
            if error.pointer == root or error.pointer.startswith(f"{root}/"):
                return GrammarRefused(error.keyword, error.pointer[len(root) :], error.reason, param=name)
        return GrammarRefused("tools", "", error.reason, param="tools")


@dataclass(frozen=True, slots=True)
class Content:
    """Text outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of the answer's call number ``index``."""

    index: int
    id: str
    name: str
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of a call's arguments, or of the input of a custom tool."""

    index: int
    text: str
    is_custom: bool = False


Event = Content | CallStart | Arguments


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A call. ``arguments`` is JSON text, or the input of a custom tool.

    It is incomplete if the answer was cut off in it.
    """

    id: str
    name: str
    arguments: str
    is_whole: bool = True
    is_custom: bool = False
