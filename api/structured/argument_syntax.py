"""Argument syntax: converts a call's arguments between JSON and the style of a model family, in both directions.

Readers convert a model's text to JSON piece by piece. The text follows the grammar of its style, but may end anywhere
if it was cut off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from ...grammar.argument_styles import (
    ALL_TYPES,
    GEMMA,
    GEMMA_QUOTE,
    PYTHON,
    PYTHON_WORDS,
    XmlStyle,
    gemma_text,
    xml_style,
)
from ..exact_json import loads_exact

_OUTSIDE, _INSIDE = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
_BLANKS = " \t\r\n"
_WORD_BEGIN, _WORD_REST = re.compile(r"[A-Za-z_]"), re.compile(r"\w*")
_GEMMA_PART = re.compile(r"[^:,{}\[\]<]*")
_JSON_WORDS = {python: word for word, python in PYTHON_WORDS.items()}
_encode = json.JSONEncoder(ensure_ascii=False).encode


class ArgumentReader(Protocol):
    """Interface of a reader that converts the arguments of one call to JSON, piece by piece."""

    def read(self, text: str) -> tuple[str, int, bool]:
        """Read text. It consists of the text that the previous call left unused, and of new text after it.

        Returns:
            JSON for the used text, the number of characters used, and whether the arguments are complete.
        """


def argument_reader(style: str | XmlStyle, types: Mapping[str, frozenset[str]]) -> ArgumentReader:
    """Return a reader for one call's arguments. ``types`` are the types of the parameters (`argument_types`)."""
    if style == PYTHON:
        return _PythonReader()
    if style == GEMMA:
        return _GemmaReader()
    xml = xml_style(style)
    return JsonReader() if xml is None else _XmlReader(xml, types)


