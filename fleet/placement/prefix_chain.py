"""Prefix hash chain: hashes of the leading blocks of a prompt within one scope of KV.

    tokens   |--- block 0 ---|--- block 1 ---|--- rest, without a hash ---|
    chain     h0 = H(scope)    h1 = H(h0, block 0)    h2 = H(h1, block 1)

Equal hashes at a depth mean equal scopes and equal tokens up to that depth. They have the same meaning on all gateways,
because the hash has no random seed. If two hashes collide, a sequence may be sent to a replica that lacks its prefix,
which costs time. The answer is still right, because the engine compares tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import NamedTuple

BLOCK = 64
"""Tokens of a block."""


class KvScope(NamedTuple):
    """The scope of KV: sequences of different scopes share no KV.

    Attributes:
        base: digest of the base model.
        adapter: name of the adapter as the engine knows it, None for the base model.
        salt: text that the tenant has chosen to separate some of its KV.
        tenant: tenant whose sequences may share the KV.
    """

    base: str
    adapter: str | None = None
    salt: str = ""
    tenant: str = ""


def prefix_chain(scope: KvScope, tokens: array[int]) -> tuple[int, ...]:
    """Return the hash of the scope, followed by the hash of each whole block of the tokens: 64-bit integers."""
    data, step = memoryview(tokens).cast("B"), BLOCK * tokens.itemsize
    last = _hash(repr(tuple(scope)).encode())
    chain = [last]
    for start in range(0, len(data) - step + 1, step):
        last = _hash(last.to_bytes(8, "little") + data[start : start + step])
        chain.append(last)
    return tuple(chain)


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
