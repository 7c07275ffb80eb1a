"""Reads the tokenizer of a GGUF file in the form of a ``tokenizer.json``.

A GGUF file holds the vocabulary under llama.cpp's names (``tokenizer.ggml.*``). Two kinds are supported:

    gpt2     byte-level BPE: pieces spell bytes in GPT-2's alphabet; ``tokenizer.ggml.pre`` names how text is cut into
             words before merging
    llama    SentencePiece BPE: a space is written as U+2581, unknown characters fall back to byte pieces, and the order
             of merges follows from the scores of the pieces

Where llama.cpp and the model's original tokenizer differ, the original is followed (Qwen2 composes Unicode first).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..checkpoint.gguf import GgufFile
from ..checkpoint.gguf_end_tokens import gguf_end_tokens
from ..errors import ModelError, quoted
from .tokenizer_files import TokenizerFiles, added_token

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_SPACE = "\u2581"
_GEMMA = ("gemma", "gemma2", "gemma3")

# Contractions, words, numbers of one or of up to three digits, punctuation, line ends, other white space.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_SLASHED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _byte_level(*, words: bool) -> dict[str, Any]:
    """Spell bytes in GPT-2's alphabet; with ``words``, first cut by GPT-2's own expression."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}


def _cut(expression: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(words=False)]


_GPT2 = [_byte_level(words=True)]
_SINGLE_DIGITS = [{"type": "Digits", "individual_digits": True}, _byte_level(words=True)]
_LLAMA3 = _cut(_WORDS + r"\p{N}{1,3}" + _REST)
_QWEN2 = _cut(_WORDS + r"\p{N}" + _REST)
_TEKKEN = _cut("".join(f"{words}|" for words in _CASED_WORDS) + r"\p{N}" + _SLASHED_REST)
_CONTRACTED_WORDS = "".join(f"{words}(?i:'s|'t|'re|'ve|'m|'ll|'d)?|" for words in _CASED_WORDS)
_GPT4O = _cut(_CONTRACTED_WORDS + r"\p{N}{1,3}" + _SLASHED_REST)

# tokenizer.ggml.pre -> pre-tokenizers in order.
_PRE_TOKENIZERS = {
    "gpt-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "chatglm-bpe": _LLAMA3,
    "glm4": _LLAMA3,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_WHOLE_WORDS_FIRST = (_LLAMA3, _TEKKEN, _GPT4O)  # a word that is a piece is not merged from smaller ones
_BEGIN_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")


def read_gguf(path: Path) -> TokenizerFiles:
    """Read the tokenizer in a GGUF file.

    Raises:
        ModelError: not a GGUF file, no tokenizer in it, or one of a kind that is not supported exactly.
    """
    metadata = GgufFile.open(path).metadata
    kind = _get(metadata, "model")
    if kind == "gpt2":
        definition, bos_default = _byte_level_bpe(metadata)
    elif kind == "llama":
        definition, bos_default = _sentencepiece_bpe(metadata), True
    else:
        raise ModelError(f"The GGUF file's tokenizer is of the kind {quoted(kind)}; supported are 'gpt2' and 'llama'.")
    special = _special(metadata)
    first = special.get("bos_token") if _get(metadata, "add_bos_token", bos_default) else None
    last = special.get("eos_token") if _get(metadata, "add_eos_token", False) else None
    _wrap(definition, first, last)
    ends = tuple(map(int, gguf_end_tokens(metadata)))
    return TokenizerFiles(definition, special, ends, _templates(metadata))


def _has(metadata: dict[str, Any], key: str) -> bool:
    return f"tokenizer.ggml.{key}" in metadata


def _get(metadata: dict[str, Any], key: str, default: Any = None) -> Any:
    """Return a value of the tokenizer. Raises ModelError if it is missing without a default."""
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


def _wrap(definition: dict[str, Any], first: str | None, last: str | None) -> None:
    """Add the tokens ``first`` and ``last`` around texts that are encoded with special tokens."""
    ids = {token["content"]: token["id"] for token in definition["added_tokens"]}
    pieces: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    if first is not None:
        pieces.insert(0, {"SpecialToken": {"id": first, "type_id": 0}})
    if last is not None:
        pieces.append({"SpecialToken": {"id": last, "type_id": 0}})
    around = [text for text in (first, last) if text is not None]
    if missing := [text for text in around if text not in ids]:
        raise ModelError(
            f"The GGUF file's token {quoted(missing[0])} is to stand around texts, but is no control token."
        )
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [*pieces, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in around},
    }


