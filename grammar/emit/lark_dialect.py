"""Lark's syntax in the library's dialect: where the library reads a part otherwise, the part is written anew.

The library's own expressions are those of Rust, and Lark's those of Python. A part that has a meaning in both of them,
but not the same one, is refused.
"""

from __future__ import annotations

import re

from ..errors import GrammarError

_PART = re.compile(
    r"""(?P<lines>\r?\n(?:[ \t\r\n]|(?:\#|//)[^\n]*)*)
    |(?P<comment>(?:\#|//)[^\n]*)
    |"(?:\\.|[^"\\\n])*"|<[^<>\s]+>
    |/(?P<regex>(?:\\[\s\S]|[^/\\])+)/(?P<flags>[a-z]*)
    |~[ \t]*(?P<least>\d+)[ \t]*\.\.[ \t]*(?P<most>\d+)""",
    re.VERBOSE,
)
# Escapes with braces are Rust's own, and errors in Python.
_ESCAPE = re.compile(r"\\(?:[pPuUx]\{\w*(?:[=:]\w*)?\}|[\s\S])")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_POSIX = re.compile(r"\[:\^?[a-z]+:\]")
# A bracket right behind the beginning of a class is a character.
_BEGIN = re.compile(r"\[\^?\]?")
_OPERATOR = re.compile(r"&&|--|~~")


def in_dialect(text: str) -> str:
    """Return a Lark grammar as the library is to read it. Raises GrammarError as `layout`."""
    return layout(text, with_regexes=True)


def layout(text: str, *, with_regexes: bool = False) -> str:
    """Return a grammar whose alternatives and repeat counts are written as the library's parser wants them.

    The library ends a rule at comments and blank lines before an alternative, and reads the beginning of ``1..2`` as a
    fraction in some places. The lines that are left out there follow the rule, so that errors name the right line of
    all other rules.

    Args:
        with_regexes: whether regular expressions are written anew too.

    Raises:
        GrammarError: a regular expression means one thing in Lark and another one in the library.
    """
    left_out = 0

    def written(part: re.Match[str]) -> str:
        nonlocal left_out
        if part["least"]:
            return f"~{part['least']} .. {part['most']}"
        if part["regex"] and with_regexes:
            return f"/{_regex(part['regex'], part['flags'])}/{part['flags']}"
        if not part["lines"]:
            return part[0]
        if text[part.end() : part.end() + 1] == "|":
            left_out += part[0].count("\n") - 1
            return "\n "
        lines, left_out = "\n" * left_out, 0
        return lines + part[0]

    return _PART.sub(written, text)


def _regex(source: str, flags: str) -> str:
    """Return an expression in Python's syntax as Rust reads it."""
    found, at = list[str](), 0
    while at < len(source):
        end = at + 1
        if escape := _ESCAPE.match(source, at):
            end = escape.end()
            found.append(_escape(escape[0]))
        elif source[at] == "[":
            end = _class_end(source, at)
            found.append(_class(source, at, end, flags))
        elif source[at] == "#" and "x" in flags:
            end = (source.find("\n", at) + 1) or len(source)
            found.append(source[at:end])
        elif source[at] == "{":
            count = _COUNT.match(source, at)
            is_count = count is not None and (count[1] or count[3])
            end = count.end() if count is not None and is_count else end
            found.append(f"{{{count[1] or 0}{count[2]}{count[3]}}}" if count is not None and is_count else "\\{")
        else:
            found.append(source[at])
        at = end
    return "".join(found)


def _escape(escape: str) -> str:
    """Return an escape of Python: ``\\<`` is a character there and the beginning of a word in Rust."""
    char = escape[1:]
    return char if char in ("<", ">") or (not char.isascii() and not char.isspace()) else escape


def _class_end(source: str, at: int) -> int:
    """Return the position behind the class that begins at a position, as Python reads it; the end if it has none."""
    begin = _BEGIN.match(source, at)
    at = begin.end() if begin is not None else at + 1
    while at < len(source) and source[at] != "]":
        at += 2 if source[at] == "\\" else 1
    return min(at + 1, len(source))


def _class(source: str, at: int, end: int, flags: str) -> str:
    """Return the class between two positions as Rust reads it alike. Raises GrammarError for an ambiguous one."""
    begin = _BEGIN.match(source, at)
    found = [begin[0]] if begin is not None else []
    at = begin.end() if begin is not None else at
    start = at
    while at < end:
        char = source[at]
        if operator := _OPERATOR.match(source, at):
            raise _ambiguous(source, operator[0], "an operation on sets", "characters")
        if escape := _ESCAPE.match(source, at):
            found.append("\\x08" if escape[0] == "\\b" else _escape(escape[0]))
            at = escape.end() - 1
        elif char == "[":
            if _closes(source, start - len(found[0])):
                raise _ambiguous(source, "[", "a class within it", "a character")
            found.append("\\[")
        else:
            # Without this Rust skips blanks of a class in an expression of the flag x.
            found.append("\\" + char if char in " #" and "x" in flags else char)
        at += 1
    return "".join(found)


def _closes(source: str, at: int) -> bool:
    """Return whether the class that begins at a position comes to an end if classes may be within classes."""
    depth = 0
    while at < len(source):
        if source[at] == "[":
            posix = _POSIX.match(source, at) if depth else None
            begin = _BEGIN.match(source, at)
            depth += posix is None
            at = posix.end() if posix is not None else begin.end() if begin is not None else at + 1
            continue
        depth -= source[at] == "]"
        if not depth:
            return True
        at += 2 if source[at] == "\\" else 1
    return False


def _ambiguous(source: str, part: str, one: str, other: str) -> GrammarError:
    """Return the error for a part of a class that has one meaning in Rust and another one in Python."""
    escaped = "".join(f"\\{char}" for char in part)
    return GrammarError(
        "lark",
        "",
        f"/{source[:100]}/ cannot be used: {part!r} in a class is {one} to some readers and {other} to others; "
        f"the text itself is {escaped}",
    )
