"""Scalar and counting keywords (``type``, ``minimum``, ``pattern``, ``minItems``): when they hold or fail."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ..regex.divisibility import divisible_terms
from ..regex.ecma_regex import read_pattern
from ..regex.regex_parser import RegexError
from ..regex.string_formats import FORMATS, LOOKALIKES
from .constraints import NO_ARRAYS, NO_NUMBERS, NO_OBJECTS, NO_STRINGS, Alternative, Arrays, Numbers, Objects, Strings
from .document import SchemaNode
from .json_types import ALL_TYPES, ARRAY, BOOLEAN, FALSE, NULL, NUMBER, OBJECT, STRING, TRUE, TYPE_BITS

# Longer than an answer can be: a larger maximum changes nothing, a larger minimum cannot be met.
MAX_LENGTH = 8192
MAX_MULTIPLE = 10_000
# From this number on every double is an integer, and most integers are not doubles.
EXACT_INTEGERS = 2**53
_OF_NUMBERS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength")
_OF_ARRAYS = ("minItems", "maxItems", "uniqueItems")
_OF_OBJECTS = ("required", "minProperties", "maxProperties")


def decimal(value: Any) -> Decimal:
    """Return a JSON number as the decimal with which validators compare answers.

    Validators read a number that is not an integer as a double, and compare integers of any length with it exactly. A
    double of 2^53 or more is an integer, which often differs from its shortest spelling: the double 1e23 is less than
    10^23. So its exact value is returned. For a smaller double the shortest spelling is returned, because validators
    read it as the same double.
    """
    if isinstance(value, int) or abs(value) >= EXACT_INTEGERS:
        return Decimal(value)
    return Decimal(repr(value))


def type_mask(schema: dict[str, Any]) -> int:
    """Return the types that ``type`` admits, as bits."""
    names = schema.get("type")
    if names is None:
        return ALL_TYPES
    mask = 0
    for name in [names] if isinstance(names, str) else names:
        mask |= TYPE_BITS[name]
    return mask


def holds(node: SchemaNode) -> Alternative:
    """Convert the keywords of a node for scalars and for sizes to an alternative in which all of them hold.

    Raises:
        GrammarError: a pattern, a multiple or a minimum is not supported.
    """
    schema = node.schema
    return Alternative(type_mask(schema), _numbers(node), _strings(node), _arrays(schema, node), _objects(schema, node))


def denials(node: SchemaNode) -> Iterator[Alternative]:
    """Yield alternatives in which a scalar or counting keyword fails; see ``undeniable`` for keywords left out."""
    schema, alternative = node.schema, holds(node)
    if alternative.types != ALL_TYPES:
        yield Alternative(ALL_TYPES & ~alternative.types)
    numbers, strings = alternative.numbers, alternative.strings
    if numbers.low is not None:
        yield Alternative(NUMBER, numbers=Numbers(high=numbers.low, high_open=not numbers.low_open))
    if numbers.high is not None:
        yield Alternative(NUMBER, numbers=Numbers(low=numbers.high, low_open=not numbers.high_open))
    if _is_deniable_multiple(schema):
        yield Alternative(NUMBER, numbers=Numbers(not_divisors=frozenset((schema["multipleOf"],))))
    if strings.least:
        yield Alternative(STRING, strings=Strings(most=strings.least - 1))
    if "maxLength" in schema and strings.most is not None:
        yield Alternative(STRING, strings=Strings(least=strings.most + 1))
    if "pattern" in schema:
        _check_pattern(schema["pattern"], node, wide=True)
        yield Alternative(STRING, strings=Strings(not_patterns=strings.patterns))
    if schema.get("format") in LOOKALIKES:
        yield Alternative(STRING, strings=Strings(not_patterns=frozenset((LOOKALIKES[schema["format"]],))))
    if alternative.arrays.least:
        yield Alternative(ARRAY, arrays=Arrays(most=alternative.arrays.least - 1))
    if alternative.arrays.most is not None:
        yield Alternative(ARRAY, arrays=Arrays(least=alternative.arrays.most + 1))
    if alternative.objects.least:
        yield Alternative(OBJECT, objects=Objects(most=alternative.objects.least - 1))
    if alternative.objects.most is not None:
        yield Alternative(OBJECT, objects=Objects(least=alternative.objects.most + 1))


def undeniable(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the scalar and counting keywords of a schema whose failure cannot be written as a grammar."""
    if "multipleOf" in schema and not _is_deniable_multiple(schema):
        yield "multipleOf"
    if schema.get("uniqueItems") is True:
        yield "uniqueItems"
    if schema.get("format") in FORMATS:
        yield "format"


