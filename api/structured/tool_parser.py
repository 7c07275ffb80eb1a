"""Streaming tool call parser: content and calls from an answer's text, in time linear in its length.

The text follows the plan's grammar but may be cut off anywhere. A call is reported as soon as its name is complete.

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
    """How to parse an answer."""

    ARGUMENTS = auto()
    """The answer is the arguments of one call."""
    JSON = auto()
    """The answer is a call or an array of calls."""
    TRIGGERED = auto()
    """Calls inside free text, in the model's format."""


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """How to parse tool calls out of an answer, made together with the answer's grammar.

    Attributes:
        arguments: grammar of each function's arguments, by function name.
        prefill: start of the answer, appended to the prompt.
        named: the function of ``Reading.ARGUMENTS``.
        schema_fields: (JSON Pointer into the grammar, request field whose schema is embedded at that pointer).
    """

    format: ToolFormat
    reading: Reading
    arguments: Mapping[str, GrammarSpec]
    prefill: str = ""
    named: str = ""
    schema_fields: tuple[tuple[str, str], ...] = ()

    def locate(self, pointer: str) -> tuple[str, str]:
        """Map a pointer into the grammar to (request field, pointer from the root of that field's schema)."""
        for root, field in self.schema_fields:
            if pointer == root or pointer.startswith(f"{root}/"):
                return field, pointer[len(root) :]
        return "tools", pointer


@dataclass(frozen=True, slots=True)
class Content:
    """Text outside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of call number ``index`` of the answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Content | CallStart | Arguments


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete call. ``arguments`` is JSON text, incomplete if the answer was cut off within it."""

    id: str
    name: str
    arguments: str


def read_calls(plan: ToolPlan, text: str) -> tuple[str, list[ParsedCall]]:
    """Parse a whole answer into its content and its calls."""
    parser = ToolParser(plan)
    content: list[str] = []
    started: list[tuple[CallStart, list[str]]] = []
    for event in (*parser.push(text), *parser.finish()):
        match event:
            case Content():
                content.append(event.text)
            case CallStart():
                started.append((event, []))
            case Arguments():
                started[event.index][1].append(event.text)
    return "".join(content), [ParsedCall(start.id, start.name, "".join(parts)) for start, parts in started]


class ToolParser:
    """Parses one answer. White space around calls is dropped; text before and after a call is joined by a newline."""

    def __init__(self, plan: ToolPlan) -> None:
        self._plan = plan
        self._buffer = ""
        self._events: list[Event] = []
        self._num_calls = 0
        self._after_call = False
        self._has_content = False
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._state: Callable[[], bool] = self._text
        if plan.reading is Reading.JSON:
            self._state = self._head
        elif plan.reading is Reading.ARGUMENTS:
            self._state = self._begin_named

    def push(self, text: str) -> list[Event]:
        """Parse more text and return the new events."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._pop_events()

    def finish(self) -> list[Event]:
        """Return the events for text held back until the end of the answer."""
        if self._state in (self._text, self._rest):
            self._add_content(self._buffer.strip() if self._after_call else self._buffer)
        self._buffer = ""
        return self._pop_events()

    def _pop_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _add_content(self, text: str) -> None:
        if text:
            resumed = self._after_call and self._has_content
            self._events.append(Content("\n" + text if resumed else text))
            self._after_call, self._has_content = False, True

    # Each state consumes what it can of the buffer and returns whether the next state can continue.

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
            self._add_content(before.rstrip())
            self._buffer = self._buffer[len(before) :]
            self._state = self._head
            return True
        self._add_certain_content(trigger)
        return False

    def _add_certain_content(self, trigger: str) -> None:
        """Emit the text except a possible prefix of a trigger and the white space before it."""
        kept = next((size for size in range(len(trigger) - 1, 0, -1) if self._buffer.endswith(trigger[:size])), 0)
        certain = self._buffer[: len(self._buffer) - kept].rstrip()
        self._add_content(certain)
        self._buffer = self._buffer[len(certain) :]

    def _rest(self) -> bool:
        self._add_content(self._buffer)
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
        digits = uuid.uuid4().hex
        call_id = digits[:9] if self._plan.format.short_ids else f"call_{digits[:24]}"
        self._events.append(CallStart(self._num_calls, call_id, name))
        self._num_calls += 1
        self._state = self._arguments

    def _arguments(self) -> bool:
        end = self._end_of_arguments()
        text = self._buffer if end is None else self._buffer[:end]
        self._events.append(Arguments(self._num_calls - 1, text))
        self._buffer = self._buffer[len(text) :]
        if end is not None:
            self._after_call = True
            self._state = self._tail
        return end is not None

    def _end_of_arguments(self) -> int | None:
        """Return the index after the arguments' last brace, None if it is not in the buffer yet."""
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
        """Consume the closing brace of the call and the format's closing or separator."""
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
