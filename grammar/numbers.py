"""Numbers of a world as terminals."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from grammar import numeric
from grammar.charset import rust_literal
from grammar.whitespace import WHITESPACE
from grammar.world import FRACTION, INTEGER, NUMBER, Numbers

if TYPE_CHECKING:
    from grammar.lark import Writer

MAX_STEPS = 1_000


def number_terminal(writer: Writer, types: int, numbers: Numbers) -> list[str]:
    """The alternatives of a grammar rule that write a number (one, or none if no number is left).

    Raises:
        GrammarError: for values left out of the multiples of a number, which no terminal expresses.
    """
    if numbers.values is not None:
        values = [v for v in sorted(numbers.values) if types & (INTEGER if v == int(v) else FRACTION)]
        return [writer.terminal("/" + "|".join(rust_literal(numeric.spelling(v)) for v in values) + "/")]
    multiple = numbers.multiple
    if types == INTEGER:
        multiple = None if multiple is None or multiple.numerator == 1 else Fraction(multiple.numerator)
    steps = _steps(multiple) if multiple is not None else None
    if multiple is not None and steps is None:
        return [_multiples(writer, types, numbers, multiple)]
    terms = [f"/{term}/" for term in (*_terms(types, numbers, bool(steps)), *([steps] if steps else []))]
    if numbers.excluded:
        terms.append("~/" + "|".join(map(numeric.any_spelling, sorted(numbers.excluded))) + "/")
    return [writer.terminal(" & ".join(terms))]


def _terms(types: int, numbers: Numbers, plain: bool) -> list[str]:
    bounded = numbers.low is not None or numbers.high is not None
    if types == INTEGER:
        low = _integer_bound(numbers.low, numbers.low_open, step=1)
        high = _integer_bound(numbers.high, numbers.high_open, step=-1)
        return numeric.integer_terms(low, high)
    if types == NUMBER and not bounded:
        return [numeric.PLAIN_NUMBER if numbers.excluded or plain else numeric.NUMBER]
    terms = numeric.decimal_terms(numbers.low, numbers.high, low_open=numbers.low_open, high_open=numbers.high_open)
    return [*terms, numeric.NOT_INTEGER] if types == FRACTION else terms


def _integer_bound(bound: Decimal | None, is_open: bool, *, step: int) -> Fraction | None:
    if bound is None:
        return None
    return Fraction(bound) + step if is_open and bound == int(bound) else Fraction(bound)


def _steps(multiple: Fraction) -> str | None:
    """Regex of the multiples of 1/n where n divides a power of ten, by the digits after the point; else None."""
    size = multiple.denominator
    if multiple.numerator != 1 or size == 1 or 10**9 % size:
        return None
    if str(size).strip("0") == "1":
        return rf"-?[0-9]+(?:\.[0-9]{{1,{len(str(size)) - 1}}}0*)?"
    if size > MAX_STEPS:
        return None
    fractions = {numeric.spelling(Decimal(step) / size).partition(".")[2] for step in range(size)}
    return rf"-?[0-9]+(?:\.(?:{'|'.join(sorted(fractions))})0*)?".replace("(?:|", "(?:0|")


def _multiples(writer: Writer, types: int, numbers: Numbers, multiple: Fraction) -> str:
    """Multiples of a number, which the compiler has a construct of its own for."""
    if numbers.excluded or types == FRACTION:
        raise writer.refusal(("multipleOf",), "cannot be combined with values or integers that are left out")
    schema: dict[str, Any] = {"type": "integer" if types == INTEGER else "number"}
    low, high = numbers.low, numbers.high
    if low is not None:
        schema["exclusiveMinimum" if numbers.low_open else "minimum"] = _plain(low)
    if high is not None:
        schema["exclusiveMaximum" if numbers.high_open else "maximum"] = _plain(high)
    schema["multipleOf"] = float(multiple) if multiple.denominator > 1 else int(multiple)
    schema["x-guidance"] = {"whitespace_pattern": WHITESPACE}
    return f"%json {json.dumps(schema)}"


def _plain(value: Decimal) -> int | float:
    return int(value) if value == int(value) else float(value)