def _byte_level_bpe(metadata: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a definition, and whether texts begin with the bos token where the file does not say."""
    pre = _get(metadata, "pre", "nothing")
    if pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(
            f"The GGUF file names {quoted(pre)} as its pre-tokenizer (tokenizer.ggml.pre); known are {known}."
        )
    if _get(metadata, "add_space_prefix", False):
        raise ModelError("The GGUF file asks for a space before each text (add_space_prefix): not supported for gpt2.")
    tokens = _get(metadata, "tokens")
    merges = [merge.split(" ") for merge in _get(metadata, "merges")]
    steps = _PRE_TOKENIZERS[pre]
    definition = {
        "version": "1.0",
        "added_tokens": _added_tokens(metadata, tokens, (_CONTROL,)),
        "normalizer": {"type": "NFC"} if steps is _QWEN2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _byte_level(words=True),
        "model": _bpe(tokens, merges, ignore_merges=steps in _WHOLE_WORDS_FIRST),
    }
    return definition, pre in _BEGIN_BY_DEFAULT


def _sentencepiece_bpe(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens, scores = list(_get(metadata, "tokens")), list(_get(metadata, "scores"))
    architecture = metadata.get("general.architecture")
    if architecture in _GEMMA:
        # Runs of spaces are pieces, and pieces were merged in the order of their ids, not of their scores.
        tokens = [_SPACE * len(text) if text and not text.strip(" ") else text for text in tokens]
        scores = [-token for token in range(len(tokens))]
    prefix = bool(_get(metadata, "add_space_prefix", True))
    to_marks: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    to_spaces = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders = [to_spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        to_marks = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, to_marks]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = tokens[int(_get(metadata, "unknown_token_id", 0))]
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(metadata, tokens, (_UNKNOWN, _CONTROL), rstrip=architecture == "phi3"),
        "normalizer": to_marks,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(tokens, _merges(tokens, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True),
    }


def _bpe(tokens: list[str], merges: list[list[str]], **options: Any) -> dict[str, Any]:
    vocabulary = {text: token for token, text in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelError("The GGUF file's tokenizer has two tokens of the same text.")
    return {"type": "BPE", "vocab": vocabulary, "merges": merges, **options}


# Phi-3 drops white space after its control tokens except these.
_KEEP_SPACE_AFTER = ("<unk>", "<s>", "<|endoftext|>")


def _added_tokens(
    metadata: dict[str, Any], tokens: list[str], special: tuple[int, ...], *, rstrip: bool = False
) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before normalization: control and user-defined tokens."""
    types = [int(kind) for kind in _get(metadata, "token_type")]
    if len(types) != len(tokens):
        raise ModelError(f"The GGUF file has {len(tokens)} tokens, but types for {len(types)}.")
    return [
        added_token(
            token,
            text,
            special=kind in special,
            rstrip=rstrip and kind == _CONTROL and text not in _KEEP_SPACE_AFTER,
        )
        for token, (text, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in special or kind == _USER_DEFINED
    ]


def _merges(tokens: list[str], scores: list[float]) -> list[list[str]]:
    """Return all merges of two pieces to a third, best piece first."""
    if len(scores) != len(tokens):
        raise ModelError(f"The GGUF file has {len(tokens)} tokens, but scores for {len(scores)}.")
    known = set(tokens)
    found = [
        (score, cut, text)
        for text, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
    found.sort(key=lambda merge: (-merge[0], -merge[1], merge[1] - len(merge[2])))
    return [[text[:cut], text[cut:]] for _, cut, text in found]
