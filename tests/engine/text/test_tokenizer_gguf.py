"""Tokenizers from GGUF files, against transformers and against the tokenizers that the files were made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import transformers
from support.models.tiny_tokenizers import TEXTS, sentencepiece_definition, train_byte_level, write_gguf
from tokenizers import normalizers, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from rootgraft.engine.errors import ModelError
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


LIKE = {"chatglm-bpe": "llama3", "glm4": "llama3"}  # names that transformers does not know: llama.cpp's are the same
PRE_TOKENIZERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
} | {
    name: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[LIKE.get(name, name)]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for name in (
        *("llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "tekken"),
        *("falcon3", "gpt-4o", "llama4", "chatglm-bpe", "glm4"),
    )
}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizers(tmp_path: Path, name: str) -> None:
    theirs = train_byte_level()
    theirs.pre_tokenizer = PRE_TOKENIZERS[name]
    if name in ("qwen2", "deepseek-r1-qwen"):
        theirs.normalizer = normalizers.NFC()
    definition = json.loads(theirs.to_str())
    ends = {"ggml__bos_token_id": 0, "ggml__eos_token_id": 2, "ggml__add_bos_token": False}
    ours = Tokenizer.load(write_gguf(tmp_path / "a.gguf", definition, "gpt2", ggml__pre=name, **ends))
    definition["model"]["ignore_merges"] = name in PRE_TOKENIZERS and name not in (
        *("gpt-2", "smollm", "starcoder", "qwen2", "deepseek-r1-qwen"),
    )
    theirs = tokenizers.Tokenizer.from_str(json.dumps(definition))
    for text in TEXTS:
        ids = ours.encode(text, True).tolist()
        assert ids == theirs.encode(text).ids
        assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)


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
        ("t5", {}, "'t5'; supported are 'gpt2' and 'llama'"),
        ("gpt2", {}, "names 'nothing' as its pre-tokenizer"),
        ("gpt2", {"ggml__pre": "command-r"}, "'command-r'.*known are gpt-2, smollm"),
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
