r"""``multipleOf``: decimal multiples that every validator accepts, as values and as regular expressions.

By the specification 4.35 is a multiple of 0.01. But validators divide doubles, and ``4.35 / 0.01`` is
434.99999999999994, so they reject it. Therefore the grammar admits only numbers that are multiples both in exact
arithmetic and with doubles.

If the relative error of a step's double is at most 2^-54, any multiple that is exactly a double (an integer, a half, a
quarter) is divided exactly. The other multiples that fail form few ranges: between two powers of two, all ``n + f``
with the same fraction ``f`` have the same error, so it depends only on the size of ``n`` whether the division fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from .number_ranges import EXACT

MAX_FRACTIONS = 1_000
MAX_HALVINGS = 9
MAX_NEAR = 10**5
MAX_PATTERN = 8_000
_SAFE = Fraction(1, 1 << 54)


def divides(divisor: Fraction, value: Decimal) -> bool:
    """Return whether a value is a multiple in exact arithmetic and, unless the divisor is an integer, by doubles."""
    if (Fraction(value) / divisor).denominator != 1:
        return False
    try:
        return divisor.denominator == 1 or (float(value) / float(divisor)).is_integer()
    except OverflowError:
        return False


def is_binary(divisor: Fraction) -> bool:
    """Return whether doubles are exact for a divisor: its denominator is a power of two."""
    return divisor.denominator & (divisor.denominator - 1) == 0


def is_safe(divisor: Fraction) -> bool:
    """Return whether every exact multiple that is a double exactly is a multiple by doubles too."""
    return abs(Fraction(float(divisor)) / divisor - 1) <= _SAFE


def nearest_multiples(multiple: Fraction, low: Decimal | None, high: Decimal | None, most: int) -> Iterator[Decimal]:
    """Yield `most` exact multiples, from the one of the interval nearest to zero outwards; not checked to be in it."""
    first = 0
    if low is not None and low > 0:
        first = Fraction(low) // multiple
    elif high is not None and high < 0:
        first = Fraction(high) // multiple
    for step in range(most):
        offset = (step + 1) // 2 * (1 if step % 2 else -1)
        yield EXACT.divide(Decimal((first + offset) * multiple.numerator), Decimal(multiple.denominator))


def multiple_terms(size: int, divisors: frozenset[Fraction]) -> tuple[str, str] | None:
    """Return regexes over the plain spelling of the multiples of ``1/size``: one that must match, one that must not.

    Args:
        size: a divisor of a power of ten that is not a power of two.
        divisors: numbers of which the value must be a multiple, all safe; their least common multiple is ``1/size``.

    Returns:
        None if there are too many fractions to list.
    """
    halvings = (size & -size).bit_length() - 1
    if halvings > MAX_HALVINGS:
        return None
    exact = rf"[0-9]+(?:\.(?:{_fractions(1 << halvings)})0*)?"
    digits, failing = _failing_near_zero(size, divisors)
    if not digits:
        return f"-?{exact}", ""
    whole = f"(?:0|[1-9][0-9]{{0,{digits - 1}}})"
    return rf"-?(?:{exact}|{whole}\.(?:{_fractions(size)})0*)", rf"-?(?:{failing})0*" if failing else ""


def _fractions(size: int) -> str:
    """Return the regex of the digits after the point of all multiples of ``1/size``, without trailing zeros."""
    digits = len(str(size)) - 1
    if size == 10**digits and digits:
        return f"[0-9]{{1,{digits}}}"
    return "|".join(sorted({_digits(Fraction(step, size)) or "0" for step in range(size)}))


def _digits(fraction: Fraction) -> str:
    return format(Decimal(fraction.numerator) / Decimal(fraction.denominator), "f").partition(".")[2].rstrip("0")


@lru_cache(maxsize=64)
def _failing_near_zero(size: int, divisors: frozenset[Fraction]) -> tuple[int, str]:
    """Return a number of digits, and a regex of the multiples with at most that many before the point that fail."""
    if size > MAX_FRACTIONS:
        return 0, ""
    best = 0, ""
    for digits in range(1, len(str(MAX_NEAR // size))):
        pattern = "|".join(_failing(size, divisors, 10**digits))
        if len(pattern) > MAX_PATTERN:
            break
        best = digits, pattern
    return best


def _failing(size: int, divisors: frozenset[Fraction], most: int) -> Iterable[str]:
    """Return regexes of the multiples below `most` that fail by doubles, grouped by their fractions."""
    import numpy as np  # not at the top: the API checks schemas without it

    values = np.arange(most * size) / size  # one rounding, as if read from text
    fails = np.zeros(len(values), dtype=bool)
    for divisor in divisors:
        quotients = values / float(divisor)
        fails |= quotients != np.floor(quotients)
    by_whole: dict[str, list[str]] = {}
    for step, column in enumerate(fails.reshape(most, size).T):
        edges = np.flatnonzero(np.diff(np.concatenate(([False], column, [False]))))
        runs = zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
        wholes = "|".join(part for first, end in runs for part in _run(first, end - 1))
        if wholes:
            by_whole.setdefault(wholes, []).append(_digits(Fraction(step, size)))
    return [rf"(?:{wholes})\.(?:{'|'.join(digits)})" for wholes, digits in by_whole.items()]


def _run(first: int, last: int) -> Iterator[str]:
    """Yield regexes whose union is the integers from `first` to `last`."""
    for length in range(len(str(first)), len(str(last)) + 1):
        low, high = max(first, 10 ** (length - 1) if length > 1 else 0), min(last, 10**length - 1)
        yield from _same_length(str(low), str(high))


def _same_length(low: str, high: str) -> Iterator[str]:
    if low == high:
        yield low
        return
    size = next(index for index in range(len(low)) if low[index] != high[index])
    prefix, rest = low[:size], len(low) - size - 1
    first, last = int(low[size]), int(high[size])
    if low[size + 1 :] != "0" * rest:
        for tail in _same_length(low[size + 1 :], "9" * rest):
            yield f"{prefix}{first}{tail}"
        first += 1
    ends: list[str] = []
    if high[size + 1 :] != "9" * rest:
        ends = [f"{prefix}{last}{tail}" for tail in _same_length("0" * rest, high[size + 1 :])]
        last -= 1
    if first <= last:
        digit = str(first) if first == last else f"[{first}-{last}]"
        yield f"{prefix}{digit}{f'[0-9]{{{rest}}}' if rest else ''}"
    yield from ends
