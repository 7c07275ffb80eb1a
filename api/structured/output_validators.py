"""The safety net under structured answers: each one that ends is parsed and validated once more, by another library.

The grammar is the promise; this only watches it. What it cannot judge in reasonable time (patterns of very long
strings, documents nested beyond the parser's depth) passes. The only importer of ``jsonschema``.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache
from math import isinf
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend, validator_for
from referencing import Registry

from ...grammar.regex.ecma_regex import pattern_matches
from ...grammar.regex.string_formats import FORMATS
from ...grammar.spec import GrammarKind, GrammarSpec

MOST_CACHED = 256
"""Validators that are remembered, at most."""
_LONG_TEXT = 1_024
_LONGEST_JUDGED = 4_096  # characters of a string whose pattern or format is looked at
_DIGITS = 4_000  # Python converts no more at once

logger = logging.getLogger(__name__)


class OutputValidators:
    """Validators by grammar; the ones used least recently are forgotten. Belongs to one event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Validator] = OrderedDict()

    async def hold(self, spec: GrammarSpec, text: str) -> bool:
        """Whether a finished text is the JSON that ``spec`` asks for. Long texts are judged on another thread."""
        validator = self._known.pop(spec.key, None) or _validator(spec)
        self._known[spec.key] = validator
        if len(self._known) > MOST_CACHED:
            self._known.popitem(last=False)
        if len(text) < _LONG_TEXT:
            return _is_valid(validator, text)
        return await asyncio.to_thread(_is_valid, validator, text)


def _validator(spec: GrammarSpec) -> Validator:
    schema = {"type": "object"} if spec.kind is GrammarKind.JSON_OBJECT else spec.value()
    return _ours(validator_for(schema, default=Draft202012Validator))(schema, registry=Registry())


@cache
def _ours(base: type[Validator]) -> type[Validator]:
    """A draft's validator with our keywords: a class, of which there is one for each draft."""
    made: type[Validator] = extend(base, _OURS)
    return made


def _is_valid(validator: Validator, text: str) -> bool:
    try:
        value = json.loads(text, parse_int=_integer, parse_constant=_no_constant)
    except ValueError:
        return False
    except RecursionError:
        logger.warning("a structured answer is nested too deeply to be validated")
        return True
    try:
        return bool(validator.is_valid(value))
    except Exception:
        logger.warning("a structured answer could not be validated", exc_info=True)
        return True


def _integer(digits: str) -> int:
    if digits[0] == "-":
        return -_integer(digits[1:])
    value = 0
    for start in range(0, len(digits), _DIGITS):
        part = digits[start : start + _DIGITS]
        value = value * 10 ** len(part) + int(part)
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _format_checker() -> FormatChecker:
    """Checks the formats that grammars assert, whatever the draft, and no others: those are annotations."""
    checker = FormatChecker(())
    checker.checkers = {
        name: check for name, check in Draft202012Validator.FORMAT_CHECKER.checkers.items() if name in FORMATS
    }
    return checker


_FORMATS = _format_checker()


def _pattern(_validator: Validator, source: str, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    """In ECMA's dialect, and in bounded time: Python's ``re`` has neither."""
    if isinstance(instance, str) and len(instance) <= _LONGEST_JUDGED and not pattern_matches(source, instance):
        yield ValidationError("does not match")


def _format(_validator: Validator, name: str, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and len(instance) <= _LONGEST_JUDGED and not _FORMATS.conforms(instance, name):
        yield ValidationError("is not in the format")


def _pattern_properties(
    validator: Validator, patterns: Mapping[str, Any], instance: Any, _schema: Any
) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        for source, schema in patterns.items():
            for key, value in instance.items():
                if pattern_matches(source, key):
                    yield from validator.descend(value, schema)


def _additional_properties(
    validator: Validator, extra: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if isinstance(instance, dict):
        declared, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for key, value in instance.items():
            if key not in declared and not any(pattern_matches(source, key) for source in patterns):
                yield from validator.descend(value, extra)


def _multiple_of(_validator: Validator, step: Any, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    """In exact arithmetic on the decimals as they are written: 0.3 is a multiple of 0.1."""
    if isinstance(instance, bool) or not isinstance(instance, int | float) or isinf(instance):
        return
    if Fraction(repr(instance)) % Fraction(repr(step)):
        yield ValidationError("is not a multiple")


_OURS = {
    "pattern": _pattern,
    "format": _format,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "multipleOf": _multiple_of,
}
