"""Tool probe: derives the tool call format of a chat template from the text that the template renders for a few calls.

A template renders one call, two calls, and a plain answer. The text that the two calls have in common is the form of a
call. The texts before the first call, between the calls and after the last call are the opening, the separator and the
closing. The text that also ends the plain answer is the end of the turn. A format is kept only if the parser reads the
rendered calls back.

    TURN | OPENING BEFORE_NAME f AFTER_NAME ARGUMENTS AFTER_ARGUMENTS SEPARATOR BEFORE_NAME g ... CLOSING | END OF TURN
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...engine.text.template_marks import MARK, num_shared, shared_beginning, shared_end
from ...grammar.argument_styles import PYTHON, XmlStyle
from ...grammar.spec import GrammarSpec
from .tool_formats import CallIds, ToolFormat
from .tool_parser import read_calls
from .tool_plan import Reading, ToolPlan

Message = dict[str, Any]
Render = Callable[[Sequence[Message], Sequence[Message], bool], str]
"""Renders messages and tools, with or without the header of the answer. Returns "" if the template refuses them."""

_NAMES = ("probe_tool", "probe_other")
_ARGUMENTS: dict[str, Any] = {"count": 17, "flag": True, "word": "two words"}
_PROPERTIES = {name: {"type": kind} for name, kind in (("count", "integer"), ("flag", "boolean"), ("word", "string"))}
_TYPES = {"count": frozenset({"number"}), "flag": frozenset({"boolean"}), "word": frozenset({"string"})}
_IDS = ("probe0000", "probe0001")
_ID = "\x01"  # Represents an id while texts are compared.
_ANSWER = "Probe of an answer."
_QUESTION: Message = {"role": "user", "content": "Probe of a question."}
# Some templates write the id after the arguments of a call; models do not write it there.
_EXTRA_ID = re.compile(rf',\s*"\w+":\s*"{_ID}"(?=\s*\}})')
# Matches a mark that is rare in plain text. The text that opens calls must not be the beginning of usual words, of a
# code block or of JSON.
_TRIGGER = re.compile(r"(?!```)[^\w\s\"'{}\[\](),.:;!?-]|\[[A-Z_]{3,}\]")
_KEYWORDS = re.compile(r"""\(count=17, flag=True, word=(?:"two words"|'two words')\)""")


@dataclass(frozen=True, slots=True)
class ProbedCalls:
    """The call format that a probe has derived from a template.

    Attributes:
        format: format of the template's calls.
        arguments_as_text: whether the template accepts the arguments of calls as JSON text, not as objects.
    """

    format: ToolFormat
    arguments_as_text: bool


def probed_calls(render: Render, *, thought_end: str, ends: frozenset[str]) -> ProbedCalls | None:
    """Derive the tool call format from a template. Returns None if the rendered text shows no complete format.

    Args:
        thought_end: mark after the reasoning, which may precede a call; "" for a model without reasoning.
        ends: texts of the tokens that end an answer. They do not belong to a call.
    """
    for as_text in (False, True):
        probe = _Probe(render, thought_end, ends, as_text=as_text)
        form = probe.format()
        if form is not None and probe.reads_back(form):
            return ProbedCalls(form, as_text)
    return None


class _Probe:
    """Renders turns with tool calls. Arguments are passed to the template as text or as objects."""

    def __init__(self, render: Render, thought_end: str, ends: frozenset[str], *, as_text: bool) -> None:
        self._render, self._as_text = render, as_text
        self._tools = [_tool(name) for name in _NAMES]
        self._ends = ends
        self._thought_end = thought_end
        self._bare = render([_QUESTION], self._tools, False)
        self._header = render([_QUESTION], self._tools, True)
        answer = render([_QUESTION, {"role": "assistant", "content": _ANSWER}], self._tools, False)
        before = answer.partition(_ANSWER)[0]
        if self._header == self._bare and _ANSWER in answer and before.startswith(self._bare):
            # The template does not render a header for the next answer. The header is then the text before an answer.
            # A template that always renders one, as Command R7B's does, renders another one before an earlier answer.
            self._header = before
        self._content_opening, self._content_closing = self._around_answer(answer)
        self._answer_end = answer.partition(_ANSWER)[2]
        self.one = self._turn(_ARGUMENTS)
        self.two = self._turn(_ARGUMENTS, {})
        self.full = self._turn(_ARGUMENTS, _ARGUMENTS)

    def _turn(self, *arguments: dict[str, Any]) -> str:
        """Render the turn with a call of another function for each of ``arguments``, up to the turn's end."""
        calls = [
            {
                "id": _IDS[number],
                "type": "function",
                "function": {"name": _NAMES[number], "arguments": json.dumps(each) if self._as_text else each},
            }
            for number, each in enumerate(arguments)
        ]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        text = self._render([_QUESTION, message], self._tools, False)
        for each in _IDS:
            text = text.replace(each, _ID)
        text = self._behind_header(_EXTRA_ID.sub("", text))
        if self._thought_end and self._thought_end in text.partition(_NAMES[0])[0]:
            text = text[text.rindex(self._thought_end, 0, text.index(_NAMES[0])) + len(self._thought_end) :]
        return self._without_end(text.lstrip())

    def _behind_header(self, text: str) -> str:
        return text[len(self._header) if text.startswith(self._header) else shared_beginning(text, self._header) :]

    def _without_end(self, text: str) -> str:
        """Return a turn without the text that ends every turn, and without the texts of end tokens."""
        text = text.rstrip()
        text = text[: shared_end(text, self._answer_end.rstrip())].rstrip()
        while (end := next((end for end in self._ends if end and text.endswith(end)), None)) is not None:
            text = text.removesuffix(end).rstrip()
        return text

    def _around_answer(self, answer: str) -> tuple[str, str]:
        """Return the marks before and after a plain answer. The text before the next header is the end of the turn."""
        before, found, after = answer.partition(_ANSWER)
        if not found:
            return "", ""
        opening = self._behind_header(before).strip()
        if self._thought_end and self._thought_end in opening:
            opening = opening.rpartition(self._thought_end)[2].strip()
        if not opening or not MARK.match(opening):
            return "", ""
        closing = MARK.match(after.lstrip())
        has_own = closing is not None and closing[0] not in self._ends and len(MARK.findall(after)) > 1
        return opening, closing[0] if closing is not None and has_own else ""

    def format(self) -> ToolFormat | None:
        """Return the format; None if the turns do not show a format."""
        if self.one.count(_NAMES[0]) != 1:
            return None
        head, _, tail = self.one.partition(_NAMES[0])
        written = _arguments_in(tail)
        if written is None:
            return None
        after_name, style, after = written
        form = ToolFormat("probed", "", "", after_name=after_name, style=style, models="")
        if self.full.count(_NAMES[1]) != 1:
            call = _Split(head, after, head, single=True)
        else:
            between = self.full.partition(_NAMES[0])[2].partition(_NAMES[1])[0]
            arguments = _arguments_in(between)
            if arguments is None:
                return None
            call = _Split(head, after, arguments[2])
        found = call.fill(form)
        if found is None:
            return None
        found = replace(found, content_opening=self._content_opening, content_closing=self._content_closing)
        opens_as_text = bool(found.content_opening) and found.opening.startswith(found.content_opening)
        return None if opens_as_text or not _TRIGGER.match(found.trigger) else found

    def reads_back(self, form: ToolFormat) -> bool:
        """Return whether the parser reads the same calls from the turns that the template has rendered."""
        turns = [(self.one, [_ARGUMENTS])]
        if not form.single:
            turns += [(self.two, [_ARGUMENTS, {}]), (self.full, [_ARGUMENTS, _ARGUMENTS])]
        schema = GrammarSpec.json_schema({"type": "object", "properties": _PROPERTIES})
        plan = ToolPlan(form, Reading.TRIGGERED, dict.fromkeys(_NAMES, schema), types=dict.fromkeys(_NAMES, _TYPES))
        for turn, expected in turns:
            content, calls = read_calls(plan, turn.replace(_ID, "7"))
            names = [call.name for call in calls]
            if content or names != list(_NAMES[: len(expected)]) or not all(call.is_whole for call in calls):
                return False
            if [json.loads(call.arguments) for call in calls] != expected:
                return False
        return True


