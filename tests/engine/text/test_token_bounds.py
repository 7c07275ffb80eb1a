"""Fewest tokens of a text: never more than it has, and enough to refuse what is far too long."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models.tiny_tokenizers import TEXTS, sentencepiece_definition, write_folder

from rootgraft.engine.errors import ContextTooLong
from rootgraft.engine.messages import Ready
from rootgraft.engine.serving.async_engine import AsyncEngine
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.text.token_bounds import read_bounds
from rootgraft.engine.text.tokenizer import Tokenizer

LETTERS = st.text(alphabet=st.sampled_from("aexyz0 \n-_=.,é漢🎉 "), max_size=300)


@pytest.fixture(scope="module")
def real(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_gguf)


@given(text=st.text(max_size=300) | LETTERS | LETTERS.map(lambda text: text * 20))
def test_no_text_has_fewer(real: Tokenizer, text: str) -> None:
    assert real.fewest_tokens(text) <= len(real.encode(text, False))


def test_no_text_of_a_sentencepiece_model_has_fewer(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sentencepiece_definition(), bos_token="<s>", eos_token="</s>")
    tokenizer = Tokenizer.load(folder)
    for text in (*TEXTS, "a" * 1000, " " * 1000, "the fox" * 100):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, False))


def test_what_is_far_too_long_is_refused_without_encoding(real: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    client: Any = SimpleNamespace()
    async_engine = AsyncEngine(cast(EngineClient, client), real, Ready(8192, real.vocab_size, 10, 16, ()))
    async_engine.check_length("x" * 8000)
    async_engine.check_length("\ud800" * 9000)  # lone surrogates are told of where the text is encoded
    for text in ("x" * 1_000_000, "ab cd " * 100_000, "12 " * 400_000):
        with pytest.raises(ContextTooLong, match="at least") as caught:
            async_engine.check_length(text)
        assert caught.value.code == "context_length_exceeded"


def definition(real: Tokenizer, **changes: Any) -> dict[str, Any]:
    return {**json.loads(real._backend.to_str()), **changes}


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"added_tokens": [{"content": "<x>", "rstrip": True}]},
        {"model": {"type": "WordPiece"}},
    ],
)
def test_nothing_is_certain_where_parts_of_a_text_may_be_left_out(real: Tokenizer, changes: dict[str, Any]) -> None:
    pieces = list(real._bytes.values())
    assert read_bounds(definition(real), pieces) is not None
    assert read_bounds(definition(real, **changes), pieces) is None


def test_bytes_without_a_token_are_not_counted(real: Tokenizer) -> None:
    pieces = [piece for piece in real._bytes.values() if piece != b"a"]
    bounds = read_bounds(definition(real), pieces)
    assert bounds is not None and bounds.fewest_tokens("a" * 10_000) == 0 < bounds.fewest_tokens("b" * 10_000)


def test_composed_characters_are_no_proof(real: Tokenizer) -> None:
    bounds = read_bounds(definition(real, normalizer={"type": "NFC"}), real._bytes.values())
    assert bounds is not None
    assert bounds.fewest_tokens("e\u0301" * 10_000) == 0 < bounds.fewest_tokens("e" * 10_000)
