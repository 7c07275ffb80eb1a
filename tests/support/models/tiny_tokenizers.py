"""Tiny tokenizers of the kinds that real models have, trained here, as folders and as GGUF files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(12, 345))  # 357",
    "Größe, café, naïve, Ångström, 日本語のテキスト, русский текст, 😀😀🎉",
    "the the the and and and of of to to in in is is  two  spaces   three",
    "It's, we're, I'll, they've; DON'T SHOUT. e.g. https://example.org/a?b=c&d=1",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "",
    " ",
    "   ",
    "Hello world",
    " leading and trailing ",
    "two  spaces   three\n\n\nlines\t tabs\r\n",
    "The fox doesn't; WE'RE they've it'S",
    "numbers 1 12 123 1234 12345.678 ½ ²",
    "Größe café cafe\u0301 naïve",
    "日本語のテキスト русский текст العربية עברית हिन्दी",
    "😀🎉 👩‍👩‍👧‍👦 🇩🇪 \u200d\ufe0f",
    "def f(x):\n    return x**2  # code\n",
    "\x00\x01\x7f\x80 controls \u2028 \ufffd",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "broken <|im_start and <|im_end| >",
    "a" * 300,
]


def train_byte_level() -> tokenizers.Tokenizer:
    """GPT-2's kind: about 400 tokens and three special ones in front."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        CORPUS * 5,
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    return tokenizer


def sentencepiece_definition(*, prefix: bool = True) -> dict[str, Any]:
    """Llama 2's kind: unknown, bos and eos, 256 byte pieces, then merged pieces in the order of their merges."""
    marks: list[Any] = [normalizers.Replace(" ", "\u2581")]
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *marks])
    trained.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    trained.train_from_iterator(CORPUS * 5, trainers.BpeTrainer(vocab_size=300, show_progress=False))
    bpe = json.loads(trained.to_str())["model"]
    pieces = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        marks.insert(0, normalizers.Prepend("\u2581"))
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab={text: token for token, text in enumerate(tokens)},
            merges=[tuple(merge) for merge in bpe["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(marks)
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    definition: dict[str, Any] = json.loads(tokenizer.to_str())
    return definition


def write_folder(folder: Path, definition: dict[str, Any] | str, **config: Any) -> Path:
    """A model folder with nothing but a tokenizer; ``config`` is its ``tokenizer_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = definition if isinstance(definition, str) else json.dumps(definition)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def write_gguf(path: Path, definition: dict[str, Any], kind: str, architecture: str = "llama", **values: Any) -> Path:
    """A GGUF file with the vocabulary of ``definition``; ``values`` are further ``tokenizer.ggml`` keys."""
    vocabulary = definition["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = {token["content"] for token in definition["added_tokens"]}
    writer = gguf.GGUFWriter(path, architecture)
    for key in ("context_length", "block_count", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"{architecture}.{key}", 8)
    for key in ("attention.head_count", "attention.head_count_kv"):
        writer.add_uint32(f"{architecture}.{key}", 1)
    writer.add_uint32(f"{architecture}.vocab_size", len(tokens))
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types([_token_type(text, special) for text in tokens])
    if kind in ("gpt2", "gemma4"):
        writer.add_token_merges([" ".join(merge) for merge in definition["model"]["merges"]])
    else:
        writer.add_token_scores([-float(token) for token in range(len(tokens))])
    for key, value in values.items():
        _add_value(writer, f"tokenizer.{key.replace('__', '.')}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _token_type(text: str, special: set[str]) -> int:
    if text == "<unk>":
        return gguf.TokenType.UNKNOWN
    if text in special:
        return gguf.TokenType.CONTROL
    return gguf.TokenType.BYTE if text.startswith("<0x") else gguf.TokenType.NORMAL


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_string(key, value)
