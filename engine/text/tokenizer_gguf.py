"""GGUF tokenizer: converts the tokenizer of a GGUF file to the form of a ``tokenizer.json``.

A GGUF file holds the vocabulary under llama.cpp's names (``tokenizer.ggml.*``). Three kinds are supported:

    gpt2     byte-level BPE: pieces spell bytes in GPT-2's alphabet; ``tokenizer.ggml.pre`` names the way in which text
             is split into words before merging
    llama    SentencePiece BPE: a space is written as U+2581, unknown characters fall back to byte pieces, and the order
             of merges follows from the scores of the pieces
    gemma4   SentencePiece BPE with its own list of merges; ``gpt2`` with a pre-tokenizer of that kind is the same

If llama.cpp and the model's original tokenizer differ, the original is followed. For example, Qwen2 normalizes Unicode
text first (NFC).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoint.gguf import GgufFile
from ..checkpoint.gguf_end_tokens import gguf_end_tokens
from ..errors import ModelError, quoted
from .definition_parts import SPACE, TO_TEXT, add_ends, added_token, bpe_model, sentencepiece_definition
from .gguf_pre_tokenizers import DIGIT, GPT2, PRE_TOKENIZERS, PreTokenizer
from .tokenizer_files import TokenizerFiles

# Values of tokenizer.ggml.token_type.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_GEMMA = ("gemma", "gemma2", "gemma3")
_OTHER_KINDS = {
    "bert": " (WordPiece, of encoders)",
    "t5": " (Unigram)",
    "rwkv": " (RWKV)",
    "plamo2": " (PLaMo 2)",
    "hybriddna": " (DNA)",
    "whitespace": " (of encoders)",
}


def _byte_level(*, words: bool) -> dict[str, Any]:
    """Return the step that spells bytes in GPT-2's alphabet; with ``words``, it first splits by GPT-2's expression."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}


