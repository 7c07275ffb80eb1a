"""Output check: validates each finished structured answer with ``jsonschema``, independently of the grammar.

So a defect of the grammar engine ends an answer with ``error``, never with ``stop``. To limit the time, very long
strings (for patterns and formats) and documents that are nested deeper than the parser allows are not validated.

A schema is a program by a client, who is not trusted: a schema of 1 kB may refer to itself twice at each of its levels.
So each reference is evaluated only once for each part of the answer, and the applied keywords are counted. A validation
that takes more than a few milliseconds, or whose cost is not known, runs in a process with a deadline. If the deadline
passes, the answer is returned without validation.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from math import isinf
from threading import local
from typing import TYPE_CHECKING, Any

from jsonschema_specifications import REGISTRY

from ...engine.errors import CapacityError
from ...engine.sandbox.program_pool import POOL, VALIDATION_SECONDS, ProgramRefused
from ...engine.types import FinishReason
from ...grammar.regex.ecma_regex import pattern_matches
from ...grammar.sized_cache import SizedCache, sized_cache
from ...grammar.spec import GrammarKind, GrammarSpec
from ..protocol.tools import CUSTOM_INPUT
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

MOST_BYTES = 32 << 20  # Limit on the memory of cached validators in bytes.
_OF_CONTENT = 40  # Estimated memory of a validator, as a multiple of its schema's size.
# A text with more characters, or a schema with more bytes, is validated in another process.
_LONG_TEXT, _LONG_SCHEMA = 1_024, 1 << 14
# Limit on the work of a validation on the event loop: about the number of applied keywords.
_MOST_WORK = 4_000
_JOB = "api.structured.output_check:validate_job"
# The cost of a pattern is known if the pattern repeats no group.
_REPEATED_GROUP, _COUNTS = re.compile(r"\)[*+?{]"), re.compile(r"\{(\d+)")
_DYNAMIC, _UNEVALUATED = ("$dynamicRef", "$recursiveRef"), ("unevaluatedProperties", "unevaluatedItems")
_LONGEST_CHECKED = 4_096  # Largest number of characters of a string whose pattern or format is checked.
_DIGITS = 4_000  # Number of digits that are converted at once; it is below the limit of int(text).

logger = logging.getLogger(__name__)


class OutputCheck:
    """Collects the answers to one request, and validates each answer when it is finished.

    Answers that ``max_tokens``, or the request's stop strings or stop tokens, have cut off are not validated.

    Attributes:
        num_broken: number of answers that do not match the output format.
    """

    def __init__(self, output_format: OutputFormat, validators: OutputValidators) -> None:
        self.num_broken = 0
        self._output_format = output_format
        self._validators = validators
        self._texts: dict[tuple[int, int], list[str]] = {}

    async def check(self, deltas: Sequence[TextDelta]) -> list[TextDelta]:
        """Check the deltas of one step.

        Returns them; the finish reason of an invalid answer is changed to ``error``.
        """
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
                arguments = json.dumps({CUSTOM_INPUT: call.arguments}) if call.is_custom else call.arguments
                if spec is None or not await self._validators.is_valid(spec, arguments):
                    return False
            if calls or plan.reading is not Reading.TRIGGERED:
                return bool(calls)
        return form is None or not form.kind.is_json or await self._validators.is_valid(form, text)


class OutputValidators:
    """Cache of the most recently used validators, by grammar. Belongs to one event loop.

    Sixteen answers to a request, or hundreds of calls in one answer, may end in the same step. So all validations in
    one turn of the event loop share the limit on the work; the others wait for the next turn.
    """

    def __init__(self) -> None:
        self._cache = SizedCache(MOST_BYTES)
        self._work = 0.0  # Work of the validations in this turn of the event loop.

    async def is_valid(self, spec: GrammarSpec, text: str) -> bool:
        """Return whether a finished text is JSON that matches ``spec``. Long validations run in another process."""
        if len(text) < _LONG_TEXT and len(spec.content) < _LONG_SCHEMA:
            while self._work >= _MOST_WORK:
                await asyncio.sleep(0)
            validator = self._validator(spec)
            try:
                return validator.is_valid(text, _MOST_WORK)
            except TooMuchWork:
                pass
            finally:
                self._count(validator.work)
        try:
            return await POOL.off_loop(lambda: _is_valid_elsewhere(spec, text))
        except ProgramRefused as error:
            logger.warning("a structured answer could not be validated: the validation %s", error)
            return True
        except CapacityError as error:
            # The answer was generated under its grammar, so it is returned without validation.
            logger.warning("a structured answer could not be validated: %s", error)
            return True

    def _count(self, work: float) -> None:
        """Count the work of a validation in this turn of the event loop."""
        if not self._work:
            asyncio.get_running_loop().call_soon(self._begin_turn)
        self._work += max(work, 1.0)

    def _begin_turn(self) -> None:
        self._work = 0.0

    def _validator(self, spec: GrammarSpec) -> AnswerValidator:
        validator: AnswerValidator | None = self._cache.get(spec.key)
        if validator is None:
            validator = AnswerValidator(spec)
            self._cache.put(spec.key, validator, 4096 + _OF_CONTENT * len(spec.content))
        return validator


def _is_valid_elsewhere(spec: GrammarSpec, text: str) -> bool:
    arguments = [spec.kind.value, len(spec.content)]
    data = spec.content + text.encode("utf-8", "surrogatepass")
    return POOL.run(_JOB, VALIDATION_SECONDS, arguments, data) == b"1"


def validate_job(arguments: Sequence[Any], data: bytes) -> bytes:
    """Validate a text in a worker process.

    ``arguments`` are the grammar's kind and size; ``data`` is the grammar and the text.
    """
    kind, size = arguments
    text = data[size:].decode("utf-8", "surrogatepass")
    return b"1" if _kept_validator(kind, data[:size]).is_valid(text, None) else b"0"


@sized_cache(MOST_BYTES, lambda _, kind, content: 4096 + _OF_CONTENT * len(content))
def _kept_validator(kind: str, content: bytes) -> AnswerValidator:
    return AnswerValidator(GrammarSpec(GrammarKind(kind), content))


class TooMuchWork(Exception):
    """Raised if a validation takes more work than is allowed, or if its work is not known in advance."""


class _Run(local):
    """State of the validation in this thread: the work that is left, and the results of references by answer part."""

    left = float("inf")
    memo: dict[tuple[int, int], bool] | None = None


_run = _Run()


class AnswerValidator:
    """Validates texts against one schema.

    Attributes:
        work: work of the last validation whose work was counted.
    """

    def __init__(self, spec: GrammarSpec) -> None:
        self._validator = _validator(spec)
        # The result of a dynamic reference depends on the path that leads to it, so the result is not cached.
        self._shares = not any(name.encode() in spec.content for name in _DYNAMIC)
        # For these keywords, jsonschema resolves references without calling a keyword's function, so the work is not
        # counted.
        self._is_counted = not any(name.encode() in spec.content for name in _UNEVALUATED)
        self.work = 0.0

    def is_valid(self, text: str, most_work: int | None) -> bool:
        """Return whether a text is JSON that matches the schema.

        Raises:
            TooMuchWork: the validation takes more work than ``most_work``, if a limit is given.
        """
        if most_work is not None and not self._is_counted:
            raise TooMuchWork
        most = float("inf") if most_work is None else most_work
        _run.left, _run.memo = most, {} if self._shares else None
        try:
            return _is_valid(self._validator, text)
        finally:
            self.work = most - _run.left
            _run.left, _run.memo = float("inf"), None


def _validator(spec: GrammarSpec) -> Validator:
    schema = {"type": "object"} if spec.kind is GrammarKind.JSON_OBJECT else spec.value()
    return _with_our_keywords(validator_for(schema, default=Draft202012Validator))(schema, registry=REGISTRY)


@cache
def _with_our_keywords(base: type[Validator]) -> type[Validator]:
    """Return the validator class of a JSON Schema draft with ``_KEYWORDS`` added. There is one class for each draft."""
    keywords = {**base.VALIDATORS, **_KEYWORDS}
    keywords["$ref"] = _shared(keywords["$ref"])
    extended: type[Validator] = extend(base, {name: _counted(name, check) for name, check in keywords.items()})
    return extended


_Keyword = Callable[[Any, Any, Any, Any], Any]


def _counted(name: str, check: _Keyword) -> _Keyword:
    """Wrap a keyword's function, so that it also counts the work."""
    cost = _cost_of_pattern if name == "pattern" else _cost_of_patterns if name == "patternProperties" else _cost

    def counted(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        if _run.left < float("inf"):
            _run.left -= cost(value, instance)
            if _run.left < 0:
                raise TooMuchWork
        return check(validator, value, instance, schema)

    return counted


def _cost(value: Any, instance: Any) -> float:
    """Return the cost of a keyword without its subschemas. It visits the schema's value and the answer's value."""
    sizes = [len(each) if isinstance(each, dict | list) else 0 for each in (value, instance)]
    # If the value is ``true``, the keyword is uniqueItems, which compares all pairs.
    return 1 + sizes[0] / 8 + sizes[1] / 8 + (sizes[1] ** 2 / 64 if value is True else 0)


def _cost_of_pattern(source: Any, instance: Any) -> float:
    if not isinstance(instance, str) or not isinstance(source, str):
        return 1
    if _REPEATED_GROUP.search(source):
        return float("inf")
    counts = max(map(int, _COUNTS.findall(source)), default=1)
    return 1 + (len(source) + counts) * len(instance) / 64


def _cost_of_patterns(patterns: Any, instance: Any) -> float:
    if not isinstance(instance, dict):
        return 1
    return 1 + sum(_cost_of_pattern(source, key) for source in patterns for key in instance)


def _shared(check: _Keyword) -> _Keyword:
    """Wrap the function of ``$ref``, so that a reference is evaluated once for each part of an answer."""

    def shared(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        memo = _run.memo
        # The schema and the answer are kept in memory, so different parts of them have different ids.
        key = id(schema), id(instance)
        found = None if memo is None else memo.get(key)
        if found is None:
            found = next(iter(check(validator, value, instance, schema) or ()), None) is None
            if memo is not None:
                memo[key] = found
        if not found:
            yield ValidationError("does not match the reference")

    return shared


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
    except (TooMuchWork, MemoryError):
        raise
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
    """Match a pattern in ECMA's dialect and in limited time. Python's ``re`` offers neither."""
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
    """Check multipleOf exactly on the decimal numbers as they are written, so that 0.3 is a multiple of 0.1."""
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