def _is_deniable_multiple(schema: dict[str, Any]) -> bool:
    """Return whether the numbers that are not multiples can be written. Validators divide doubles."""
    step = schema.get("multipleOf")
    return isinstance(step, int) and divisible_terms(step) is not None


def scalar_values(values: list[Any]) -> Alternative:
    """Return the alternative for the given values that are neither arrays nor objects."""
    types = 0
    for value in values:
        if value is None:
            types |= NULL
        elif isinstance(value, bool):
            types |= TRUE if value else FALSE
        elif isinstance(value, int | float):
            types |= NUMBER
        elif isinstance(value, str):
            types |= STRING
    numbers = frozenset(decimal(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    strings = tuple(dict.fromkeys(v for v in values if isinstance(v, str)))
    return Alternative(types, numbers=Numbers(values=numbers), strings=Strings(values=strings)).of(ALL_TYPES)


def without_scalars(values: list[Any]) -> Alternative:
    """Return the alternative of everything but the given values; arrays and objects among them are not excluded."""
    alternative = scalar_values(values)
    return Alternative(
        ALL_TYPES & ~(alternative.types & (NULL | BOOLEAN)),
        numbers=Numbers(excluded=alternative.numbers.values or frozenset()),
        strings=Strings(excluded=frozenset(alternative.strings.values or ())),
    )


def _numbers(node: SchemaNode) -> Numbers:
    schema = node.schema
    if schema.keys().isdisjoint(_OF_NUMBERS):
        return NO_NUMBERS
    low, low_open = _bound(schema, "minimum", "exclusiveMinimum", pick_high=True)
    high, high_open = _bound(schema, "maximum", "exclusiveMaximum", pick_high=False)
    multiple = None
    if "multipleOf" in schema:
        multiple = Fraction(decimal(schema["multipleOf"]))
        if multiple.numerator > MAX_MULTIPLE or multiple.denominator > 10**9:
            limit = f"at most {MAX_MULTIPLE} and nine decimal places"
            raise node.error("multipleOf", f"{schema['multipleOf']} is too fine or too large; {limit}")
    divisors = frozenset() if multiple is None else frozenset((multiple,))
    return Numbers(low, high, low_open, high_open, multiple, divisors=divisors)


def _bound(schema: dict[str, Any], closed: str, exclusive: str, *, pick_high: bool) -> tuple[Decimal | None, bool]:
    bound = decimal(schema[closed]) if closed in schema else None
    open_bound = schema.get(exclusive)
    if isinstance(open_bound, bool):
        return bound, open_bound and bound is not None
    if open_bound is None:
        return bound, False
    other = decimal(open_bound)
    if bound is None or other == bound or (other > bound) == pick_high:
        return other, True
    return bound, False


def _strings(node: SchemaNode) -> Strings:
    schema = node.schema
    if schema.keys().isdisjoint(_OF_STRINGS):
        return NO_STRINGS
    patterns = frozenset((schema["pattern"],)) if "pattern" in schema else frozenset()
    if patterns:
        _check_pattern(schema["pattern"], node, wide=False)
    formats = frozenset((schema["format"],)) if schema.get("format") in FORMATS else frozenset()
    return Strings(_minimum(node, "minLength"), _maximum(schema, "maxLength"), patterns, formats=formats)


def _arrays(schema: dict[str, Any], node: SchemaNode) -> Arrays:
    if schema.keys().isdisjoint(_OF_ARRAYS):
        return NO_ARRAYS
    unique = schema.get("uniqueItems", False)
    return Arrays(least=_minimum(node, "minItems"), most=_maximum(schema, "maxItems"), unique=unique)


def _objects(schema: dict[str, Any], node: SchemaNode) -> Objects:
    if schema.keys().isdisjoint(_OF_OBJECTS):
        return NO_OBJECTS
    required = tuple(dict.fromkeys(schema.get("required", ())))
    least = _minimum(node, "minProperties")
    return Objects(required=required, least=least, most=_maximum(schema, "maxProperties"))


def _minimum(node: SchemaNode, keyword: str) -> int:
    count = int(node.schema.get(keyword, 0))
    if count > MAX_LENGTH:
        raise node.error(keyword, f"{count} is more than an answer can hold; the limit is {MAX_LENGTH}")
    return count


def _maximum(schema: dict[str, Any], keyword: str) -> int | None:
    return min(int(schema[keyword]), MAX_LENGTH) if keyword in schema else None


def _check_pattern(pattern: str, node: SchemaNode, *, wide: bool) -> None:
    try:
        read_pattern(pattern, wide).check_repeats()
    except RegexError as error:
        raise node.error("pattern", f"cannot be used: {error}") from None
