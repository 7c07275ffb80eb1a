"""Tiktoken tokenizer: converts a vocabulary of Kimi K2, Moonlight, Qwen 1 or GLM-4 to the form of a ``tokenizer.json``.

Each line holds a token's bytes in base64 and its rank, which is its id. Two neighbouring tokens whose concatenation is
a token are merged, lowest rank first. A word that is a token is not merged from smaller ones. The file does not specify
how text is split into words: the model's Python code does. This code is never run; its behaviour is known from its
class name.
"""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ModelError, quoted
from .definition_parts import add_ends, added_token
from .gguf_pre_tokenizers import PRE_TOKENIZERS
from .token_bytes import spell


@dataclass(frozen=True, slots=True)
class _Code:
    """The properties that the Python code of a tokenizer class determines.

    Attributes:
        file: name of the vocabulary file.
        words: name in ``PRE_TOKENIZERS`` of the rules by which the class splits text into words.
        special: names of the special tokens after the vocabulary, if the files do not name them.
        reserved: number of special tokens after the vocabulary, with or without names.
        prefix: tokens that are put before texts.
    """

    file: str
    words: str
    special: tuple[str, ...] = ()
    reserved: int = 0
    prefix: tuple[str, ...] = ()


_CLASSES = {
    "TikTokenTokenizer": _Code("tiktoken.model", "kimi-k2", reserved=256),
    "QWenTokenizer": _Code(
        "qwen.tiktoken",
        "qwen2",
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{index}|>" for index in range(205))),
    ),
    "ChatGLM4Tokenizer": _Code("tokenizer.model", "glm4", prefix=("[gMASK]", "<sop>")),
}
TIKTOKEN = ("tiktoken.model", "qwen.tiktoken")
"""Names of files that always contain a tiktoken vocabulary, whatever the tokenizer class is."""


def tiktoken_file(folder: Path, config: dict[str, Any]) -> Path | None:
    """Return the path of a folder's tiktoken vocabulary, None if there is none.

    ``config``: its ``tokenizer_config.json``.
    """
    code = _CLASSES.get(str(config.get("tokenizer_class")))
    names = TIKTOKEN if code is None else (code.file, *TIKTOKEN)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_tiktoken(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Read a tiktoken vocabulary. Returns a tokenizer definition.

    Args:
        path: the file.
        config: content of ``tokenizer_config.json``.

    Raises:
        ModelError: the file is malformed, or the tokenizer class is not known.
    """
    code = _CLASSES.get(str(config.get("tokenizer_class")))
    if code is None:
        raise ModelError(
            f"{path.name} does not say how text is cut into words, and the class "
            f"{quoted(config.get('tokenizer_class'))} is not known; {', '.join(_CLASSES)} are. Save it as a fast "
            "tokenizer."
        )
    if code.file != path.name:
        raise ModelError(
            f"The class {quoted(config.get('tokenizer_class'))} needs {code.file}, but the folder has {path.name}."
        )
    ranks = _ranks(path)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ModelError(f"{path.name} has no token for the byte {missing[0]}.")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"{path.name} does not have one token for each rank from 0 to {len(ranks) - 1}.")
    words = PRE_TOKENIZERS[code.words]
    cuts = [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False}
        for cut in words.expressions
    ]
    spelling = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    definition: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": _special_tokens(code, len(ranks), config),
        "normalizer": {"type": "NFC"} if words.compose else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, spelling]},
        "decoder": spelling,
        "model": {
            "type": "BPE",
            "vocab": {spell(token): rank for token, rank in ranks.items()},
            "merges": _merges(ranks),
            "ignore_merges": True,
        },
    }
    if code.prefix:
        add_ends(definition, code.prefix, [])
    return definition


def _special_tokens(code: _Code, first: int, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the special tokens: those that the class names, those in ``prefix``, and the reserved ones."""
    named = {int(token): entry["content"] for token, entry in (config.get("added_tokens_decoder") or {}).items()}
    texts = {token: text for token, text in named.items() if text in code.prefix}
    texts |= dict(enumerate(code.special, first))
    reserved = set(range(first, first + code.reserved)) - named.keys()
    texts |= {token: f"<|reserved_token_{token}|>" for token in reserved}
    return [added_token(token, text, special=True) for token, text in sorted(texts.items())]


def _ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            text, rank = line.split()
            ranks[base64.b64decode(text, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ModelError(f"{path.name}, line {number} is not a token in base64 and its rank.") from error
    return ranks


def _merges(ranks: dict[bytes, int]) -> list[list[str]]:
    """Return all pairs of tokens whose concatenation is a token, ordered by the rank of that token."""
    found: list[list[str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        found += [[spell(left), spell(right)] for left, right in pairs]
    return found