class JsonReader:
    """Finds the end of a JSON object of arguments. The text is passed on unchanged."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def read(self, text: str) -> tuple[str, int, bool]:
        """See `ArgumentReader`."""
        end = self._end(text)
        used = len(text) if end is None else end
        return text[:used], used, end is not None

    def _end(self, text: str) -> int | None:
        """Return the index after the last brace; None if the text does not contain it yet."""
        at = int(self._escaped)
        self._escaped = False
        while (match := (_INSIDE if self._in_string else _OUTSIDE).search(text, at)) is not None:
            at = match.end()
            if match[0] == "\\":
                self._escaped = at == len(text)
                at += 1
            elif match[0] == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if match[0] in "{[" else -1
                if self._depth == 0:
                    return at
        return None


class _XmlReader:
    """Reads parameters between marks.

    The text of a parameter that must be a string is passed on at once; others when complete.
    """

    def __init__(self, style: XmlStyle, types: Mapping[str, frozenset[str]]) -> None:
        self._style = style
        self._key_ends = tuple(dict.fromkeys(map(style.key_end_of, sorted(ALL_TYPES))))
        self._key_end = _shared_beginning(self._key_ends)
        self._longest_end = max(map(len, self._key_ends))
        self._types = types
        self._begun = False
        self._num_read = 0
        self._name: str | None = None
        self._in_text = False
        self._in_name = False
        # Whether the mark before the value says that the value is a string; None if the mark does not say it.
        self._is_text: bool | None = None
        self._searched = 0  # Number of characters that were searched without finding the end mark of a name or value.

    def read(self, text: str) -> tuple[str, int, bool]:
        """See `ArgumentReader`."""
        written = "" if self._begun else "{"
        self._begun = True
        used = 0
        while True:
            more, count, done = self._key(text[used:]) if self._name is None else self._value(text[used:])
            written, used = written + more, used + count
            if done or not count:
                return written, used, done

    def _key(self, text: str) -> tuple[str, int, bool]:
        if self._in_name:
            return self._rest_of_name(text)
        begin = self._style.key_begin
        blanks = len(text) - len(text.lstrip(_BLANKS)) if self._num_read or self._style.empty else 0
        rest = text[blanks:]
        if rest.startswith(begin):
            self._in_name = True
            return "", blanks + len(begin), False
        if not rest or begin.startswith(rest):
            return "", 0, False
        return "}", blanks, True

    def _rest_of_name(self, text: str) -> tuple[str, int, bool]:
        end, mark = self._end_of_name(text)
        if not mark:
            self._searched = len(text) if end < 0 else end + len(self._key_end)
            return "", 0, False
        self._name, self._in_name, self._searched = text[:end], False, 0
        self._is_text = mark == self._style.key_end_of("string") if self._style.tells_strings else None
        comma = ", " if self._num_read else ""
        return f"{comma}{_encode(self._name)}: ", end + len(mark), False

    def _end_of_name(self, text: str) -> tuple[int, str]:
        """Return the index at which the name ends, and the mark there. The mark is "" while it is incomplete."""
        end = text.find(self._key_end, max(0, self._searched - len(self._key_end)))
        while end >= 0:
            rest = text[end : end + self._longest_end]
            whole = next((mark for mark in self._key_ends if rest.startswith(mark)), "")
            if whole or any(mark.startswith(rest) for mark in self._key_ends):
                return end, whole
            end = text.find(self._key_end, end + 1)
        return end, ""

    def _value(self, text: str) -> tuple[str, int, bool]:
        types = self._types.get(str(self._name), ALL_TYPES)
        if self._is_text is not None:
            types = frozenset(("string",)) if self._is_text else ALL_TYPES - {"string"}
        before, mark = self._style.before_mark, self._style.mark
        end = text.find(mark, max(0, self._searched - len(mark)))
        self._searched = 0 if end >= 0 else len(text)
        if end >= 0:
            self._name = None
            self._num_read += 1
            value = text[:end].removesuffix(before)
            if not self._in_text and not self._style.is_plain_text(value, types):
                text = value.strip(_BLANKS)
                return text.lower() if text in ("True", "False") else text, end + len(mark), False
            opening, self._in_text = "" if self._in_text else '"', False
            return f"{opening}{_encode(value)[1:]}", end + len(mark), False
        if types != {"string"}:
            return "", 0, False
        # A possible beginning of the end mark is left for the next call.
        closing = before + mark
        kept = _size_of_begin(text, closing)
        certain = text[: len(text) - kept]
        self._searched = kept
        opening = "" if self._in_text or not certain else '"'
        self._in_text = self._in_text or bool(certain)
        return f"{opening}{_encode(certain)[1:-1]}", len(certain), False


class _PythonReader:
    """Reads keyword arguments in Python's syntax, up to the parenthesis after them."""

    def __init__(self) -> None:
        self._begun = False
        self._depth = 0
        self._in_string = False
        self._searched = 0  # Number of characters that were searched without finding the end of a word.

    def read(self, text: str) -> tuple[str, int, bool]:
        """See `ArgumentReader`."""
        written = [] if self._begun else ["{"]
        self._begun = True
        at = 0
        while at < len(text):
            piece, end = self._string(text, at) if self._in_string else self._token(text, at)
            if piece is None:
                break
            if not self._in_string and self._depth == 0 and piece == ")":
                return "".join([*written, "}"]), at, True
            written.append(piece)
            at = end
        return "".join(written), at, False

    def _string(self, text: str, at: int) -> tuple[str | None, int]:
        match = _INSIDE.search(text, at)
        if match is None:
            return text[at:], len(text)
        if match[0] == "\\":
            end = match.end() + 1
            return (text[at:end], end) if end <= len(text) else self._before(text, at, match.start())
        self._in_string = False
        return text[at : match.end()], match.end()

    @staticmethod
    def _before(text: str, at: int, end: int) -> tuple[str | None, int]:
        """Return the text before an incomplete escape."""
        return (text[at:end], end) if end > at else (None, at)

    def _token(self, text: str, at: int) -> tuple[str | None, int]:
        if self._searched or _WORD_BEGIN.match(text, at):
            rest = _WORD_REST.match(text, at + self._searched)
            end = len(text) if rest is None else rest.end()
            self._searched = end - at if end == len(text) else 0
            if self._searched:
                return None, at
            word = text[at:end]
            if self._depth == 0 and text[end] == "=":
                return f"{_encode(word)}: ", end + 1
            return _JSON_WORDS.get(word, word), end
        char = text[at]
        self._in_string = char == '"'
        self._depth += (char in "[{") - (char in "]}")
        return char, at + 1


