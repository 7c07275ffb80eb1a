"""The checker of formats: every enforced format has a check, and IRIs are those of an independent grammar."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rfc3987_syntax import is_valid_syntax

from rootgraft.api.structured.jsonschema_validators import FORMAT_CHECKER, is_iri
from rootgraft.grammar.regex.string_formats import FORMATS

# Letters that matter to the syntax. Beyond the basic plane, in private areas and in shortened IPv6 addresses the other
# grammar refuses what RFC 3987 admits.
PLAIN = st.lists(
    st.one_of(
        st.sampled_from("abz09-._~!$&'()*+,;=:@/?#%AF \"<>\\^`{|}éß中\ud7ff\uf900\ufdd0\uffef\ufff0"),
        st.characters(max_codepoint=0xD7FF),
        st.sampled_from(["http:", "//", "[1:2:3:4:5:6:7:8]", "[v1.a]", "%20", "ƒøø.ßår", "?q=", "#f"]),
    ),
    max_size=12,
).map("".join)
ANY = st.lists(st.sampled_from(["\ue000", "\U0001fffd", "\U000e1000", "\U000effff", "[::1]"]) | PLAIN).map("".join)


def test_each_enforced_format_has_a_check() -> None:
    assert set(FORMAT_CHECKER.checkers) == set(FORMATS)


@given(PLAIN | PLAIN.map("x:".__add__))
def test_iris_are_those_of_another_grammar(text: str) -> None:
    assert is_iri(text) == is_valid_syntax("iri", text)
    assert is_iri(text, rule="URI_reference") == is_valid_syntax("iri_reference", text)


@given(ANY)
def test_what_another_grammar_admits_is_one(text: str) -> None:
    assert is_iri(text, rule="URI_reference") or not is_valid_syntax("iri_reference", text)


@pytest.mark.parametrize("text", ["x:?\ue000", "x:/é", "x:\U000e1000", "//[::1]/中?a#b", "?\U0010fffd"])
def test_iris(text: str) -> None:
    assert is_iri(text, rule="URI_reference")


@pytest.mark.parametrize(
    "text", ["x:\ue000", "x:#\ue000", "é:a", "\U0001ffff", "//[é]/", "\ufdd0", "?a#?\ue000", "%é0"]
)
def test_private_characters_belong_into_queries_and_noncharacters_nowhere(text: str) -> None:
    assert not is_iri(text, rule="URI_reference")


def test_no_grammar_of_iris_is_built_at_the_start() -> None:
    code = "import rootgraft.api.http.server, sys; sys.exit('rfc3987_syntax' in sys.modules or 'lark' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], cwd=Path("/"), check=False).returncode == 0