class _Split:
    """Splits the text around calls into the parts of a format.

    Args:
        head: text before the first name.
        tail: text after the last arguments.
        middle: text between the first arguments and the second name.
        single: whether the template renders only one call even if there are several.
    """

    def __init__(self, head: str, tail: str, middle: str, *, single: bool = False) -> None:
        self._head, self._tail, self._middle, self._single = head, tail, middle, single

    def fill(self, form: ToolFormat) -> ToolFormat | None:
        """Return ``form`` with the parts filled in; None if the two calls have nothing in common."""
        if self._single:
            return _with_ids(self._alone(form, ""))
        if self._middle.startswith(self._tail) and self._middle.endswith(self._head):
            between = self._middle[len(self._tail) : len(self._middle) - len(self._head)]
            if len(self._head) + len(self._tail) > len(self._middle):
                return None
            return _with_ids(self._alone(form, between))
        return _with_ids(self._together(form))

    def _alone(self, form: ToolFormat, between: str) -> ToolFormat:
        """Return the format in which each call has its own opening and closing."""
        # If a call is an object, it begins with the last brace before the name, and ends with the first brace after it.
        cut = max(0, self._head.rfind("{"))
        closing_at = self._tail.find("}") + 1 if "{" in self._head else len(self._tail)
        opening = self._head[:cut]
        return replace(
            form, trigger=_trigger(self._head), opening=opening, before_name=self._head[cut:], between=between,
            after_arguments=self._tail[:closing_at], closing=self._tail[closing_at:], single=self._single,
        )  # fmt: skip

    def _together(self, form: ToolFormat) -> ToolFormat | None:
        """Return the format in which all calls are between one opening and one closing."""
        after = self._tail[: shared_beginning(self._tail, self._middle)]
        # The brace that ends the object is kept, without the white space after it.
        if "{" in self._head:
            after = after.rstrip()
        rest = self._middle[len(after) :]
        head = self._numbered(rest)
        if head is None:
            before = self._head[shared_end(self._head, rest) :].lstrip()
            ids = CallIds.ANY
        else:
            self._head, rest, before = head
            ids = CallIds.COUNTED
        if not before or not rest.endswith(before):
            return None
        opening = self._head[: len(self._head) - len(before)]
        return replace(
            form, trigger=_trigger(opening), opening=opening, before_name=before, after_arguments=after, ids=ids,
            separator=rest[: len(rest) - len(before)], closing=self._tail[len(after) :],
        ) if opening else None  # fmt: skip

    def _numbered(self, rest: str) -> tuple[str, str, str] | None:
        """Return the head, the rest and the text before a name, if calls are numbered there.

        ``_ID`` replaces the number.
        """
        shared = num_shared(self._head[::-1], rest[::-1])
        first, second = self._head[: len(self._head) - shared], rest[: len(rest) - shared]
        if not (first[-1:].isdigit() and second[-1:].isdigit() and int(second[-1]) == int(first[-1]) + 1):
            return None
        name = self._head[len(first) :]
        first, second = first[:-1], second[:-1]
        before = first[shared_end(first, second) :].lstrip() + _ID + name
        return first + _ID + name, second + _ID + name, before