def _steps(expressions: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the pre-tokenizer steps that split a text by each expression in turn and then spell bytes."""
    ends_as_gpt2 = expressions[-1] == GPT2
    cuts = expressions[:-1] if ends_as_gpt2 else expressions
    return [*map(_cut, cuts), _byte_level(words=ends_as_gpt2)]


def _cut(expression: str) -> dict[str, Any]:
    if expression == DIGIT:
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def read_gguf(path: Path) -> TokenizerFiles:
    """Read the tokenizer in a GGUF file.

    Raises:
        ModelError: the file is not a GGUF file, it has no tokenizer, or its kind of tokenizer is not supported exactly.
    """
    metadata = GgufFile.open(path).metadata
    kind = _get(metadata, "model")
    if kind == "gpt2":
        definition, bos_default = _with_merges(metadata, _pre_tokenizer(metadata))
    elif kind == "gemma4":
        definition, bos_default = _with_merges(metadata, PRE_TOKENIZERS[kind])
    elif kind == "llama":
        definition, bos_default = _sentencepiece_bpe(metadata), True
    else:
        raise ModelError(
            f"The GGUF file's tokenizer is of the kind {quoted(kind)}{_OTHER_KINDS.get(kind, '')}; supported are "
            "'gpt2' (byte-level BPE), 'llama' (SentencePiece BPE) and 'gemma4'."
        )
    special = _special(metadata)
    first = special.get("bos_token") if _get(metadata, "add_bos_token", bos_default) else None
    last = special.get("eos_token") if _get(metadata, "add_eos_token", False) else None
    add_ends(definition, [first], [last])
    ends = tuple(map(int, gguf_end_tokens(metadata)))
    return TokenizerFiles(definition, special, ends, _templates(metadata))


def _has(metadata: dict[str, Any], key: str) -> bool:
    return f"tokenizer.ggml.{key}" in metadata


def _get(metadata: dict[str, Any], key: str, default: Any = None) -> Any:
    """Return an entry of ``tokenizer.ggml``. Raises ModelError if it is missing and there is no default."""
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if value is None:
        raise ModelError(f"The GGUF file has no tokenizer.ggml.{key}.")
    return value


def _special(metadata: dict[str, Any]) -> dict[str, str]:
    tokens = _get(metadata, "tokens")
    roles = {role: int(_get(metadata, key)) for role, key in _ROLES.items() if _has(metadata, key)}
    for role, token in roles.items():
        if not 0 <= token < len(tokens):
            raise ModelError(f"The GGUF file's {role} is {token}, but it has {len(tokens)} tokens.")
    return {role: tokens[token] for role, token in roles.items()}


def _templates(metadata: dict[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    usual = metadata.get("tokenizer.chat_template")
    return named if usual is None else {**named, "default": usual}


def _pre_tokenizer(metadata: dict[str, Any]) -> PreTokenizer:
    """Return the pre-tokenizer that a file names. Raises ModelError if it is not known."""
    name = _get(metadata, "pre", "default")
    if (kind := PRE_TOKENIZERS.get(name)) is not None:
        return kind
    if name == "default":
        raise ModelError(
            "The GGUF file does not say how its vocabulary cuts text into words (tokenizer.ggml.pre), like files of "
            "early 2024: give the original tokenizer's folder with --tokenizer, or a newer file."
        )
    raise ModelError(
        f"The GGUF file names {quoted(name)} as its pre-tokenizer (tokenizer.ggml.pre), which is not known: give the "
        f"original tokenizer's folder with --tokenizer. Known are {', '.join(PRE_TOKENIZERS)}."
    )


def _with_merges(metadata: dict[str, Any], kind: PreTokenizer) -> tuple[dict[str, Any], bool]:
    """Return the definition of a BPE with a list of merges, and whether encoding adds bos if the file says nothing."""
    if _get(metadata, "add_space_prefix", False):
        raise ModelError("The GGUF file asks for a space before each text (add_space_prefix): not supported for gpt2.")
    tokens = _get(metadata, "tokens")
    merges = [_merge(text) for text in _get(metadata, "merges")]
    if kind.spaced:
        return _spaced(metadata, tokens, merges), kind.begin
    definition = {
        "version": "1.0",
        "added_tokens": _added_tokens(metadata, tokens, (_CONTROL,)),
        "normalizer": {"type": "NFC"} if kind.compose else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _steps(kind.expressions)},
        "decoder": _byte_level(words=True),
        "model": bpe_model(tokens, merges, ignore_merges=kind.whole_words),
    }
    return definition, kind.begin


def _merge(text: str) -> list[str]:
    """Split a merge at the space between its two parts. Neither part is empty."""
    cut = text.find(" ", 1)
    return [text[:cut], text[cut + 1 :]]


def _spaced(metadata: dict[str, Any], tokens: list[str], merges: list[list[str]]) -> dict[str, Any]:
    """Return the definition of a SentencePiece BPE with a list of merges, no word splitting and no prefix space."""
    unknown = tokens[int(_get(metadata, "unknown_token_id"))] if _has(metadata, "unknown_token_id") else None
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(metadata, tokens, (_UNKNOWN, _CONTROL)),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": list(TO_TEXT)},
        "model": bpe_model(tokens, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _sentencepiece_bpe(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens, scores = list(_get(metadata, "tokens")), list(_get(metadata, "scores"))
    architecture = metadata.get("general.architecture")
    if architecture in _GEMMA:
        # Runs of spaces are single pieces. The pieces are merged in the order of their ids, not of their scores.
        tokens = [SPACE * len(text) if text and not text.strip(" ") else text for text in tokens]
        scores = [-token for token in range(len(tokens))]
    prefix = bool(_get(metadata, "add_space_prefix", True))
    if len(scores) != len(tokens):
        raise ModelError(f"The GGUF file has {len(tokens)} tokens, but scores for {len(scores)}.")
    added = _added_tokens(metadata, tokens, (_UNKNOWN, _CONTROL), rstrip=architecture == "phi3")
    return sentencepiece_definition(
        tokens, scores, added, unknown=tokens[int(_get(metadata, "unknown_token_id", 0))], prefix=prefix
    )


# Phi-3 drops white space after its control tokens, except after these three.
_KEEPSPACE_AFTER = ("<unk>", "<s>", "<|endoftext|>")


def _added_tokens(
    metadata: dict[str, Any], tokens: list[str], special: tuple[int, ...], *, rstrip: bool = False
) -> list[dict[str, Any]]:
    """Return the control and user-defined tokens, which are found in a text before normalization."""
    types = [int(kind) for kind in _get(metadata, "token_type")]
    if len(types) != len(tokens):
        raise ModelError(f"The GGUF file has {len(tokens)} tokens, but types for {len(types)}.")
    return [
        added_token(
            token,
            text,
            special=kind in special,
            rstrip=rstrip and kind == _CONTROL and text not in _KEEPSPACE_AFTER,
        )
        for token, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in special or kind == _USER_DEFINED
    ]
