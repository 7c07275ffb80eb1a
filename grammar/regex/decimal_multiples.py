r"""Multiples of a decimal that any validator takes for multiples.

By the specification 4.35 is a multiple of 0.01. Validators divide doubles: ``4.35 / 0.01`` is 434.99999999999994, so
they say that it is not. What is written here is a multiple in exact arithmetic and by doubles.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction

_SAFE = Fraction(1, 1 << 54)


def divides(divisor: Fraction, value: Decimal) -> bool:
    """Whether a value is a multiple, in exact arithmetic and, unless the divisor is an integer, by doubles."""
    if (Fraction(value) / divisor).denominator != 1:
        return False
    try:
        return divisor.denominator == 1 or (float(value) / float(divisor)).is_integer()
    except OverflowError:
        return False


def is_binary(divisor: Fraction) -> bool:
    """Whether doubles are exact for it: its denominator is a power of two."""
    return divisor.denominator & (divisor.denominator - 1) == 0


def is_safe(divisor: Fraction) -> bool:
    """Whether every multiple that is a double exactly is one by doubles too."""
    return abs(Fraction(float(divisor)) / divisor - 1) <= _SAFE


def listed(multiple: Fraction, low: Decimal | None, high: Decimal | None, most: int) -> Iterator[Decimal]:
    """At most `most` exact multiples within bounds, from the one nearest to zero on."""
    size = Decimal(multiple.numerator) / Decimal(multiple.denominator)
    first = 0
    if low is not None and low > 0:
        first = int(low / size)
    elif high is not None and high < 0:
        first = int(high / size)
    for step in range(most):
        offset = (step + 1) // 2 * (1 if step % 2 else -1)
        yield Decimal((first + offset) * multiple.numerator) / Decimal(multiple.denominator)
