"""Reads a tiktoken vocabulary, ``tiktoken.model`` of Kimi K2 and Moonlight, in the form of a ``tokenizer.json``.

Each line has a token's bytes in base64 and its rank, which is its id. Any two neighbours that together are a token
merge, those of the lowest rank first; a word that is a token is not merged from smaller ones. How text is cut into
words is not in the file but in the model's Python code, which is never run: it is known for Kimi's class alone.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from ..errors import ModelError, quoted
from .gguf_pre_tokenizers import PRE_TOKENIZERS
from .token_bytes import spell

TIKTOKEN = "tiktoken.model"
_KIMI = "TikTokenTokenizer"
_RESERVED = 256  # ids behind the vocabulary, special tokens all of them


def read_tiktoken(path: Path, config: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    """Return the definition of a vocabulary, and the ids of special tokens behind it that have no name.

    Args:
        path: the file.
        config: content of ``tokenizer_config.json``.

    Raises:
        ModelError: it is malformed, or of another class than Kimi's.
    """
    if config.get("tokenizer_class") != _KIMI:
        raise ModelError(
            f"{path.name} does not say how text is cut into words, and the class "
            f"{quoted(config.get('tokenizer_class'))} is not known; {_KIMI} is. Save it as a fast tokenizer."
        )
    ranks = _ranks(path)
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ModelError(f"{path.name} has no token for the byte {missing[0]}.")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"{path.name} does not have one token for each rank from 0 to {len(ranks) - 1}.")
    named = {int(token) for token in config.get("added_tokens_decoder") or {}}
    others = sorted(set(range(len(ranks), len(ranks) + _RESERVED)) - named)
    expressions = PRE_TOKENIZERS["kimi-k2"].expressions
    cuts = [
        {"type": "Split", "pattern": {"Regex": cut}, "behavior": "Isolated", "invert": False} for cut in expressions
    ]
    spelling = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    definition: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, spelling]},
        "decoder": spelling,
        "model": {
            "type": "BPE",
            "vocab": {spell(token): rank for token, rank in ranks.items()},
            "merges": _merges(ranks),
            "ignore_merges": True,
        },
    }
    return definition, others


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
    """Return all pairs of tokens that together are one, by its rank."""
    found: list[list[str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        found += [[spell(left), spell(right)] for left, right in pairs]
    return found
