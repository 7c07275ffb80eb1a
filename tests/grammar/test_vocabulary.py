"""Forced text is cut into tokens as the tokenizer itself cuts it, since that is how the model goes on."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.grammar.vocabulary import MAX_WORD, Vocabulary

NAMES = ("customer_identification_number", "preferredDeliveryLocation", "id", "is-active", "Überweisung", "number of")


@given(st.binary(max_size=60))
def test_nothing_is_lost(vocabulary, text):
    assert b"".join(vocabulary.tokens[token] for token in vocabulary.tokenize_bpe(text)) == text


@pytest.mark.parametrize("text", [b"ab" * MAX_WORD, b" " * 999, b"\n\n\n", b""])
def test_long_words_are_cut_too(vocabulary, text):
    assert b"".join(vocabulary.tokens[token] for token in vocabulary.tokenize_bpe(text)) == text


def test_what_was_merged_first_merges_first():
    """``abc`` is a and bc, as bc came before ab; longest first it would be ab and c."""
    vocabulary = Vocabulary((b"a", b"b", b"c", b"bc", b"ab", b"<end>"), frozenset((5,)), (5,))
    assert vocabulary.tokenize_bpe(b"abc") == [0, 3]
    assert vocabulary.tokenize(b"abc") == [4, 2]


def test_a_vocabulary_without_all_bytes_is_cut_longest_first():
    vocabulary = Vocabulary((b"a", b"bc", b"abc", b"<end>"), frozenset((3,)), (3,))
    assert vocabulary.tokenize_bpe(b"abca") == [2, 0]


def test_names_are_cut_as_by_the_tokenizer(real_vocabulary, smollm2_gguf: Path):
    tokenizer, rng = Tokenizer.load(smollm2_gguf), random.Random(0)
    for _ in range(50):
        value = {rng.choice(NAMES): rng.choice(["", True, None, {}, [], {"a_b": "Some words, and more."}])}
        for indent in (None, 2):
            text = json.dumps(value, indent=indent, ensure_ascii=False)
            assert real_vocabulary.tokenize_bpe(text.encode()) == list(tokenizer.encode(text, False))


def test_a_draft_of_forced_text_is_cut_as_the_tokenizer_cuts_it(real_grammars, smollm2_gguf: Path):
    schema = {"type": "object", "properties": {name: {"const": 1} for name in NAMES}, "required": list(NAMES)}
    matcher = real_grammars.schema(schema | {"additionalProperties": False}).matcher()
    for token in real_grammars.vocabulary.tokenize_bpe(b'{"'):
        assert matcher.accept(token)
    expected = list(Tokenizer.load(smollm2_gguf).encode('customer_identification_number"', False))
    assert matcher.draft(20)[: len(expected) - 1] == expected[:-1]
