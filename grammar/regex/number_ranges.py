r"""Number ranges as regular expressions over the JSON spelling of numbers.

An interval is the intersection of one-sided conditions. A condition is a union over the digit at which a number first
differs from the bound:

    x >= 37.5   ->   more digits | [4-9]\d | 3[8-9] (\.\d+)? | 37\.([6-9]\d* | 5\d*)

Numbers with a bound are spelled without an exponent, and with so few digits that no two spellings are the same double.
So a number whose spelling is below the bound is also below it after parsing.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Context, Decimal
from fractions import Fraction

# A float with so many digits and an exponent of two digits is still far from overflow.
MAX_INT_DIGITS = 200
MAX_BOUND_DIGITS = 40
MAX_FRACTION_DIGITS = 20
SIGNIFICANT_DIGITS = 15

_INT = rf"(?:0|[1-9][0-9]{{0,{MAX_INT_DIGITS - 1}}})"
_FRACTION = rf"(?:\.[0-9]{{1,{MAX_FRACTION_DIGITS}}})"
INTEGER = f"-?{_INT}"
NUMBER = rf"-?{_INT}{_FRACTION}?(?:[eE][+-]?[0-9]{{1,2}})?"
PLAIN_NUMBER = f"-?{_INT}{_FRACTION}?"
# An integer, or few enough digits that no two spellings are the same double and no fraction becomes an integer.
PRECISE = rf"-?(?:{_INT}|[0-9.]{{1,{SIGNIFICANT_DIGITS + 1}}})"
NOT_INTEGER = rf"-?{_INT}\.[0-9]*[1-9]"
_SOME_DIGIT = "[0-9]*[1-9][0-9]*"
_NOTHING = r"[ab&&c]"
# From here on `_rounded` has made every bound a power of ten.
_POWER_OF_TEN = 10**MAX_BOUND_DIGITS
# Plain operators on decimals, the negative sign too, round to 28 digits.
EXACT = Context(prec=1_000)


def integer_terms(low: Fraction | None, high: Fraction | None) -> list[str]:
    """Return regexes that an integer's spelling must all match to be in the closed interval [low, high]."""
    terms = [INTEGER]
    if low is not None:
        terms.append(_signed_ge(-(-low.numerator // low.denominator)))
    if high is not None:
        terms.append(_signed_le(high.numerator // high.denominator))
    return terms


def decimal_terms(low: Decimal | None, high: Decimal | None, *, low_open: bool, high_open: bool) -> list[str]:
    """Return regexes that a plain number's spelling must all match to be in an interval.

    Args:
        low: lower bound, None if absent.
        high: upper bound, None if absent.
        low_open: the lower bound itself is excluded.
        high_open: the upper bound itself is excluded.
    """
    digits = _fraction_digits(low, high)
    # Beside a long bound a fraction would be read as another double, maybe across the bound.
    terms = [rf"-?{_INT}(?:\.[0-9]{{1,{digits}}})?"] if digits else [PLAIN_NUMBER, PRECISE]
    if low is not None:
        low, low_open = _rounded(low, up=True, is_open=low_open)
        terms.append(_decimal_ge(low, low_open))
    if high is not None:
        high, high_open = _rounded(high, up=False, is_open=high_open)
        terms.append(_decimal_le(high, high_open))
    return terms


def spells_any(low: Decimal | None, high: Decimal | None, *, low_open: bool, high_open: bool, whole: bool) -> bool:
    """Return whether the expressions for an interval match any number.

    They may match none, because only numbers of few digits are spelled and the bounds are rounded.

    Args:
        whole: whether only integers are allowed.
    """
    scale: int = 1 if whole else 10 ** _fraction_digits(low, high)
    last: int = 10**MAX_INT_DIGITS * scale - 1
    first = -last
    if low is not None:
        bound, is_open = _rounded(low, up=True, is_open=low_open)
        at = Fraction(bound) * scale
        first = max(first, -(-at.numerator // at.denominator) + (is_open and at.denominator == 1))
    if high is not None:
        bound, is_open = _rounded(high, up=False, is_open=high_open)
        at = Fraction(bound) * scale
        last = min(last, at.numerator // at.denominator - (is_open and at.denominator == 1))
    return first <= last


def _fraction_digits(low: Decimal | None, high: Decimal | None) -> int:
    """Return the most digits after the point of numbers within bounds; 0 if a bound is too long to have any."""
    bounds = [bound.copy_abs() for bound in (low, high) if bound is not None]
    whole = max((len(str(int(bound))) for bound in bounds), default=0)
    return max(0, min(MAX_FRACTION_DIGITS, SIGNIFICANT_DIGITS - whole)) if bounds else MAX_FRACTION_DIGITS


def spelling(value: Decimal) -> str:
    """Return the JSON spelling of a number: integers with all their digits, very small fractions with an exponent."""
    if value.adjusted() < -MAX_BOUND_DIGITS and value:
        return str(value.normalize())
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def any_spelling(value: Decimal) -> str:
    """Return the regex of all spellings of a number without an exponent (to exclude it)."""
    text = spelling(value).lstrip("-").replace(".", r"\.")
    sign = "-?" if not value else "-" if value < 0 else ""
    return sign + text + ("0*" if "." in text else r"(?:\.0+)?")


def _rounded(bound: Decimal, *, up: bool, is_open: bool) -> tuple[Decimal, bool]:
    """Return a bound with few enough digits to write out, rounded inwards if need be, and whether it is open."""
    if bound.copy_abs() >= _POWER_OF_TEN:
        outwards = up == (bound < 0)
        power = Decimal(10) ** (bound.adjusted() + (0 if outwards else 1))
        return power.copy_sign(bound), False
    exponent = bound.as_tuple().exponent
    if isinstance(exponent, int) and -exponent > MAX_FRACTION_DIGITS:
        step = Fraction(1, 10**MAX_FRACTION_DIGITS)
        scaled = Fraction(bound) / step
        count = -(-scaled.numerator // scaled.denominator) if up else scaled.numerator // scaled.denominator
        return EXACT.scaleb(Decimal(count), -MAX_FRACTION_DIGITS), False
    return bound, is_open


def _signed_ge(low: int) -> str:
    if low >= 10**MAX_BOUND_DIGITS:
        low = 10 ** len(str(low))
    elif low <= -(10**MAX_BOUND_DIGITS):
        low = -(10 ** (len(str(-low)) - 1))
    return _int_ge(low) if low >= 0 else f"(?:{_INT}|-{_int_le(-low)})"


def _signed_le(high: int) -> str:
    if high >= 10**MAX_BOUND_DIGITS:
        high = 10 ** (len(str(high)) - 1)
    elif high <= -(10**MAX_BOUND_DIGITS):
        high = -(10 ** len(str(-high)))
    return f"(?:-{_INT}|{_int_le(high)})" if high >= 0 else f"-{_int_ge(-high)}"


def _int_ge(low: int) -> str:
    """Return the regex of unsigned integers of at least `low`."""
    text = str(low)
    zeros = len(text) - 1
    if zeros and low == 10**zeros:
        return f"(?:[1-9][0-9]{{{zeros},{MAX_INT_DIGITS}}})" if zeros < MAX_INT_DIGITS else _NOTHING
    options = [f"[1-9][0-9]{{{len(text)},{MAX_INT_DIGITS}}}", *_same_length(text, above=True), text]
    return _either(options)


def _int_le(high: int) -> str:
    """Return the regex of unsigned integers of at most `high`."""
    text = str(high)
    zeros = len(text) - 1
    if zeros and high == 10**zeros:
        return f"(?:0|[1-9][0-9]{{0,{zeros - 1}}}|10{{{zeros}}})" if zeros < MAX_INT_DIGITS else _INT
    options = [*_same_length(text, above=False), text]
    if len(text) > 1:
        options.append(f"0|[1-9][0-9]{{0,{len(text) - 2}}}")
    return _either(options)


def _same_length(text: str, *, above: bool) -> Iterable[str]:
    """Yield regexes of integers of the same length strictly above or below, by the first digit that differs."""
    for index, char in enumerate(text):
        first, last = (int(char) + 1, 9) if above else (1 if index == 0 and len(text) > 1 else 0, int(char) - 1)
        if first <= last:
            yield text[:index] + _digits(first, last) + _any_digits(len(text) - index - 1)


def _decimal_ge(low: Decimal, is_open: bool) -> str:
    if low < 0:
        return f"(?:{_INT}{_FRACTION}?|-{_magnitude_le(low.copy_negate(), is_open)})"
    return _magnitude_ge(low, is_open)


def _decimal_le(high: Decimal, is_open: bool) -> str:
    if high < 0 or (high == 0 and is_open):
        return f"-{_magnitude_ge(high.copy_negate(), is_open)}"
    return f"(?:-{_INT}{_FRACTION}?|{_magnitude_le(high, is_open)})"


def _magnitude_ge(low: Decimal, is_open: bool) -> str:
    whole, fraction = _parts(low)
    if whole >= _POWER_OF_TEN:
        return f"{_int_ge(whole)}{_FRACTION}?"
    options = [f"{_int_ge(whole + 1)}{_FRACTION}?"]
    after = _SOME_DIGIT if is_open else "[0-9]*"
    if fraction:
        steps = [f"{fraction[:i]}{_digits(int(c) + 1, 9)}[0-9]*" for i, c in enumerate(fraction) if c < "9"]
        options.append(rf"{whole}\.{_either([*steps, fraction + after])}")
    else:
        options.append(rf"{whole}\.{_SOME_DIGIT}" if is_open else f"{whole}{_FRACTION}?")
    return _either(options)


def _magnitude_le(high: Decimal, is_open: bool) -> str:
    whole, fraction = _parts(high)
    if whole >= _POWER_OF_TEN:
        return f"(?:0|[1-9][0-9]{{0,{min(high.adjusted(), MAX_INT_DIGITS) - 1}}}){_FRACTION}?"
    options = [f"{_int_le(whole - 1)}{_FRACTION}?"] if whole else []
    if fraction:
        options.append(str(whole))
        steps = [f"{fraction[:i]}{_digits(0, int(c) - 1)}[0-9]*" for i, c in enumerate(fraction) if c > "0"]
        steps += [fraction[:i] for i in range(1, len(fraction))]
        steps += [] if is_open else [fraction + "0*"]
        options.append(rf"{whole}\.{_either(steps)}")
    elif not is_open:
        options.append(rf"{whole}(?:\.0+)?")
    return _either(options) if options else _NOTHING


def _parts(value: Decimal) -> tuple[int, str]:
    """Return the integer part, and the digits after the point without trailing zeros."""
    text = format(value, "f")
    whole, _, fraction = text.partition(".")
    return int(whole), fraction.rstrip("0")


def _digits(first: int, last: int) -> str:
    return str(first) if first == last else f"[{first}-{last}]"


def _any_digits(count: int) -> str:
    return f"[0-9]{{{count}}}" if count else ""


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"
