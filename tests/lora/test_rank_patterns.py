"""Patterns of rank_pattern and alpha_pattern match as in peft, in a time that does not explode."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.lora.config import read_config
from rootgraft.lora.errors import AdapterError
from rootgraft.lora.rank_patterns import NamePattern

NAMES = [
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.self_attn.k_proj",
    "model.layers.3.mlp.down_proj",
    "model.embed_tokens",
    "lm_head",
]
PATTERNS = [
    "q_proj", "self_attn.q_proj", ".*proj", r"layers\.\d+\.mlp\..*", "(q|k)_proj", "(?:q|k)_proj$", "^lm_head",
    "^model", "^q_proj", r"model\.layers\.(0|1{2})\..*", "[qk]_proj", "[^q]_proj", "[a-m]+_proj", "proj", "",
    r".*\.[0-9]{1,2}\.self_attn.*?", "(a|a)*x", r"\w+_head", r"\D+", r"layers.\d{2,}.*", ".+", "x?lm_head",
    "q_proj|lm_head", "layers.(?:1.|3.)+.*", r"\S+", r"\bq_proj", r".*\Bproj", r"layers.[\d.]+mlp.*", r"\Alm_head",
    "(?i:LM)_head", "(?P<n>q)_proj", ".{,7}", "[]q]_proj", r"[q\-]_proj",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_as_peft_matches(pattern):
    for name in NAMES:
        assert NamePattern(pattern, "p").matches(name) == bool(re.match(rf"(.*\.)?({pattern})$", name)), name


ATOM = st.sampled_from(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\w"])


@settings(max_examples=repeats(300))
@given(
    st.recursive(
        ATOM,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map("".join),
            st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,}", "*?"])).map(
                lambda pair: f"(?:{pair[0]}){pair[1]}"
            ),
        ),
        max_leaves=6,
    ),
    st.text("ab.", max_size=7),
)
def test_random_patterns(pattern, name):
    assert NamePattern(pattern, "p").matches(name) == bool(re.match(rf"(.*\.)?({pattern})$", name))


def test_a_pattern_that_would_hang():
    hostile = "(a*)*(a|a)*(.*)*(.*.*.*)*b"
    assert not NamePattern(hostile, "p").matches("a" * 300)


@pytest.mark.parametrize("depth", [2, 3, 4, 7, 8, 16, 32])
def test_counts_that_multiply_are_refused(depth):
    with pytest.raises(AdapterError, match="rank_pattern: the pattern"):
        NamePattern(f"{'(' * depth}a?{'){64}' * depth}", "rank_pattern")


@pytest.mark.parametrize("depth", [8, 16, 32])
def test_groups_that_repeat_take_no_longer_with_each_level(depth):
    pattern = NamePattern(f"{'(' * depth}a?{')*' * depth}b", "rank_pattern")
    assert pattern.program_size <= 8 * depth
    assert not pattern.matches("a" * 300)


def test_the_work_of_all_patterns_is_bounded():
    config = {"peft_type": "LORA", "rank_pattern": {f"{letter}{{400}}": 4 for letter in "abcdefghijklmnopqrs"}}
    assert len(read_config(json.dumps(config).encode()).ranks) == 19
    config["rank_pattern"]["u{400}"] = 4
    with pytest.raises(AdapterError, match=r"8,300 instructions together; at most 8,192 .*: use names"):
        read_config(json.dumps(config).encode())


@pytest.mark.parametrize(
    "pattern",
    ["(", ")", "a)", "[a", "*a", "a**", "a{3", "a{3,2}", "(?=a)", "(?i)a", r"(a)\1", "a.\\",
     "a" * 600, "(" * 400, "[z-a]", "[[:alpha:]]", "[a--b]", "[a||b]", "(?<=a)b", "(?>a)", "(?#a)", "(?P=n)", "a*+",
     "(a)|b)(", "a{2}{3}", "{", "a{", "a{1001}", r"\pL", r"\Qa", r"\C", r"\z", r"\Z", r"[\b]", r"[\1]", "\ud800a",
     "(?:" * 120 + ")" * 120 + "{1000}{1000}", "(?x: a)"],
)  # fmt: skip
def test_refused(pattern):
    with pytest.raises(AdapterError) as refused:
        NamePattern(pattern, "rank_pattern")
    assert refused.value.option == "rank_pattern"
