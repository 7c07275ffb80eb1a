"""Number terminals: ranges, multiples and enumerations of numbers as terminals of the grammar."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

from ..regex import number_ranges
from ..regex.charset import rust_literal
from ..regex.divisibility import divisible_terms
from ..regex.multiple_of import is_binary, is_safe, multiple_terms, nearest_multiples
from ..schema.constraints import Numbers
from ..schema.json_types import FRACTION, INTEGER, NUMBER
from ..schema.scalars import EXACT_INTEGERS
from .lark_rules import WHITESPACE, LarkRules

# Largest number of multiples to list if no regular expression matches all of them.
MAX_LISTED = 1_000
# Decimal digits that a double distinguishes.
MAX_MULTIPLE_DIGITS = 15
# For multiples of a step, the backend's lexer has a state for each remainder modulo the step without its factors 2 and
# 5, which only the last digits determine. From about 8,000 remainders on, a mask may fail.
MAX_REMAINDERS = 5_000
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def number_terminal(rules: LarkRules, types: int, numbers: Numbers) -> str:
    """Return the body of the grammar rule for numbers of some types (`INTEGER`, `FRACTION` or both).

    Raises:
        GrammarError: no terminal can express the constraints, for example if values are excluded from multiples.
    """
    listed = numbers.values
    if listed is None and numbers.low is not None and numbers.low == numbers.high:
        listed = frozenset(filter(numbers.admits, (numbers.low,)))
    if listed is not None:
        return _list(rules, [v for v in sorted(listed) if types & (INTEGER if v == int(v) else FRACTION)])
    if not number_ranges.spells_any(
        numbers.low, numbers.high, low_open=numbers.low_open, high_open=numbers.high_open, whole=types == INTEGER
    ):
        raise rules.unsupported(_BOUNDS, "no number within the bounds has few enough digits")
    multiple = numbers.multiple
    if multiple is None or (types == INTEGER and multiple.numerator == 1 and _are_safe(numbers)):
        return _terminal(rules, _terms(types, numbers, None), numbers)
    if types == INTEGER and _are_safe(numbers):
        return _multiples(rules, types, numbers, Fraction(multiple.numerator))
    if all(map(is_binary, numbers.divisors)):
        steps = _binary_steps(multiple)
        if not steps:
            return _multiples(rules, types, numbers, multiple)
        return _terminal(rules, _terms(types, numbers, steps), numbers)
    is_regular = multiple.numerator == 1 and _are_safe(numbers)
    terms = multiple_terms(multiple.denominator, numbers.divisors) if is_regular else None
    if terms is None:
        return _list(rules, _some_multiples(rules, types, numbers, multiple))
    return _terminal(rules, _terms(types, numbers, terms[0]), numbers, terms[1])


def _terminal(rules: LarkRules, terms: list[str], numbers: Numbers, failing: str = "") -> str:
    written = [f"/{term}/" for term in terms]
    if numbers.excluded:
        written.append("~/" + "|".join(map(number_ranges.any_spelling, sorted(numbers.excluded))) + "/")
    for divisor in sorted(numbers.not_divisors):
        terms_of_divisor = divisible_terms(divisor)
        found = [rf"/-?{term}(?:\.0+)?/" for term in terms_of_divisor or ()]
        written += [f"~({' & '.join(found)})"] if len(found) > 1 else [f"~{each}" for each in found]
    if failing:
        written.append(f"~/{failing}/")
    return rules.terminal(" & ".join(written))


def _list(rules: LarkRules, values: list[Decimal]) -> str:
    if not values:
        raise rules.unsupported((*_BOUNDS, "enum", "const"), "no listed number satisfies the schema")
    return rules.terminal("/" + "|".join(rust_literal(number_ranges.spelling(v)) for v in values) + "/")


def _some_multiples(rules: LarkRules, types: int, numbers: Numbers, multiple: Fraction) -> list[Decimal]:
    found = nearest_multiples(multiple, numbers.low, numbers.high, MAX_LISTED)
    values = [v for v in found if types & (INTEGER if v == int(v) else FRACTION) and numbers.admits(v)]
    if not values:
        raise rules.unsupported(
            ("multipleOf",), "no multiple of it is also a multiple in the floating-point arithmetic of validators"
        )
    return sorted(values)


def _are_safe(numbers: Numbers) -> bool:
    return all(is_binary(divisor) or is_safe(divisor) for divisor in numbers.divisors)


def _binary_steps(multiple: Fraction) -> str | None:
    """Return the regex of the multiples of 1/2, 1/4 and so on; None for other numbers."""
    terms = (
        multiple_terms(multiple.denominator, frozenset()) if multiple.numerator == 1 < multiple.denominator else None
    )
    return terms[0] if terms else None


def _terms(types: int, numbers: Numbers, steps: str | None) -> list[str]:
    """Return regexes all of which a number's spelling must match to be within the bounds and a multiple."""
    bounded = numbers.low is not None or numbers.high is not None
    if types == INTEGER:
        low = _integer_bound(numbers.low, numbers.low_open, step=1)
        high = _integer_bound(numbers.high, numbers.high_open, step=-1)
        return number_ranges.integer_terms(low, high)
    leaves_out = bool(numbers.excluded or numbers.not_divisors)
    if types == NUMBER and not bounded and not steps:
        return [number_ranges.PLAIN_NUMBER, number_ranges.PRECISE] if leaves_out else [number_ranges.NUMBER]
    terms = [number_ranges.PLAIN_NUMBER]
    if bounded:
        open_ends = {"low_open": numbers.low_open, "high_open": numbers.high_open}
        terms = number_ranges.decimal_terms(numbers.low, numbers.high, **open_ends)
    terms += [steps] if steps else []
    terms += [number_ranges.NOT_INTEGER] if types == FRACTION else []
    return [*terms, number_ranges.PRECISE] if steps or leaves_out or types == FRACTION else terms


