"""Tokenizers from GGUF files, against transformers and against the tokenizers that the files were made from."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import transformers
from support.models.tiny_tokenizers import TEXTS, sentencepiece_definition, train_byte_level, write_gguf
from tokenizers import normalizers, pre_tokenizers

from rootgraft.engine.errors import ModelError
from rootgraft.engine.text.gguf_pre_tokenizers import PRE_TOKENIZERS
from rootgraft.engine.text.tokenizer import Tokenizer

SINGLE_DIGITS = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)


def oracle(path: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf: Path) -> tuple[Tokenizer, Any]:
    """Ours and transformers', which leaves out that SmolLM2 cuts numbers into digits."""
    theirs = oracle(smollm2_gguf)
    theirs.backend_tokenizer.pre_tokenizer = SINGLE_DIGITS
    return Tokenizer.load(smollm2_gguf), theirs


@pytest.mark.parametrize("text", TEXTS)
def test_default_model(smollm2: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = smollm2
    ids = ours.encode(text, True).tolist()
    assert ids == theirs.encode(text)
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_default_model_facts(smollm2: tuple[Tokenizer, Any]) -> None:
    ours, theirs = smollm2
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (49152, 1, (0, 2, 4))
    assert ours.special_ids == set(range(17))
    assert b"".join(map(ours.token_bytes, ours.encode("a 12 é🎉<|im_end|>", False))) == "a 12 é🎉<|im_end|>".encode()
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    for prompt in (False, True):
        text = ours.render_chat(conversation, add_generation_prompt=prompt)
        assert text == theirs.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompt)


FIRST = ["llama-bpe", "llama3", "tekken", "gpt-4o", "kimi-k2", "glm4", "youtu", "minicpm5", "lfm2"]
PIECES = ["gpt-2", "smollm", "qwen2", "qwen35", "command-r", "deepseek-v3", "dbrx", "mpt", *FIRST]
COMPOSE = ("qwen2", "qwen35", "command-r", "mpt")


@pytest.mark.parametrize("name", PIECES)
def test_byte_level_equals_its_original(tmp_path: Path, name: str) -> None:
    """Normalizer, merges, whole words first and decoding, where the words are known to be right (see below)."""
    theirs = train_byte_level()
    splits = [pre_tokenizers.Split(tokenizers.Regex(e), "isolated") for e in PRE_TOKENIZERS[name].expressions]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    if name in COMPOSE:
        theirs.normalizer = normalizers.NFC()
    definition = json.loads(theirs.to_str())
    ends = {"ggml__bos_token_id": 0, "ggml__eos_token_id": 2, "ggml__add_bos_token": False}
    ours = Tokenizer.load(write_gguf(tmp_path / "a.gguf", definition, "gpt2", ggml__pre=name, **ends))
    definition["model"]["ignore_merges"] = name in FIRST
    theirs = tokenizers.Tokenizer.from_str(json.dumps(definition))
    for text in TEXTS:
        ids = ours.encode(text, True).tolist()
        assert ids == theirs.encode(text).ids
        assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)


def test_gemma4_equals_transformers(tmp_path: Path) -> None:
    """Merges are listed, and pieces may hold line ends."""
    definition = sentencepiece_definition(prefix=False)
    for text in ("\n", "\n\n", "\n\n\n"):
        definition["model"]["vocab"].setdefault(text, len(definition["model"]["vocab"]))
    definition["model"]["merges"] += [["\n", "\n"], ["\n\n", "\n"]]
    merges = definition["model"]["merges"]
    vocabulary = definition["model"]["vocab"]
    theirs = transformers.GemmaTokenizer(vocab=vocabulary, merges=[tuple(pair) for pair in merges])
    ends = {"ggml__bos_token_id": 1, "ggml__eos_token_id": 2, "ggml__unknown_token_id": 0}
    path = write_gguf(tmp_path / "a.gguf", definition, "gemma4", "gemma4", **ends)
    ours = Tokenizer.load(path)
    for text in TEXTS:
        ids = ours.encode(text, False).tolist()
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text
        assert ours.encode(text, True).tolist() == [1, *ids]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_equals_its_original(tmp_path: Path, prefix: bool) -> None:
    """The file has no merges, only scores; the tokenizer that it was made from has them from training."""
    definition = sentencepiece_definition(prefix=prefix)
    values = {"ggml__bos_token_id": 1, "ggml__eos_token_id": 2, "ggml__add_space_prefix": prefix}
    ours = Tokenizer.load(write_gguf(tmp_path / "a.gguf", definition, "llama", **values))
    theirs = tokenizers.Tokenizer.from_str(json.dumps(definition))
    assert ours.special_ids == {0, 1, 2}
    for text in TEXTS:
        ids = ours.encode(text, False).tolist()
        assert ids == theirs.encode(text).ids
        assert ours.encode(text, True).tolist() == [1, *ids]  # bos by default
        assert ours.decode([1, *ids], False) == theirs.decode([1, *ids], skip_special_tokens=False)


