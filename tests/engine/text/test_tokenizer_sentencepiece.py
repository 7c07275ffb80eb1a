"""SentencePiece models read as data, against sentencepiece itself and transformers."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats
from support.models.tiny_tokenizers import CORPUS, TEXTS

from rootgraft.engine.errors import ModelError
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.text.tokenizer_files import has_definition

LLAMA = {
    "model_type": "bpe",
    "vocab_size": 400,
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "user_defined_symbols": ["<|mark|>"],
    "control_symbols": ["<|end|>"],
}


def trained(**options: Any) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 5), model_writer=model, minloglevel=2, num_threads=1, **(LLAMA | options)
    )
    return model.getvalue()


MODEL = trained()


def folder(path: Path, model: bytes = MODEL, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "tokenizer.model").write_bytes(model)
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"} | config))
    return path


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    path = folder(tmp_path_factory.mktemp("spm"))
    assert has_definition(path)
    return Tokenizer.load(path), sentencepiece.SentencePieceProcessor(model_proto=MODEL)


PIECES = ["the", " ", "  ", "\n", "\t", "é", "日本", "\U0001f600", "ing", "Th", "<|mark|>", "1", "\u2581", "\u0301"]


@settings(max_examples=repeats(80), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.sampled_from(TEXTS) | st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_ids_are_those_of_sentencepiece(
    both: tuple[Tokenizer, sentencepiece.SentencePieceProcessor], text: str
) -> None:
    ours, theirs = both
    if "<|mark|>" in text or not text:  # an added token splits the text, and each part gets a space: see below
        return
    ids = theirs.encode(text)
    assert ours.encode(text, False).tolist() == ids
    assert ours.encode(text, True).tolist() == [1, *ids]
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("config", [{}, {"add_prefix_space": False}, {"add_bos_token": False, "add_eos_token": True}])
def test_ids_are_those_of_transformers(tmp_path: Path, legacy: bool, config: dict[str, Any]) -> None:
    path = folder(tmp_path, legacy=legacy, **config)
    (path / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 400}))
    ours, theirs = Tokenizer.load(path), transformers.LlamaTokenizer.from_pretrained(path)
    assert (ours.bos_id, ours.eos_ids) == (1, (2,))
    for text in (*filter(None, TEXTS), "the<|mark|>the", "<|mark|> the<|im_start|>the", "a</s>the <|end|>b"):
        # Where ``legacy`` asks for a space in front of a space, SentencePiece has two, and transformers has one.
        if not (legacy and re.search("(^|>) ", text) and config.get("add_prefix_space", True)):
            assert ours.encode(text, False).tolist() == theirs.encode(text, add_special_tokens=False), text
        first, last = config.get("add_bos_token", True), config.get("add_eos_token", False)
        ids = ours.encode(text, False).tolist()
        assert ours.encode(text, True).tolist() == [1] * first + ids + [2] * last


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "unigram", "vocab_size": 340}, "kind Unigram; BPE is supported: save it as a fast"),
        ({"normalization_rule_name": "nmt_nfkc"}, "changes characters.*precompiled_charsmap"),
        ({"remove_extra_whitespaces": True}, "drops spaces"),
        ({"byte_fallback": False}, "no byte_fallback"),
        ({"treat_whitespace_as_suffix": True}, "spaces behind words"),
    ],
)
def test_other_models_are_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(folder(tmp_path, trained(**options)))


def test_other_classes_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is supported for LlamaTokenizer, .*not for 'T5Tokenizer'"):
        Tokenizer.load(folder(tmp_path, tokenizer_class="T5Tokenizer"))
    assert Tokenizer.load(folder(tmp_path, auto_map={"AutoTokenizer": ["x.py"]})).vocab_size == 400


@given(cut=st.integers(0, len(MODEL) - 1), change=st.integers(0, 255))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files_are_refused_or_read(tmp_path: Path, cut: int, change: int) -> None:
    for data in (MODEL[:cut], MODEL[:cut] + bytes([change]) + MODEL[cut + 1 :]):
        try:
            Tokenizer.load(folder(tmp_path, data))
        except ModelError:
            continue
