"""Definition parts: builds parts of a ``tokenizer.json`` from the data of other tokenizer formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ModelError, quoted

SPACE = "\u2581"  # SentencePiece writes this character for a space.
TO_TEXT: tuple[dict[str, Any], ...] = (
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
)


def added_token(token: int, text: str, *, special: bool, rstrip: bool = False) -> dict[str, Any]:
    """Return an entry for a definition's ``added_tokens``. The library finds such a token before normalization."""
    return {
        "id": token,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": rstrip,
        "normalized": False,
        "special": special,
    }


def sentencepiece_definition(
    tokens: list[str],
    scores: list[float],
    added: list[dict[str, Any]],
    *,
    unknown: str | None,
    prefix: bool,
    is_prefixed_once: bool = False,
) -> dict[str, Any]:
    """Return the definition of a SentencePiece BPE tokenizer. Its merges follow from the scores of its pieces.

    Args:
        added: added tokens, which the library finds before normalization.
        unknown: the piece for characters that the vocabulary cannot encode, not even as byte pieces.
        prefix: whether encoding adds a space before a text.
        is_prefixed_once: whether that space is added only before the whole text, not after each added token too
            (``legacy: false``).

    Raises:
        ModelError: two tokens have the same text.
    """
    to_marks: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    words: dict[str, Any] | None = None
    decoders = list(TO_TEXT)
    if prefix and is_prefixed_once:
        words = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
    elif prefix:
        to_marks = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, to_marks]}
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None if words else to_marks,
        "pre_tokenizer": words,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": bpe_model(
            tokens, merges_by_score(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }


def bpe_model(tokens: list[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    """Return a BPE model with this vocabulary. Raises ModelError if two tokens have the same text."""
    vocabulary = {text: token for token, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError("The tokenizer has two tokens with the same text.")
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, **options}


def merges_by_score(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Return all merges of two pieces to a third piece, in descending order of the third piece's score."""
    known = set(tokens)
    found = [
        (score, cut, text)
        for text, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
    found.sort(key=lambda merge: (-merge[0], -merge[1], merge[1] - len(merge[2])))
    return [[text[:cut], text[cut:]] for _, cut, text in found]


def add_ends(definition: dict[str, Any], first: Sequence[str | None], last: Sequence[str | None]) -> None:
    """Set the special tokens that encoding adds before (``first``) and after a text (``last``).

    Nones are left out. Raises ModelError.
    """
    ids = {token["content"]: token["id"] for token in definition["added_tokens"]}
    around = [text for text in (*first, *last) if text is not None]
    before, behind = (
        [{"SpecialToken": {"id": text, "type_id": 0}} for text in texts if text is not None] for texts in (first, last)
    )
    pieces: list[dict[str, Any]] = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *behind]
    if missing := [text for text in around if text not in ids]:
        raise ModelError(
            f"The tokenizer puts the token {quoted(missing[0])} around texts, but it is not a control token."
        )
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in around},
    }