def _with_ids(form: ToolFormat | None) -> ToolFormat | None:
    """Return the format with the place of the id that the model writes; None if there are several such places."""
    if form is None:
        return None
    if _ID in form.before_name:
        lead, _, before = form.before_name.partition(_ID)
        ids = CallIds.COUNTED if form.ids is CallIds.COUNTED else CallIds.FREE
        form = replace(form, id_lead=lead, before_name=before, ids=ids)
    elif _ID in form.after_name:
        begin, _, after = form.after_name.partition(_ID)
        form = replace(form, id_begin=begin, after_name=after, ids=CallIds.FREE)
    parts = (form.opening, form.before_name, form.after_name, form.after_arguments, form.closing, form.separator or "")
    return None if any(_ID in part for part in parts) else _with_key(form)


def _with_key(form: ToolFormat) -> ToolFormat:
    key = re.search(r'"(\w+)":\s*$', form.after_name)
    return form if key is None else replace(form, arguments_key=key[1])


def _tool(name: str) -> Message:
    parameters = {"type": "object", "properties": _PROPERTIES}
    return {"type": "function", "function": {"name": name, "description": "Probe.", "parameters": parameters}}


def _trigger(opening: str) -> str:
    """Return the first mark of an opening. Without a mark, return the opening up to an object, or the whole opening."""
    mark = MARK.match(opening)
    return (
        mark[0] if mark is not None else opening[: opening.find("{")].rstrip() if "{" in opening else opening.rstrip()
    )


