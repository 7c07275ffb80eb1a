r"""The multiples of a decimal as regular expressions, without those that are none by doubles (see `multiples`).

Let ``m`` be off by a relative error of at most 2^-54 once it is a double. Then a number that is a double exactly (an
integer, a half, a quarter) divides exactly. Of the others those that fail lie in few runs: within a binade all
``n + f`` with one fraction ``f`` are off by the same amount, so which ``n`` fail is a matter of their size alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

import numpy as np

MAX_FRACTIONS = 1_000
MAX_HALVINGS = 9
MAX_NEAR = 10**5
MAX_PATTERN = 8_000


def step_terms(size: int, divisors: frozenset[Fraction]) -> tuple[str, str] | None:
    """Regexes over the plain spelling of the multiples of ``1/size``: which must match, and which must not.

    Args:
        size: divides a power of ten, and is no power of two.
        divisors: what the number must be a multiple of, all of them safe; ``1/size`` is their least common multiple.

    Returns:
        None if there are too many fractions to list.
    """
    halvings = (size & -size).bit_length() - 1
    if halvings > MAX_HALVINGS:
        return None
    exact = rf"[0-9]+(?:\.(?:{_fractions(1 << halvings)})0*)?"
    digits, failing = _near(size, divisors)
    if not digits:
        return f"-?{exact}", ""
    whole = f"(?:0|[1-9][0-9]{{0,{digits - 1}}})"
    return rf"-?(?:{exact}|{whole}\.(?:{_fractions(size)})0*)", rf"-?(?:{failing})0*" if failing else ""


def _fractions(size: int) -> str:
    """Regex of the digits after the point of all multiples of ``1/size``, without zeros at the end."""
    digits = len(str(size)) - 1
    if size == 10**digits and digits:
        return f"[0-9]{{1,{digits}}}"
    return "|".join(sorted({_digits(Fraction(step, size)) or "0" for step in range(size)}))


def _digits(fraction: Fraction) -> str:
    return format(Decimal(fraction.numerator) / Decimal(fraction.denominator), "f").partition(".")[2].rstrip("0")


@lru_cache(maxsize=64)
def _near(size: int, divisors: frozenset[Fraction]) -> tuple[int, str]:
    """A number of digits, and a regex of the multiples with no more digits before the point that fail by doubles."""
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
    """Regexes of the multiples below `most` that fail, by their fractions."""
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
    """Regexes whose union is the integers from `first` to `last`."""
    for length in range(len(str(first)), len(str(last)) + 1):
        low, high = max(first, 10 ** (length - 1) if length > 1 else 0), min(last, 10**length - 1)
        yield from _same_length(str(low), str(high))


def _same_length(low: str, high: str) -> Iterator[str]:
    if low == high:
        yield low
        return
    size = next(place for place in range(len(low)) if low[place] != high[place])
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
