"""Text that comes in pieces equals text that comes at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from support.models.tiny_tokenizers import sentencepiece_definition, write_folder

from rootgraft.engine.text.detokenizer import Detokenizer
from rootgraft.engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_folder(tmp_path_factory.mktemp("spm"), sentencepiece_definition()))


def pieces(detokenizer: Detokenizer, tokens: list[int], cuts: list[int]) -> list[str]:
    """The deltas of ``tokens`` when they come in portions of the sizes ``cuts``, the rest at the end."""
    deltas = []
    for size in cuts:
        deltas.append(detokenizer.push(tokens[:size]))
        tokens = tokens[size:]
    return [*deltas, detokenizer.push(tokens), detokenizer.finish()]


@given(
    tokens=st.lists(st.integers(0, 440), max_size=40),  # beyond the vocabulary too, and any bytes in any order
    cuts=st.lists(st.integers(0, 5), max_size=20),
    skip=st.booleans(),
)
def test_any_tokens_in_any_portions(tiny: Tokenizer, tokens: list[int], cuts: list[int], skip: bool) -> None:
    deltas = pieces(Detokenizer(tiny, skip_special_tokens=skip), tokens, cuts)
    assert "".join(deltas) == tiny.decode(tokens, skip)


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 3), max_size=20))
def test_texts_are_whole_after_any_portion(tiny: Tokenizer, text: str, cuts: list[int]) -> None:
    deltas = pieces(Detokenizer(tiny), tiny.encode(text, False).tolist(), cuts)
    assert "".join(deltas) == text
    assert text.startswith("".join(deltas[:-1]))  # so no half characters left early
    assert deltas[-1] == ""


@given(text=st.text(max_size=30), before=st.sampled_from(["the fox", "日", "a "]))
def test_sentencepiece_goes_on_from_the_prompt(spm: Tokenizer, text: str, before: str) -> None:
    """Joined to the prompt's text, the deltas give the text of all tokens: the first space is kept."""
    prompt, answer = spm.encode(before, False).tolist(), spm.encode(text, False).tolist()
    deltas = pieces(Detokenizer(spm, skip_special_tokens=False), answer, [1] * len(answer))
    assert spm.decode(prompt, False) + "".join(deltas) == spm.decode(prompt + answer, False)
    definition = tokenizers.Tokenizer.from_str(json.dumps(sentencepiece_definition()))
    assert spm.decode(answer, False) == definition.decode(answer, skip_special_tokens=False)


def test_incomplete_characters_are_held_back(tiny: Tokenizer) -> None:
    by_byte = {tiny.token_bytes(token): token for token in range(tiny.vocab_size)}
    party = [by_byte[bytes([byte])] for byte in "🎉".encode()]
    detokenizer = Detokenizer(tiny)
    assert [detokenizer.push([token]) for token in party] == ["", "", "", "🎉"]
    assert detokenizer.push(party[:2]) == ""
    assert detokenizer.push([by_byte[b"a"]]) == "\ufffda"  # now it can never be completed
    assert detokenizer.push(party[:3]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.push(party) == "🎉"


def test_special_tokens(tiny: Tokenizer) -> None:
    tokens = [1, *tiny.encode("the", False), 2]
    assert Detokenizer(tiny).push(tokens) == "the"
    assert Detokenizer(tiny, skip_special_tokens=False).push(tokens) == "<|im_start|>the<|im_end|>"


def test_byte_pieces_of_sentencepiece(spm: Tokenizer, tmp_path: Path) -> None:
    tokens = spm.encode("a\u0c95\U0001f9e0", False).tolist()
    assert len(tokens) > 6  # unknown characters fall back to bytes
    detokenizer = Detokenizer(spm)
    assert "".join(detokenizer.push([token]) for token in tokens) == " a\u0c95\U0001f9e0"