def _arguments_in(text: str) -> tuple[str, str | XmlStyle, str] | None:
    """Return the texts before and after the first call's arguments, and their style; None if the style is not known."""
    return _json_arguments(text) or _keyword_arguments(text) or _marked_arguments(text)


def _keyword_arguments(text: str) -> tuple[str, str, str] | None:
    """Return the texts before and after keyword arguments in Python's style, with the brackets, and their style."""
    found = _KEYWORDS.search(text)
    return None if found is None else (text[: found.start() + 1], PYTHON, text[found.end() - 1 :])


def _json_arguments(text: str) -> tuple[str, str, str] | None:
    """Return the texts before and after arguments that are a JSON object, and their style."""
    at = text.find("{")
    while at >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, at)
        except ValueError:
            value, end = None, at
        if value == _ARGUMENTS:
            return text[:at], "json", text[end:]
        at = text.find("{", at + 1)
    return None


def _marked_arguments(text: str) -> tuple[str, XmlStyle, str] | None:
    """Return the texts before and after arguments between marks, and their style."""
    values = [("17",), ("true", "True"), ("two words",)]
    parts: list[str] = []
    written: list[str] = []
    rest = text
    for name, options in zip(_ARGUMENTS, values, strict=True):
        before, found, rest = rest.partition(name)
        value = next((each for each in options if each in rest), None)
        if not found or value is None:
            return None
        key_end, _, rest = rest.partition(value)
        parts += [before, key_end]
        written.append(value)
    lead, number_end, first, flag_end, second, word_end = parts
    if first != second or number_end != flag_end or not number_end:
        return None
    cut = _cut_of_parameters(lead, first, rest)
    if cut is None:
        return None
    value_end, key_begin = first[:cut], first[cut:]
    mark = value_end.strip()
    before_mark = value_end[: len(value_end) - len(value_end.lstrip())]
    style = XmlStyle(
        "probed", key_begin, number_end, mark, before_mark, value_end[len(before_mark) + len(mark) :],
        capitals=written[1] == "True", text_key_end="" if word_end == number_end else word_end,
    )  # fmt: skip
    return lead.removesuffix(key_begin), style, rest.removeprefix(value_end)


def _cut_of_parameters(lead: str, between: str, rest: str) -> int | None:
    """Return the index in ``between`` at which the second of two parameters begins: at the last mark that both have."""
    starts = [mark.start() for mark in re.finditer(r"[<\[]", between)]
    fitting = [
        at for at in starts if between[:at].strip() and lead.endswith(between[at:]) and rest.startswith(between[:at])
    ]
    return fitting[-1] if fitting else None
