"""How tool calls are read out of an answer again: the plan that the grammar of the answer was made with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from ...grammar.spec import GrammarSpec
from .tool_formats import ToolFormat


class Reading(Enum):
    """Where calls stand in an answer."""

    ARGUMENTS = auto()
    """The answer is the arguments of one call."""
    JSON = auto()
    """The answer is a call or an array of calls."""
    TRIGGERED = auto()
    """Calls stand in free text, in the model's format."""


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How calls are read out of an answer, and what they hold.

    Attributes:
        arguments: the grammar of each function's arguments, by its name.
        prefill: what goes before the answer, at the end of the prompt.
        named: the function of ``Reading.ARGUMENTS``.
        places: JSON Pointers into the grammar, each with the field of the request whose schema stands there.
    """

    format: ToolFormat
    reading: Reading
    arguments: Mapping[str, GrammarSpec]
    prefill: str = ""
    named: str = ""
    places: tuple[tuple[str, str], ...] = ()

    def locate(self, pointer: str) -> tuple[str, str]:
        """The field in whose schema a place of the grammar stands, and the pointer from that schema's root."""
        for place, name in self.places:
            if pointer == place or pointer.startswith(f"{place}/"):
                return name, pointer[len(place) :]
        return "tools", pointer
