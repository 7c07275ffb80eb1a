"""Words of pre-tokenizers, against llama.cpp's own code and against the expressions of the original tokenizers.

``data/llama_cpp_words.json`` holds the lengths of words as llama.cpp's ``unicode_regex_split`` cuts texts (release of
llama-cpp-python 0.3.36), by names with the same words.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats
from support.models.word_patterns import KIMI_K2
from tokenizers import pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from rootgraft.engine.text.gguf_pre_tokenizers import PRE_TOKENIZERS

WORDS = json.loads((Path(__file__).parent / "data" / "llama_cpp_words.json").read_text())
NAMES = [(name, group["lengths"]) for group in WORDS["words"] for name in group["names"]]

# llama.cpp knows capitals of ASCII alone; the original expressions are compared below.
CASED = {
    *("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m", "tiny_aya"),
    *("cohere2moe", "kimi-k2", "youtu"),
}
# llama.cpp knows no capitals at all in these.
CASELESS = {"tiny_aya", "cohere2moe", "kimi-k2", "youtu"}
# llama.cpp does not take U+3000 for a space in these.
SPACES = {"deepseek-llm", "deepseek-coder"}
# llama.cpp joins digits to what stands before them in these, and does not ask for a word's end behind them.
DIGITS = {"afmoe", "tiny_aya", "cohere2moe"}

DEEPSEEK_3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Oniguruma, which runs the expressions of each tokenizer.json, counts the superscripts and fractions of Latin-1 as
# characters of a word, and no joiners. Python's regex module does not, so the end of a word is spelled out for it.
ONIGURUMA_WORD = r"[[\w²³¹¼½¾]--[\u200c\u200d]]"
ONIGURUMA_EDGE = rf"(?:(?<={ONIGURUMA_WORD})(?!{ONIGURUMA_WORD})|(?<!{ONIGURUMA_WORD})(?={ONIGURUMA_WORD}))"
TO_THE_LEFT = rf"\d{{1,3}}(?=(?:\d{{3}})*{ONIGURUMA_EDGE})"
ORIGINALS = {name: [split] for name, split in GGUF_PRE_TOKENIZER_SPLITS.items()} | {
    "kimi-k2": [KIMI_K2],
    "deepseek-v3": [r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", DEEPSEEK_3],
    "tiny_aya": [TO_THE_LEFT, GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]],
    "cohere2moe": [TO_THE_LEFT, GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]],
    "granite-embed-multi-97m": [GGUF_PRE_TOKENIZER_SPLITS["gpt-4o"]],
}


def cut(name: str, text: str) -> list[str]:
    steps = [pre_tokenizers.Split(tokenizers.Regex(e), "isolated") for e in PRE_TOKENIZERS[name].expressions]
    return [word for word, _ in pre_tokenizers.Sequence(steps).pre_tokenize_str(text)]


def comparable(name: str, text: str) -> bool:
    """Whether llama.cpp cuts a text as the original does."""
    if name in CASED and not text.isascii():
        return False
    if name in CASELESS and text != text.lower():
        return False
    if name in SPACES and "\u3000" in text:
        return False
    return name not in DIGITS or re.search(r"\w\d|\d\w|\S\d", text) is None


@pytest.mark.parametrize(("name", "lengths"), NAMES, ids=[name for name, _ in NAMES])
def test_words_equal_those_of_llama_cpp(name: str, lengths: list[list[int]]) -> None:
    compared = 0
    for text, expected in zip(WORDS["texts"], lengths, strict=True):
        if comparable(name, text):
            ends = list(itertools.accumulate(expected))
            assert cut(name, text) == [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
            compared += 1
    assert compared >= 6


def test_each_name_is_compared() -> None:
    raw = {name for name, kind in PRE_TOKENIZERS.items() if kind.spaced}
    assert {name for name, _ in NAMES} | raw == set(PRE_TOKENIZERS)
    assert len(PRE_TOKENIZERS) >= 86


def cut_by(expressions: list[str], text: str) -> list[str]:
    """Cut by Python's regex module: matches and what lies between them are words, each cut by the next expression."""
    words = [text]
    for expression in expressions:
        # Version 1 has intersections of sets; both libraries take a set's names of properties the same way.
        pattern = regex.compile(expression, regex.V1)
        words = [part for word in words for part in _cut_word(pattern, word)]
    return words


def _cut_word(pattern: Any, word: str) -> list[str]:
    edges = sorted({0, len(word), *(edge for match in pattern.finditer(word) for edge in match.span())})
    return [word[start:end] for start, end in itertools.pairwise(edges)]


TEXTS = st.lists(
    st.sampled_from(
        [
            *("a", "b", "Z", "é", "É", "ж", "Ж", "ß", "日", "本", "の", "カ", "한", "ก", "म", "ा", "\u0301", "ʰ", "ǅ"),
            *(
                "'s",
                "'LL",
                "'",
                "1",
                "23",
                "4567",
                "½",
                "²",
                "⅓",
                "Ⅷ",
                "④",
                "٣",
                "\u200d",
                " ",
                "  ",
                "\n",
                "\r\n",
                "\t",
                "\u3000",
                "\u00a0",
            ),
            *(".", "!", "/", "-", "(", "$", "_", "|", "“", "。", "，", "😀"),
        ]
    ),
    max_size=12,
).map("".join)


# One or more of each kind of number, as category and whether Oniguruma counts it as a character of a word.
NUMBERS = ("1", "٣", "½", "²", "⅓", "④", "Ⅷ", "〇")


@pytest.mark.parametrize("meaning", [r"\d", r"\p{N}", r"\p{Nd}", ONIGURUMA_WORD, r"\s", r"\p{L}", r"\p{M}"])
def test_classes_hold_the_same_characters_for_both_libraries(meaning: str) -> None:
    """Over all characters that both know: what an expression's class means does not depend on who runs it."""
    text = "".join(chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cn", "Cs"))
    expression = r"\w" if meaning == ONIGURUMA_WORD else meaning
    split = pre_tokenizers.Split(tokenizers.Regex(f"{expression}+"), "removed")
    left = "".join(word for word, _ in split.pre_tokenize_str(text))
    assert left == regex.sub(f"{meaning}+", "", text, flags=regex.V1)


@pytest.mark.parametrize("name", ORIGINALS)
def test_numbers_of_each_kind_beside_each_other_equal_those_of_the_original(name: str) -> None:
    for text in map("".join, itertools.product(NUMBERS, (*NUMBERS, "a", "_", " "), (*NUMBERS, ""))):
        assert cut(name, text) == cut_by(ORIGINALS[name], text), text


@pytest.mark.parametrize("name", ORIGINALS)
@settings(max_examples=repeats(60))
@given(text=TEXTS)
def test_words_equal_those_of_the_original(name: str, text: str) -> None:
    assert cut(name, text) == cut_by(ORIGINALS[name], text)
