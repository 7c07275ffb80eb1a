"""Traffic split: which version of a name answers a request, by weight."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

FULL_WEIGHT = 100
"""Sum of the weights of a name that is served, in percent."""
_BITS = 64


def sticky_point(name: str, tenant: str, session: str) -> float:
    """Return the point in [0, 1) of a session, which is the same in all processes and at all times."""
    text = "\0".join((name, tenant, session))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[: _BITS // 8]) / (1 << _BITS)


def pick_version(weights: Mapping[str, int], point: float) -> str:
    """Return the digest whose part of [0, 1) contains a point.

    The versions divide [0, 1) in the mapping's order, the newest version last. So the part of a canary is at the upper
    end: if its weight grows, sessions move to the canary, and no session moves away from it.

    Raises:
        ValueError: no version has a weight.
    """
    rest = point * sum(weights.values())
    for digest, weight in weights.items():
        if rest < weight:
            return digest
        rest -= weight
    raise ValueError("no version has a weight")


def shares(weights: Mapping[str, int], total: int) -> dict[str, int]:
    """Divide ``total`` in proportion to weights, by largest remainders. Entries whose share is 0 are left out."""
    whole = sum(weights.values())
    split = {digest: weight * total // whole for digest, weight in weights.items()}
    by_rest = sorted(weights, key=lambda digest: -(weights[digest] * total % whole))
    for digest in by_rest[: total - sum(split.values())]:
        split[digest] += 1
    return {digest: share for digest, share in split.items() if share}
