"""The exact bytes of each token, from the decoder of a ``tokenizer.json``.

Generating models use three decoders. Each of them joins the texts of single tokens. It may then drop a space that
encoding has put before the text:

    ByteLevel    a piece spells bytes in GPT-2's alphabet
    Sequence     of Replace (U+2581 to a space), ByteFallback (<0x0A> is that byte), Fuse, Strip
    Metaspace    U+2581 is a space; those in the first token are dropped
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError, quoted

_MOST_GROWTH = 64
"""Limit on the factor by which all replacements together may lengthen a piece.

SentencePiece's decoder does not lengthen it.
"""
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """Rules that convert pieces of the vocabulary to bytes.

    Attributes:
        byte_level: whether pieces spell bytes in GPT-2's alphabet.
        byte_fallback: whether ``<0x0A>`` is one byte.
        replacements: (old, new) texts that are replaced in each piece, in this order.
        strip: number of leading spaces that are dropped from a whole text.
        strip_mark: character that is dropped from the first token of a text; None if absent.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip: int = 0
    strip_mark: str | None = None

    def bytes_of(self, piece: str) -> bytes:
        """Return the bytes of one piece of the model's vocabulary."""
        if self.byte_level:
            return _spelled(piece)
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        return piece.encode()


def read_rules(decoder: dict[str, Any] | None) -> DecoderRules:
    """Return the rules of a definition's ``decoder``. Raises ModelError if a step is not supported exactly."""
    values: dict[str, Any] = {"replacements": ()}
    for step in _steps(decoder):
        kind = step["type"]
        if kind == "ByteLevel":
            values["byte_level"] = True
        elif kind == "ByteFallback":
            values["byte_fallback"] = True
        elif kind == "Replace" and "String" in step["pattern"]:
            values["replacements"] += ((step["pattern"]["String"], step["content"]),)
        elif kind == "Metaspace":
            values["replacements"] += ((step["replacement"], " "),)
            scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
            values["strip_mark"] = None if scheme == "never" else step["replacement"]
        elif kind == "Strip" and step["content"] == " " and step["stop"] == 0:
            values["strip"] = step["start"]
        elif kind != "Fuse":
            raise ModelError(f"The tokenizer's decoder has a step that is not supported: {quoted(step)}.")
    rules = DecoderRules(**values)
    if not (rules.byte_level or rules.replacements) or (rules.byte_level and rules.replacements):
        raise ModelError("The tokenizer's decoder is neither ByteLevel nor SentencePiece's: not supported.")
    if (growth := math.prod(_growth(*each) for each in rules.replacements)) > _MOST_GROWTH:
        raise ModelError(
            f"The tokenizer's decoder may make a piece {growth} times as long; at most {_MOST_GROWTH} times is "
            "supported."
        )
    return rules


def _growth(old: str, new: str) -> int:
    """Return the largest factor by which replacing ``old`` by ``new`` may lengthen a text."""
    return max(1, -(-len(new) // len(old)) if old else len(new) + 1)


def _steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the steps of a decoder. A sequence is replaced by its steps."""
    if decoder is None:
        return
    if decoder["type"] != "Sequence":
        yield decoder
        return
    for inner in decoder["decoders"]:
        yield from _steps(inner)


def _alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet: a printable Latin-1 character represents its own byte, U+0100 and later other bytes."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _alphabet()
_CHARACTERS = {byte: character for character, byte in _ALPHABET.items()}


def spell(data: bytes) -> str:
    """Return bytes as text in GPT-2's alphabet."""
    return "".join(map(_CHARACTERS.__getitem__, data))


def _spelled(piece: str) -> bytes:
    """Return the bytes that ``piece`` spells in GPT-2's alphabet; its UTF-8 if a character is not in the alphabet."""
    try:
        return bytes([_ALPHABET[character] for character in piece])
    except KeyError:
        return piece.encode()
