"""Tool calls out of an answer's text as it comes, in time linear in its length.

The text follows the plan's grammar, but may be cut off anywhere. A call is told of once its name is there.

    TEXT --trigger--> HEAD --name, key--> ARGUMENTS --last brace--> TAIL --closing--> TEXT
                       ^------------------- separator -----------------'
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from ...grammar.spec import GrammarSpec
from .tool_formats import ToolFormat

_HEAD = re.compile(r'[^{]*\{\s*"name"\s*:\s*"([^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')
_LONGEST_HEAD = 1_024
_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


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
        schema_fields: JSON Pointers into the grammar, each with the field of the request whose schema stands there.
    """

    format: ToolFormat
    reading: Reading
    arguments: Mapping[str, GrammarSpec]
    prefill: str = ""
    named: str = ""
    schema_fields: tuple[tuple[str, str], ...] = ()

    def locate(self, pointer: str) -> tuple[str, str]:
        """The field in whose schema a place of the grammar stands, and the pointer from that schema's root."""
        for place, name in self.schema_fields:
            if pointer == place or pointer.startswith(f"{place}/"):
                return name, pointer[len(place) :]
        return "tools", pointer


@dataclass(frozen=True, slots=True)
class Content:
    """Text beside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins.

    Attributes:
        index: its place among the answer's calls.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Content | CallStart | Arguments


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A whole call: its arguments are JSON text, unless the answer was cut off within them."""

    id: str
    name: str
    arguments: str


def read_calls(plan: ToolPlan, text: str) -> tuple[str, list[ParsedCall]]:
    """The content and the calls of a whole answer."""
    parser = ToolParser(plan)
    said: list[str] = []
    begun: list[tuple[CallStart, list[str]]] = []
    for event in (*parser.push(text), *parser.finish()):
        match event:
            case Content():
                said.append(event.text)
            case CallStart():
                begun.append((event, []))
            case Arguments():
                begun[event.index][1].append(event.text)
    return "".join(said), [ParsedCall(start.id, start.name, "".join(parts)) for start, parts in begun]


class ToolParser:
    """Reads one answer. White space beside calls is not content; texts before and after a call are lines apart."""

    def __init__(self, plan: ToolPlan) -> None:
        self._plan = plan
        self._buffer = ""
        self._events: list[Event] = []
        self._num_calls = 0
        self._after_call = False
        self._has_spoken = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._state: Callable[[], bool] = self._text
        if plan.reading is Reading.JSON:
            self._state = self._head
        elif plan.reading is Reading.ARGUMENTS:
            self._state = self._begin_named

    def push(self, text: str) -> list[Event]:
        """What some more text brings."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._taken()

    def finish(self) -> list[Event]:
        """What was held back until the end."""
        if self._state in (self._text, self._rest):
            self._say(self._buffer.strip() if self._after_call else self._buffer)
        self._buffer = ""
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _say(self, text: str) -> None:
        if text:
            resumed = self._after_call and self._has_spoken
            self._events.append(Content("\n" + text if resumed else text))
            self._after_call, self._has_spoken = False, True

    # Each state takes what it can from the buffer, and returns whether to go on with what is left.

    def _text(self) -> bool:
        trigger = self._plan.format.trigger
        if self._plan.format.only_at_start:
            if self._buffer.startswith(trigger):
                self._state = self._head
            elif not trigger.startswith(self._buffer):
                self._state = self._rest
            return self._state != self._text
        if self._after_call:
            self._buffer = self._buffer.lstrip()
        before, found, _ = self._buffer.partition(trigger)
        if found:
            self._say(before.rstrip())
            self._buffer = self._buffer[len(before) :]
            self._state = self._head
            return True
        self._say_most(trigger)
        return False

    def _say_most(self, trigger: str) -> None:
        """Say the text but for what may belong to a trigger, and the white space before that."""
        kept = next((size for size in range(len(trigger) - 1, 0, -1) if self._buffer.endswith(trigger[:size])), 0)
        certain = self._buffer[: len(self._buffer) - kept].rstrip()
        self._say(certain)
        self._buffer = self._buffer[len(certain) :]

    def _rest(self) -> bool:
        self._say(self._buffer)
        self._buffer = ""
        return False

    def _begin_named(self) -> bool:
        self._begin(self._plan.named)
        return True

    def _head(self) -> bool:
        match = _HEAD.match(self._buffer)
        if match is None:
            if len(self._buffer) > _LONGEST_HEAD:
                self._state = self._rest
                return True
            return False
        self._buffer = self._buffer[match.end() :]
        self._begin(match[1])
        return True

    def _begin(self, name: str) -> None:
        short = uuid.uuid4().hex
        identity = short[:9] if self._plan.format.short_ids else f"call_{short[:24]}"
        self._events.append(CallStart(self._num_calls, identity, name))
        self._num_calls += 1
        self._state = self._arguments

    def _arguments(self) -> bool:
        end = self._end_of_arguments()
        taken = self._buffer if end is None else self._buffer[:end]
        self._events.append(Arguments(self._num_calls - 1, taken))
        self._buffer = self._buffer[len(taken) :]
        if end is not None:
            self._after_call = True
            self._state = self._tail
        return end is not None

    def _end_of_arguments(self) -> int | None:
        """Where the value in the buffer ends; None if it goes on beyond."""
        at = int(self._escaped)
        self._escaped = False
        while (match := (_INSIDE if self._in_string else _OUTSIDE).search(self._buffer, at)) is not None:
            at = match.end()
            if match[0] == "\\":
                self._escaped = at == len(self._buffer)
                at += 1
            elif match[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth == 0:
                    return at
        return None

    def _tail(self) -> bool:
        if self._plan.reading is Reading.TRIGGERED:
            return self._tail_in_text()
        at = self._buffer.find("{")
        self._buffer = "" if at < 0 else self._buffer[at:]
        if at >= 0:
            self._state = self._head
        return at >= 0

    def _tail_in_text(self) -> bool:
        """After the arguments: the brace of the call, and what the format writes after it."""
        form = self._plan.format
        closing = "}" + form.closing
        separator = None if form.separator is None else "}" + form.separator
        if separator is not None and self._buffer.startswith(separator):
            self._buffer = self._buffer[len(separator) :]
            self._state = self._head
        elif self._buffer.startswith(closing):
            self._buffer = self._buffer[len(closing) :]
            self._state = self._rest if form.only_at_start else self._text
        elif not any(text and text.startswith(self._buffer) for text in (closing, separator)):
            self._state = self._text
        return self._state != self._tail
