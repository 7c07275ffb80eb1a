"""Token bounds: lower bounds on the number of tokens of a text, by which far too long texts are refused without
encoding.

A token has at most a certain number of bytes, and at most a certain number of letters and digits. The second number is
much smaller, because the longest tokens are runs of spaces and dashes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_ALPHANUMERIC = frozenset(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
_STEPS = frozenset({"ByteLevel", "Split", "Digits", "Metaspace", "Punctuation", "Prepend", "NFC"})


@dataclass(frozen=True, slots=True)
class _Bound:
    """Largest number of bytes of one token, not counting the bytes in ``ignored``."""

    most: int
    ignored: bytes


@dataclass(frozen=True, slots=True)
class TokenBounds:
    """Bounds on the tokens of a tokenizer. With ``ascii_only``, they are valid only for ASCII texts."""

    bounds: tuple[_Bound, ...]
    ascii_only: bool

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of a text; 0 if no bound is valid for the text."""
        if self.ascii_only and not text.isascii():
            return 0
        data = text.encode(errors="ignore")
        return max(-(-len(data.translate(None, bound.ignored)) // bound.most) for bound in self.bounds)


def read_bounds(definition: dict[str, Any], pieces: Iterable[bytes]) -> TokenBounds | None:
    """Return the bounds of a tokenizer; None if the tokenizer may drop parts of a text.

    Args:
        definition: the tokenizer in the form of ``tokenizer.json``.
        pieces: the bytes of each token.
    """
    pieces = set(pieces)
    model = definition["model"]
    steps = [*_steps(definition.get("normalizer")), *_steps(definition.get("pre_tokenizer"))]
    by_bytes = model.get("byte_fallback") or any(step["type"] == "ByteLevel" for step in steps)
    swallows = any(added.get("lstrip") or added.get("rstrip") for added in definition.get("added_tokens", ()))
    if swallows or model.get("type", "BPE") != "BPE" or not by_bytes or not all(map(_keeps_all, steps)):
        return None
    # Encoding may drop a byte that has no token of its own.
    missing = frozenset(byte for byte in range(256) if bytes([byte]) not in pieces)
    others = frozenset(range(256)) - _ALPHANUMERIC
    return TokenBounds(
        tuple(_bound(pieces, bytes(ignored)) for ignored in (missing, others | missing)),
        # NFC normalization may shorten a text, but not an ASCII text.
        ascii_only=any(step["type"] == "NFC" for step in steps),
    )


def _bound(pieces: Iterable[bytes], ignored: bytes) -> _Bound:
    return _Bound(max(1, *(len(piece.translate(None, ignored)) for piece in pieces)), ignored)


def _steps(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part.get("normalizers", part.get("pretokenizers", ())) for step in _steps(inner)]
    return [part]


def _keeps_all(step: dict[str, Any]) -> bool:
    """Return whether a step of the tokenizer keeps all letters and digits, and keeps the number of bytes."""
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"] == "\u2581")
    return step["type"] in _STEPS and step.get("behavior") != "Removed"