def _integer_bound(bound: Decimal | None, is_open: bool, *, step: int) -> Fraction | None:
    if bound is None:
        return None
    return Fraction(bound) + step if is_open and bound == int(bound) else Fraction(bound)


def _without_factors(step: int) -> int:
    for prime in (2, 5):
        while step % prime == 0:
            step //= prime
    return step


def _multiples(rules: LarkRules, types: int, numbers: Numbers, multiple: Fraction) -> str:
    """Write multiples of a number with llguidance's own construct for JSON numbers."""
    if numbers.excluded or numbers.not_divisors or types == FRACTION:
        terms = divisible_terms(multiple.numerator) if types == INTEGER and multiple.denominator == 1 else None
        if terms is not None:
            return _terminal(rules, [*_terms(INTEGER, numbers, None), *(f"-?{term}" for term in terms)], numbers)
        raise rules.unsupported(("multipleOf",), "cannot be combined with excluded values or excluded integers")
    if (remainders := _without_factors(multiple.numerator)) > MAX_REMAINDERS:
        reason = f"the combined step is {multiple}, which is {remainders} without its factors 2 and 5"
        raise rules.unsupported(("multipleOf",), f"too complex to follow: {reason}; the limit is {MAX_REMAINDERS}")
    low, high = numbers.low, numbers.high
    if (low is not None and low > EXACT_INTEGERS) or (high is not None and high < -EXACT_INTEGERS):
        return _list(rules, _some_multiples(rules, types, numbers, multiple))
    schema: dict[str, Any] = {"type": "integer" if types == INTEGER else "number"}
    most = 10**MAX_MULTIPLE_DIGITS - 1
    # The library reads bounds as doubles, which are exact up to 2^53.
    if low is None or low < -EXACT_INTEGERS:
        schema["minimum"] = -most if low is None else -EXACT_INTEGERS
    else:
        schema["exclusiveMinimum" if numbers.low_open else "minimum"] = _plain(low)
    if high is None or high > EXACT_INTEGERS:
        schema["maximum"] = most if high is None else EXACT_INTEGERS
    else:
        schema["exclusiveMaximum" if numbers.high_open else "maximum"] = _plain(high)
    schema["multipleOf"] = float(multiple) if multiple.denominator > 1 else int(multiple)
    schema["x-guidance"] = {"whitespace_pattern": WHITESPACE}
    return f"%json {json.dumps(schema)}"


def _plain(value: Decimal) -> int | float:
    return int(value) if value == int(value) else float(value)
