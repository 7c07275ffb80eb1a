"""Rank patterns: match the regular expressions of ``rank_pattern`` and ``alpha_pattern`` in linear time, with RE2.

Patterns are untrusted, and with a pattern of 20 characters Python's backtracking matcher may take exponential time. RE2
takes time proportional to the length of the name and the size of the pattern's program, which is limited. PEFT uses
Python's ``re``. If RE2 would give a pattern another meaning, the pattern is rewritten or refused.
"""

from __future__ import annotations

import re

import re2

from .errors import AdapterError

_MOST_CHARACTERS = 512
_MOST_BYTES = 1 << 17
"""Limit of the bytes of one pattern's program and of the states that RE2 keeps for it. Counted repetitions, such as
``{100}``, multiply the program's size."""
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_GROUP = re.compile(r"\(\?(?!:|P<|[ims]+:)")
# Both dialects have these escapes, with the same meaning for names of modules, which are ASCII.
_ESCAPES = frozenset("dDwWsSbABafnrtv")


class NamePattern:
    """A pattern as PEFT applies it: it must match a module's whole name, or the whole part after one of its dots.

    Args:
        pattern: a regular expression of Python without look-around, back references, and flags for all of it.
        option: the config's key that contains the pattern, for errors.

    Raises:
        AdapterError: the pattern is malformed, too long or too large, or uses syntax that is not supported.
    """

    def __init__(self, pattern: str, option: str) -> None:
        if len(pattern) > _MOST_CHARACTERS:
            raise AdapterError(
                f"{option} has a pattern of {len(pattern)} characters; the limit is {_MOST_CHARACTERS}.", option
            )
        self._size = len(pattern)
        self._plain = re.compile(pattern) if _PLAIN.fullmatch(pattern) else None
        self._compiled = None if self._plain else _compiled(pattern, option)

    @property
    def is_plain(self) -> bool:
        """Whether the pattern is a plain name, which can be matched fast."""
        return self._plain is not None

    @property
    def program_size(self) -> int:
        """Largest number of instructions that a match runs for each character of a name; 0 for a plain name."""
        return 0 if self._compiled is None else int(self._compiled.programsize)

    def matches(self, name: str) -> bool:
        """Return whether PEFT applies the pattern's value to the module of this name."""
        if self._compiled is not None:
            return self._compiled.match(name) is not None
        assert self._plain is not None
        start = len(name) - self._size
        return (start == 0 or name[start - 1 : start] == ".") and bool(self._plain.fullmatch(name, start))


def _compiled(pattern: str, option: str) -> re2._Regexp:
    """Return RE2's program for a pattern, embedded as in PEFT. Raises AdapterError."""
    text = _rewritten(pattern, option)
    options = re2.Options()
    options.log_errors, options.never_capture, options.max_mem = False, True, _MOST_BYTES
    try:
        # Python parses the pattern but never matches it: PEFT cannot use a pattern that Python refuses.
        re.compile(pattern)
        return re2.compile(rf"(?:.*\.)?(?:{text})$", options)
    except (re.error, re2.error, OverflowError, RecursionError, UnicodeEncodeError) as error:
        raise _error(pattern, option, f"is malformed or not supported: {_reason(error)}") from None


def _rewritten(pattern: str, option: str) -> str:
    """Return a pattern in RE2's syntax. Raises AdapterError if RE2 lacks a construct or interprets it differently."""
    written, at = [], 0
    while at < len(pattern):
        letter, end = pattern[at], at + 1
        if letter == "\\":
            end += 1
            _check_escape(pattern, at + 1, option)
        elif letter == "[":
            end = _end_of_class(pattern, at, option)
        elif letter == "(" and _GROUP.match(pattern, at):
            raise _error(pattern, option, "uses look-around, a flag or another group that is not supported")
        elif letter == "{":
            count = _COUNT.match(pattern, at)
            if count is None or not (count[1] or count[3]):
                raise _error(pattern, option, "has a '{' without a count")
            end = count.end()
            # RE2 treats a count without its lower bound as plain text.
            written.append(f"{{{count[1] or 0}{count[2]}{count[3]}}}")
            at = end
            continue
        written.append(pattern[at:end])
        at = end
    return "".join(written)


def _check_escape(pattern: str, at: int, option: str) -> None:
    letter = pattern[at : at + 1]
    if letter.isdigit():
        raise _error(pattern, option, f"uses the back reference \\{letter}, which is not supported")
    if letter.isalnum() and letter not in _ESCAPES:
        raise _error(pattern, option, f"uses \\{letter}, which is not supported")


def _end_of_class(pattern: str, at: int, option: str) -> int:
    """Return the index after a character class. Raises AdapterError."""
    found = _CLASS.match(pattern, at)
    if found is None:
        raise _error(pattern, option, "has an unmatched '['")
    inner = found[0][1:-1]
    if "[" in inner or any(mark in inner for mark in ("--", "&&", "~~", "||")):
        raise _error(pattern, option, "uses a class with a bracket or a set operation in it, which is not supported")
    for escape in re.finditer(r"\\(.?)", inner):
        _check_escape(pattern, at + 1 + escape.start(1), option)
    return found.end()


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "its groups are nested too deeply"
    reason = error.args[0] if error.args else error
    return reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)


def _error(pattern: str, option: str, what: str) -> AdapterError:
    return AdapterError(f"{option}: the pattern {pattern[:80]!r} {what}.", option)