class _GemmaReader:
    """Reads an object with unquoted names. Its strings are between special quote marks."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._searched = 0  # Number of characters that were searched without finding the end of a name or value.

    def read(self, text: str) -> tuple[str, int, bool]:
        """See `ArgumentReader`."""
        written: list[str] = []
        at = 0
        while at < len(text):
            piece, end = self._string(text, at) if self._in_string else self._token(text, at)
            if end == at:
                break
            written.append(piece)
            at = end
            if not self._in_string and self._depth == 0:
                return "".join(written), at, True
        return "".join(written), at, False

    def _string(self, text: str, at: int) -> tuple[str, int]:
        end = text.find(GEMMA_QUOTE, at)
        if end == at:
            self._in_string = False
            return '"', at + len(GEMMA_QUOTE)
        # A possible beginning of the quote mark is left for the next call.
        kept = _size_of_begin(text, GEMMA_QUOTE) if end < 0 else 0
        end = len(text) - kept if end < 0 else end
        return _encode(text[at:end])[1:-1], max(at, end)

    def _token(self, text: str, at: int) -> tuple[str, int]:
        if text[at] == "<":
            if not text.startswith(GEMMA_QUOTE, at):
                return ("", at) if GEMMA_QUOTE.startswith(text[at:]) else (text[at], at + 1)
            self._in_string = True
            return '"', at + len(GEMMA_QUOTE)
        if text[at] in ":,{}[]":
            self._depth += (text[at] in "[{") - (text[at] in "]}")
            return text[at] + (" " if text[at] in ":," else ""), at + 1
        part = _GEMMA_PART.match(text, at + self._searched)
        end = len(text) if part is None else part.end()
        self._searched = end - at if end == len(text) else 0
        if self._searched:
            return "", at
        word = text[at:end]
        return _encode(word) if text[end] == ":" else _JSON_WORDS.get(word, word), end


def _shared_beginning(texts: Sequence[str]) -> str:
    least, most = min(texts), max(texts)
    return most[: next((at for at, letter in enumerate(least) if letter != most[at]), len(least))]


def _size_of_begin(text: str, mark: str) -> int:
    """Return the number of characters at the end of a text that may be the beginning of a mark."""
    return next((size for size in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:size])), 0)


def write_arguments(arguments: str, style: str | XmlStyle) -> str:
    """Convert a JSON object of arguments, given as text, to a style.

    Text that is not a JSON object is returned unchanged.
    """
    if style == "json":
        return arguments
    try:
        value = loads_exact(arguments.encode())
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        return arguments
    if not isinstance(value, dict):
        return arguments
    if style == PYTHON:
        return ", ".join(f"{name}={_python(each)}" for name, each in value.items())
    if style == GEMMA:
        return gemma_text(value)
    xml = xml_style(style)
    if xml is None:
        raise ValueError(f"{style!r} is not a style of arguments")
    texts = [
        xml.written(name, each if isinstance(each, str) else _encode(each), is_text=isinstance(each, str))
        for name, each in value.items()
    ]
    return "".join(texts) or xml.empty


def _python(value: Any) -> str:
    """Convert a JSON value to a Python literal, with strings in double quotes."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_encode(name)}: {_python(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    text = _encode(value)
    return PYTHON_WORDS.get(text, text)
