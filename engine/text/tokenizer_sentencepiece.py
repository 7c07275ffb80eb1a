"""SentencePiece tokenizer: converts a ``tokenizer.model`` file to the form of a ``tokenizer.json``.

The file is a Protocol Buffers message and is read as data: pieces with scores and types, the kind of model, and the
normalization of text. The kind BPE is supported, as in Llama 2, Mistral, Yi and InternLM 2. It merges like GGUF files
of the kind ``llama``. The kind Unigram is refused with an error that names it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ModelError, quoted
from .definition_parts import added_token, sentencepiece_definition

SENTENCEPIECE = "tokenizer.model"

# Field numbers of sentencepiece_model.proto. They never change.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _SUFFIX, _BYTE_FALLBACK, _UNKNOWN_ID, _BOS_ID, _EOS_ID = 3, 24, 35, 40, 41, 42
_CHARACTER_MAP, _DUMMY_PREFIX, _EXTRA_SPACES = 2, 3, 4
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_KINDS = {1: "Unigram", 2: "BPE", 3: "words", 4: "characters"}
_BPE = 2
# Tokenizer classes that encode exactly as the file specifies, and add no special tokens but bos and eos.
_CLASSES = ("LlamaTokenizer", "LlamaTokenizerFast", "InternLM2Tokenizer", "InternLMTokenizer", "YiTokenizer", "")


class SentencePieceModel(NamedTuple):
    """The data of the file that is used.

    Attributes:
        definition: content of a ``tokenizer.json``, without the tokens that encoding adds before and after a text.
        special: texts of special tokens by role.
    """

    definition: dict[str, Any]
    special: dict[str, str]


def read_sentencepiece(path: Path, config: dict[str, Any]) -> SentencePieceModel:
    """Read a SentencePiece file.

    Args:
        path: the file.
        config: content of ``tokenizer_config.json``: ``tokenizer_class``, ``legacy``, ``add_prefix_space``.

    Raises:
        ModelError: the file is malformed, or its kind or tokenizer class is not supported exactly.
    """
    name = config.get("tokenizer_class") or ""
    if name not in _CLASSES:
        known = ", ".join(filter(None, _CLASSES))
        raise ModelError(
            f"{path.name} is supported for {known}, not for {quoted(name)}: save it as a fast tokenizer "
            "(tokenizer.json)."
        )
    try:
        model = _Model.of(path.read_bytes())
    except (ValueError, IndexError, struct.error, UnicodeDecodeError) as error:
        raise ModelError(f"{path.name} is not a SentencePiece model: {quoted(error)}.") from error
    if not model.pieces:
        raise ModelError(f"{path.name} has no pieces.")
    _check(path, model)
    tokens = [text for text, _, _ in model.pieces]
    roles = {"unk_token": model.unknown, "bos_token": model.begin, "eos_token": model.end}
    special = {role: tokens[token] for role, token in roles.items() if 0 <= token < len(tokens)}
    prefix = config.get("add_prefix_space")
    added = [
        added_token(token, text, special=kind != _USER_DEFINED)
        for token, (text, _, kind) in enumerate(model.pieces)
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    definition = sentencepiece_definition(
        tokens,
        [score for _, score, _ in model.pieces],
        added,
        unknown=special.get("unk_token"),
        prefix=model.prefix if prefix is None else bool(prefix),
        is_prefixed_once=not config.get("legacy", True),
    )
    return SentencePieceModel(definition, special)


def _check(path: Path, model: _Model) -> None:
    """Raise ModelError for settings that cannot be reproduced exactly."""
    wrong = None
    if model.kind != _BPE:
        wrong = f"is of the kind {_KINDS.get(model.kind, model.kind)}; BPE is supported"
    elif model.character_map:
        wrong = "changes characters before it encodes them (precompiled_charsmap)"
    elif model.drops_spaces:
        wrong = "drops spaces (remove_extra_whitespaces)"
    elif model.suffix:
        wrong = "writes spaces behind words (treat_whitespace_as_suffix)"
    elif not model.byte_fallback:
        wrong = "has no byte_fallback"
    if wrong is not None:
        raise ModelError(f"{path.name} {wrong}: save it as a fast tokenizer (tokenizer.json).")


class _Model(NamedTuple):
    """The pieces as (text, score, type), and the settings. The defaults are the file format's."""

    pieces: list[tuple[str, float, int]]
    kind: int
    byte_fallback: bool
    suffix: bool
    unknown: int
    begin: int
    end: int
    character_map: bytes
    prefix: bool
    drops_spaces: bool

    @classmethod
    def of(cls, data: bytes) -> _Model:
        pieces: list[tuple[str, float, int]] = []
        trainer: dict[int, Any] = {}
        normalizer: dict[int, Any] = {}
        for number, value in _fields(data):
            if number == _PIECES:
                fields = dict(_fields(_message(value)))
                [score] = struct.unpack("<f", fields.get(_SCORE, bytes(4)))
                pieces.append((_message(fields[_TEXT]).decode(), score, int(fields.get(_TYPE, 1))))
            elif number in (_TRAINER, _NORMALIZER):
                (trainer if number == _TRAINER else normalizer).update(_fields(_message(value)))
        return cls(
            pieces,
            kind=trainer.get(_MODEL_TYPE, 1),
            byte_fallback=bool(trainer.get(_BYTE_FALLBACK, 0)),
            suffix=bool(trainer.get(_SUFFIX, 0)),
            unknown=_signed(trainer.get(_UNKNOWN_ID, 0)),
            begin=_signed(trainer.get(_BOS_ID, 1)),
            end=_signed(trainer.get(_EOS_ID, 2)),
            character_map=normalizer.get(_CHARACTER_MAP, b""),
            prefix=bool(normalizer.get(_DUMMY_PREFIX, 1)),
            drops_spaces=bool(normalizer.get(_EXTRA_SPACES, 1)),
        )


def _message(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a number stands for a message")
    return value


def _signed(value: int) -> int:
    """Return an unsigned 64-bit number as a signed one."""
    return value - (1 << 64) if value >> 63 else value


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message as (number, value): numbers as int, all else as bytes. Raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _number(data, at)
            yield number, value
            continue
        size = {1: 8, 5: 4}.get(wire)
        if wire == 2:
            size, at = _number(data, at)
        if size is None or at + size > len(data):
            raise ValueError(f"field {number} is cut off or of an unknown type")
        yield number, data[at : at + size]
        at += size


def _number(data: bytes, at: int) -> tuple[int, int]:
    """Decode a variable-length integer (seven bits in each byte, lowest first).

    Returns it and the position after it.
    """
    value = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError("a number is too long")