@pytest.mark.parametrize("architecture", ["phi3", "gemma2"])
def test_sentencepiece_equals_transformers(tmp_path: Path, architecture: str) -> None:
    prefix = architecture == "phi3"
    definition = sentencepiece_definition(prefix=prefix)
    values = {
        "ggml__bos_token_id": 1,
        "ggml__eos_token_id": 2,
        "ggml__unknown_token_id": 0,
        "ggml__add_space_prefix": prefix,
        "ggml__add_bos_token": True,
    }
    path = write_gguf(tmp_path / "a.gguf", definition, "llama", architecture, **values)
    ours, theirs = Tokenizer.load(path), oracle(path)
    for text in TEXTS:
        ids = ours.encode(text, False).tolist()
        assert ids == theirs.encode(text, add_special_tokens=False)


def test_phi3_drops_space_after_control_tokens(tmp_path: Path) -> None:
    definition = sentencepiece_definition()
    values = {"ggml__bos_token_id": 1, "ggml__eos_token_id": 2, "ggml__add_bos_token": False}
    ours = Tokenizer.load(write_gguf(tmp_path / "a.gguf", definition, "llama", "phi3", **values))
    assert ours.encode("the</s> \n the", False) == ours.encode("the</s>the", False)
    assert ours.encode("the<s> \n the", False) != ours.encode("the<s>the", False)


def test_templates_ends_and_user_defined_tokens(tmp_path: Path) -> None:
    definition = json.loads(train_byte_level().to_str())
    values = {
        "ggml__pre": "gpt-2",
        "ggml__bos_token_id": 0,
        "ggml__eos_token_id": 2,
        "ggml__eot_token_id": 1,
        "ggml__add_bos_token": True,
        "ggml__add_eos_token": True,
        "chat_template": "usual {{ eos_token }}",
        "chat_template__tool_use": "with tools",
    }
    ours = Tokenizer.load(write_gguf(tmp_path / "a.gguf", definition, "gpt2", **values))
    assert ours.eos_ids == (0, 1, 2)
    ids = ours.encode("the", True)
    assert (ids[0], ids[-1]) == (0, 2)
    assert ours.render_chat([{}]) == "usual <|im_end|>"
    assert ours.render_chat([{}], tools=[{}]) == "with tools"


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("t5", {}, r"'t5' \(Unigram\); supported are 'gpt2'"),
        ("bert", {}, r"'bert' \(WordPiece, of encoders\)"),
        ("gpt2", {}, "does not say how its vocabulary cuts text into words.*--tokenizer"),
        ("gpt2", {"ggml__pre": "default"}, "does not say how its vocabulary cuts text into words.*--tokenizer"),
        ("gpt2", {"ggml__pre": "new-one"}, "names 'new-one' as its pre-tokenizer.*--tokenizer.*Known are gpt-2, phi-2"),
        ("gpt2", {"ggml__pre": "gpt-2", "ggml__add_space_prefix": True}, "add_space_prefix"),
        ("gpt2", {"ggml__pre": "gpt-2", "ggml__eos_token_id": 9999}, "eos_token is 9999, but it has 420 tokens"),
    ],
)
def test_refused_files(tmp_path: Path, kind: str, values: dict[str, Any], message: str) -> None:
    definition = json.loads(train_byte_level().to_str())
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(write_gguf(tmp_path / "a.gguf", definition, kind, **values))


def test_file_without_tokenizer_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"no tokenizer\.ggml\.model"):
        Tokenizer.load(tmp_path / "a.gguf")


VOCABULARIES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt"),
    *("phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)


@pytest.mark.heavy
@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabularies_of_llama_cpp(llama_cpp_models: Path, name: str) -> None:
    """The ids are those that llama.cpp expects, of composed texts where the original composes them."""
    path = llama_cpp_models / f"ggml-vocab-{name}.gguf"
    ours = Tokenizer.load(path)
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = path.with_suffix(".gguf.out").read_text().splitlines()
    pairs = [(text, [int(token) for token in ids.split()]) for text, ids in zip(texts, expected, strict=False)]
    assert len(pairs) >= 46
    if name in ("qwen2", "qwen35", "command-r", "mpt"):
        for text, _ in pairs:
            assert ours.encode(text, False) == ours.encode(unicodedata.normalize("NFC", text), False)
        pairs = [(text, ids) for text, ids in pairs if unicodedata.is_normalized("NFC", text)]
    assert [(text, ours.encode(text, False).tolist()) for text, _ in pairs] == pairs


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("name", "message"),
    [("aquila", "--tokenizer"), ("gpt-neox", "--tokenizer"), ("bert-bge", "WordPiece"), ("nomic-bert-moe", "Unigram")],
)
def test_vocabularies_of_llama_cpp_that_are_refused(llama_cpp_models: Path, name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(llama_cpp_models / f"ggml-vocab-{name}.gguf")
