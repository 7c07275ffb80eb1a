"""Output check: validate each finished structured answer with ``jsonschema``, independently of the grammar.

A defect of the grammar engine then ends in ``error``, never in ``stop``. Very long strings (patterns, formats) and
documents nested beyond the parser's depth are not validated, which bounds the time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import isinf
from typing import TYPE_CHECKING, Any

from jsonschema_specifications import REGISTRY

from ...engine.types import FinishReason
from ...grammar.regex.ecma_regex import pattern_matches
from ...grammar.spec import GrammarKind, GrammarSpec
from .jsonschema_validators import (
    FORMAT_CHECKER,
    Draft202012Validator,
    ValidationError,
    Validator,
    extend,
    validator_for,
)
from .output_format import OutputFormat
from .tool_parser import read_calls
from .tool_plan import Reading

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TextDelta

MOST_CACHED = 256  # validators
_LONG_TEXT = 1_024  # characters; longer texts are validated on another thread
_LONGEST_CHECKED = 4_096  # characters of a string whose pattern or format is checked
_DIGITS = 4_000  # below the limit of int(text)

logger = logging.getLogger(__name__)


class OutputCheck:
    """Collects the answers of one request and validates each when it finishes.

    Answers cut off by ``max_tokens``, or by the request's stop strings or tokens, are not validated.

    Attributes:
        num_broken: answers that do not match the output format.
    """

    def __init__(self, output_format: OutputFormat, validators: OutputValidators) -> None:
        self.num_broken = 0
        self._output_format = output_format
        self._validators = validators
        self._texts: dict[tuple[int, int], list[str]] = {}

    async def check(self, deltas: Sequence[TextDelta]) -> list[TextDelta]:
        """Return the deltas of one step; the finish reason of an invalid answer becomes ``error``."""
        return [await self._checked(delta) for delta in deltas]

    async def _checked(self, delta: TextDelta) -> TextDelta:
        texts = self._texts.setdefault((delta.prompt, delta.index), [])
        texts.append(delta.text)
        finish = delta.finish
        if finish is None or finish.reason is not FinishReason.STOP or finish.stop_reason is not None:
            return delta
        if await self._is_valid("".join(texts)):
            return delta
        self.num_broken += 1
        return replace(delta, finish=replace(finish, reason=FinishReason.ERROR))

    async def _is_valid(self, text: str) -> bool:
        form, plan = self._output_format.form, self._output_format.tools
        if plan is not None:
            text, calls = read_calls(plan, text)
            for call in calls:
                spec = plan.arguments.get(call.name)
                if spec is None or not await self._validators.is_valid(spec, call.arguments):
                    return False
            if calls or plan.reading is not Reading.TRIGGERED:
                return bool(calls)
        return form is None or not form.kind.is_json or await self._validators.is_valid(form, text)


class OutputValidators:
    """LRU cache of validators by grammar. Belongs to one event loop."""

    def __init__(self) -> None:
        self._cache: OrderedDict[str, Validator] = OrderedDict()

    async def is_valid(self, spec: GrammarSpec, text: str) -> bool:
        """Whether a finished text is JSON that matches ``spec``. Long texts are validated on another thread."""
        validator = self._cache.pop(spec.key, None) or _validator(spec)
        self._cache[spec.key] = validator
        if len(self._cache) > MOST_CACHED:
            self._cache.popitem(last=False)
        if len(text) < _LONG_TEXT:
            return _is_valid(validator, text)
        return await asyncio.to_thread(_is_valid, validator, text)


def _validator(spec: GrammarSpec) -> Validator:
    schema = {"type": "object"} if spec.kind is GrammarKind.JSON_OBJECT else spec.value()
    return _with_our_keywords(validator_for(schema, default=Draft202012Validator))(schema, registry=REGISTRY)


@cache
def _with_our_keywords(base: type[Validator]) -> type[Validator]:
    """Extend the validator class of a JSON Schema draft with ``_KEYWORDS``; one class per draft."""
    extended: type[Validator] = extend(base, _KEYWORDS)
    return extended


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


def _pattern(_validator: Validator, source: str, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    """Match in ECMA's dialect and in bounded time; Python's ``re`` does neither."""
    if isinstance(instance, str) and len(instance) <= _LONGEST_CHECKED and not pattern_matches(source, instance):
        yield ValidationError("does not match")


def _format(_validator: Validator, name: str, instance: Any, _schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and len(instance) <= _LONGEST_CHECKED and not FORMAT_CHECKER.conforms(instance, name):
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
    """Exact arithmetic on the decimals as written: 0.3 is a multiple of 0.1."""
    if isinstance(instance, bool) or not isinstance(instance, int | float) or isinf(instance):
        return
    if Fraction(repr(instance)) % Fraction(repr(step)):
        yield ValidationError("is not a multiple")


_KEYWORDS = {
    "pattern": _pattern,
    "format": _format,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "multipleOf": _multiple_of,
}
