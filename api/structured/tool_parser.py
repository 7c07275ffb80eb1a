"""Streaming tool call parser: separates content and calls in an answer's text, in time linear in the text's length.

The text follows the plan's grammar but may be cut off anywhere. A call is reported as soon as its name is complete.

    TEXT --trigger--> OPENING --> HEAD --name--> ARGUMENTS --last brace or mark--> TAIL --closing--> TEXT
                                   ^------------------- separator --------------------'
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache

import orjson

from .argument_syntax import ArgumentReader, JsonReader, argument_reader
from .cut_json import completed_object
from .input_reader import InputReader
from .mark_search import MarkSearch
from .tool_formats import NAME, WRITTEN_IDS, CallIds, ToolFormat
from .tool_plan import Arguments, CallStart, Content, Event, ParsedCall, Reading, ToolPlan

_HEAD = re.compile(r'[^{]*\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\S)')
_LONGEST_HEAD = 1_024


def read_calls(plan: ToolPlan, text: str) -> tuple[str, list[ParsedCall]]:
    """Parse a whole answer. Returns its content and its calls."""
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
    calls = [ParsedCall(each.id, each.name, "".join(parts), is_custom=each.is_custom) for each, parts in started]
    if parser.is_inside_call:
        calls[-1] = replace(calls[-1], is_whole=False)
    return "".join(content), calls


def arguments_json(text: str) -> orjson.Fragment:
    """Return a call's arguments for ``orjson.dumps``. If they were cut off, they are completed to valid JSON.

    They stay text, because ``orjson.dumps`` does not write integers beyond 64 bits, and a double would change other
    long numbers.
    """
    candidates = (text, completed_object(text))
    return orjson.Fragment(next((each for each in candidates if _is_json(each)), "{}"))


def _is_json(text: str) -> bool:
    """Return whether a text is JSON. orjson refuses numbers beyond a double's range and halves of surrogate pairs."""
    with suppress(orjson.JSONDecodeError):
        orjson.loads(text)
        return True
    with suppress(ValueError, RecursionError):
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse_constant)
        return True
    return False


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class ToolParser:
    """Parses one answer. White space around calls is dropped.

    Text before and text after a call are joined by a newline.
    """

    def __init__(self, plan: ToolPlan) -> None:
        self._plan, self._form = plan, plan.format
        self._buffer = self._form.recipient_mark if plan.reading is Reading.TRIGGERED else ""
        self._triggers: tuple[str, ...] = (self._form.trigger,)
        # Text that ends a part of an answer, in formats in which each part begins with its recipient.
        self._part_end = (self._form.separator or "").removesuffix(self._form.recipient_mark)
        if self._form.recipient_mark:
            heads = tuple(self._form.recipient_mark + self._form.head(name) for name in plan.arguments)
            self._triggers = (*heads, *(self._part_end + head for head in heads if self._part_end))
        self._trigger_search = MarkSearch(self._triggers)
        self._content_ends = MarkSearch((*self._triggers, self._closing))
        self._events: list[Event] = []
        self._num_calls = 0
        self._ids: set[str] = set()
        self._after_call = False
        self._has_content = False
        self._reader: ArgumentReader = JsonReader()
        # Reader of the input, within a call of a custom tool.
        self._input: InputReader | None = None
        self._state: Callable[[], bool] = self._text
        if plan.reading is Reading.TRIGGERED:
            if self._form.content_opening:
                self._state = self._begin_answer
            elif plan.starts:
                self._state = self._first_text
        elif plan.reading is Reading.JSON:
            self._state = self._head
        elif plan.reading is Reading.ARGUMENTS:
            self._state = self._begin_named

    @property
    def is_inside_call(self) -> bool:
        """Whether the arguments of a call have begun and have not ended."""
        return self._state == self._arguments

    def push(self, text: str) -> list[Event]:
        """Parse more text. Returns the new events."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._pop_events()

    def finish(self) -> list[Event]:
        """Return the events for the text that was held back. Must be called at the end of the answer."""
        if self._state in (self._text, self._rest, self._first_text, self._preamble):
            rest = self._buffer.partition(self._closing)[0] if self._closing else self._buffer
            self._add_content(rest.strip() if self._after_call else rest)
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

    # Each state consumes as much of the buffer as it can. It returns whether the next state can continue at once.

    def _begin_answer(self) -> bool:
        """Determine the first part of an answer with marks: content, text before a call, or a call."""
        form = self._form
        text = self._text if form.recipient_mark else self._rest
        begins: list[tuple[str, Callable[[], bool]]] = [(form.recipient_mark + form.content_opening, text)]
        if form.preamble is not None:
            begins.append((form.preamble[0], self._preamble))
        for mark, state in begins:
            if self._buffer.startswith(mark):
                self._buffer, self._state = self._buffer[len(mark) :], state
                return True
        if self._buffer.startswith(self._triggers):
            self._state = self._opening
        elif not any(mark.startswith(self._buffer) for mark in (*self._triggers, *(mark for mark, _ in begins))):
            self._state = self._rest
        return self._state != self._begin_answer

    def _preamble(self) -> bool:
        end = self._form.preamble[1] if self._form.preamble else ""
        before, found, rest = self._buffer.partition(end)
        if found:
            self._add_content(before)
            self._buffer, self._state = rest, self._begin_answer
            return True
        self._add_certain_content(MarkSearch((end,)))
        return False

    def _first_text(self) -> bool:
        starts = self._plan.starts
        if any(map(self._buffer.startswith, starts)):
            self._state = self._opening
        elif not any(start.startswith(self._buffer) for start in starts):
            self._state = self._rest
        return self._state != self._first_text

    def _text(self) -> bool:
        if self._after_call:
            self._buffer = self._buffer.lstrip()
        found = self._trigger_search.find(self._buffer)
        if found >= 0:
            self._add_content(self._buffer[:found].rstrip())
            self._buffer = self._buffer[found:]
            self._state = self._opening
            return True
        if self._is_closed():
            self._add_content(self._buffer.partition(self._closing)[0])
            self._buffer, self._state = "", self._nothing
            return False
        self._add_certain_content(self._content_ends)
        return False

    @property
    def _closing(self) -> str:
        """The text that ends content, if calls may follow this end."""
        return self._form.content_closing if self._form.closes_content else ""

    def _is_closed(self) -> bool:
        """Return whether the content in the buffer has ended in a way that excludes calls after it."""
        at = self._buffer.find(self._closing) if self._closing else -1
        return at >= 0 and not self._form.trigger.startswith(self._buffer[at:])

    def _add_certain_content(self, marks: MarkSearch) -> None:
        """Emit the text, except for a possible beginning of a mark and the white space before it."""
        kept = marks.num_held(self._buffer)
        certain = self._buffer[: len(self._buffer) - kept].rstrip()
        self._add_content(certain)
        self._buffer = self._buffer[len(certain) :]

    def _rest(self) -> bool:
        closing = self._form.content_closing if self._plan.reading is Reading.TRIGGERED else ""
        text, found, _ = self._buffer.partition(closing) if closing else (self._buffer, "", "")
        if found:
            self._add_content(text)
            self._buffer, self._state = "", self._nothing
            return False
        kept = next((size for size in range(len(closing) - 1, 0, -1) if text.endswith(closing[:size])), 0)
        self._add_content(text[: len(text) - kept])
        self._buffer = text[len(text) - kept :]
        return False

    def _nothing(self) -> bool:
        """Discard all text after the mark that ends the content, because none of it is for the client."""
        self._buffer = ""
        return False

    def _begin_named(self) -> bool:
        self._begin(self._plan.named, None)
        return True

    def _opening(self) -> bool:
        opening = self._form.recipient_mark or self._form.opening
        if self._form.recipient_mark:
            self._buffer = self._buffer.removeprefix(self._part_end)
        if self._buffer.startswith(opening):
            self._buffer = self._buffer[len(opening) :]
            self._state = self._head
        elif not opening.startswith(self._buffer):
            self._state = self._rest
        return self._state != self._opening

    def _head(self) -> bool:
        is_native = self._plan.reading is Reading.TRIGGERED
        match = (_native_head(self._form) if is_native else _HEAD).match(self._buffer)
        if match is None:
            if len(self._buffer) > _LONGEST_HEAD:
                self._state = self._rest
                return True
            return False
        self._buffer = self._buffer[match.end() :]
        self._begin(match["name"], match["id"] if is_native else None)
        return True

    def _begin(self, name: str, written: str | None) -> None:
        """Start a call. ``written`` is the part of the call's id that the model has written."""
        digits = uuid.uuid4().hex
        match self._form.ids:
            case CallIds.SHORT | CallIds.WRITTEN:
                call_id = written or digits[:9]
            case CallIds.NUMBERED:
                call_id = f"functions.{name}:{written or self._num_calls}"
            case CallIds.FREE if written and written not in self._ids:
                call_id = written
            case _:
                call_id = f"call_{digits[:24]}"
        self._ids.add(call_id)
        is_custom = name in self._plan.custom
        self._input = InputReader() if is_custom else None
        self._events.append(CallStart(self._num_calls, call_id, name, is_custom))
        self._num_calls += 1
        self._reader = JsonReader()
        if self._plan.reading is Reading.TRIGGERED and name in self._plan.arguments:
            self._reader = argument_reader(self._form.style, self._plan.types.get(name, {}))
        self._state = self._arguments

    def _arguments(self) -> bool:
        text, used, done = self._reader.read(self._buffer)
        if self._input is not None:
            text = self._input.read(text)
        if text:
            self._events.append(Arguments(self._num_calls - 1, text, self._input is not None))
        self._buffer = self._buffer[used:]
        if done:
            self._after_call = True
            self._state = self._tail
        return done

    def _tail(self) -> bool:
        if self._plan.reading is Reading.TRIGGERED:
            return self._tail_in_text()
        at = self._buffer.find("{")
        self._buffer = "" if at < 0 else self._buffer[at:]
        if at >= 0:
            self._state = self._head
        return at >= 0

    def _tail_in_text(self) -> bool:
        """Consume the end of a call, and the format's closing or separator."""
        form = self._form
        closing = form.after_arguments + form.closing
        separator = form.after_arguments + (form.separator or "")
        # Without a closing, another call is recognized by its beginning.
        is_listed = form.separator is not None and not form.closing and not form.recipient_mark
        another = separator + (form.id_lead or form.before_name) if is_listed else ""
        if another and self._buffer.startswith(another):
            self._buffer = self._buffer[len(separator) :]
            self._state = self._head
        elif another and another.startswith(self._buffer):
            return False
        elif self._buffer.startswith(closing):
            self._buffer = self._buffer[len(closing) :]
            is_over = form.only_at_start or (form.content_opening and not form.recipient_mark)
            self._state = self._nothing if self._closing else self._rest if is_over else self._text
        elif closing.startswith(self._buffer):
            return False
        elif form.separator is not None and self._buffer.startswith(separator):
            self._buffer = self._buffer[len(separator) :]
            self._state = self._head
        elif form.separator is None or not separator.startswith(self._buffer):
            self._state = self._text
        return self._state != self._tail


@cache
def _native_head(form: ToolFormat) -> re.Pattern[str]:
    lead, before, between, after = map(re.escape, (form.id_lead, form.before_name, form.id_begin, form.after_name))
    after = after.replace(re.escape(NAME), "(?P=name)")
    written, name = f"(?P<id>{WRITTEN_IDS.get(form.ids, '')})", r"(?P<name>[\w.-]+)(?=[^\w.-])"
    head = f"{lead}{written}{before}{name}{after}" if form.id_lead else f"{before}{name}{between}{written}{after}"
    return re.compile(head, re.ASCII)
