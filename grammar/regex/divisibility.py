"""Regular expressions of the integers that are divisible by a number, which may be intersected and complemented."""

from __future__ import annotations

from functools import lru_cache

# Endings that are listed for the factors 2 and 5, and bytes of the expression for another prime power.
MAX_ENDINGS = 1_000
MAX_BYTES = 4_000


@lru_cache(maxsize=256)
def divisible_terms(number: int) -> tuple[str, ...] | None:
    """Return expressions that the spelling of an unsigned integer must all match; they match if ``number`` divides it.

    Returns None if the expressions would be too large. Apart from powers of 2 and of 5, 3 is the only prime power whose
    automaton is small enough as an expression.
    """
    digits, rest = 0, number
    for prime in (2, 5):
        count = 0
        while rest % prime == 0:
            rest //= prime
            count += 1
        digits = max(digits, count)
    step = number // rest
    if 10**digits // step > MAX_ENDINGS:
        return None
    terms = [_endings(step, digits)] if digits else []
    for power in _prime_powers(rest):
        term = _remainder_zero(power)
        if term is None:
            return None
        terms.append(term)
    return tuple(terms)


def _endings(step: int, digits: int) -> str:
    """Return the expression of what ends in, or is, a multiple of a divisor of a power of ten."""
    multiples = range(0, 10**digits, step)
    endings = "|".join(str(multiple).zfill(digits) for multiple in multiples)
    short = "|".join(str(multiple) for multiple in multiples if len(str(multiple)) < digits)
    return f"(?:[0-9]*(?:{endings}){f'|{short}' if short else ''})"


def _prime_powers(number: int) -> list[int]:
    found, prime = [], 2
    while number > 1:
        power = 1
        while number % prime == 0:
            number //= prime
            power *= prime
        if power > 1:
            found.append(power)
        prime += 1
        if prime * prime > number > 1:
            found.append(number)
            break
    return found


def _remainder_zero(number: int) -> str | None:
    """Return the expression of multiples of a number, from the automaton of remainders, or None if it is too large."""
    edges: dict[tuple[int, int], str] = {}
    for state in range(number):
        for target in range(number):
            digits = "".join(str(digit) for digit in range(10) if (10 * state + digit) % number == target)
            if digits:
                edges[state, target] = f"[{digits}]"
    for gone in range(number - 1, 0, -1):
        loop = f"(?:{edges[gone, gone]})*" if (gone, gone) in edges else ""
        for state in range(gone):
            for target in range(gone):
                if (state, gone) in edges and (gone, target) in edges:
                    through = f"(?:{edges[state, gone]}){loop}(?:{edges[gone, target]})"
                    known = edges.get((state, target))
                    edges[state, target] = through if known is None else f"{known}|{through}"
                    if len(edges[state, target]) > MAX_BYTES:
                        return None
    return f"(?:{edges[0, 0]})+"
