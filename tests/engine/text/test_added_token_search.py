"""Starts of added tokens: those of the leftmost longest tokens, at a cost that their number does not raise."""

from __future__ import annotations

import re
from importlib import import_module
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.text import added_token_search
from rootgraft.engine.text.added_token_search import AddedTokenSearch, search_of

WORDS = st.text("ab<>\n", min_size=1, max_size=6)


def leftmost_longest(tokens: list[str], text: str) -> list[int]:
    starts, at = [], 0
    while at < len(text):
        fitting = [token for token in tokens if text.startswith(token, at)]
        if fitting:
            starts.append(at)
        at += len(max(fitting, key=len)) if fitting else 1
    return starts


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(added_token_search, "_WINDOW", 7)
    monkeypatch.setattr(added_token_search, "_DEEPEST", 2)


@given(tokens=st.lists(WORDS, min_size=1, max_size=30), text=st.lists(WORDS).map("".join))
def test_starts_are_those_of_the_leftmost_longest_tokens(tokens: list[str], text: str) -> None:
    assert list(AddedTokenSearch(tokens).starts(text)) == leftmost_longest(tokens, text)


def test_runs_and_special_characters() -> None:
    runs = ["\n" * length for length in range(1, 32)]
    assert list(AddedTokenSearch([*runs, "[a]", "[a].*", "^"]).starts("x" + "\n" * 70 + "[a].*^")) == [
        *(1, 32, 63),
        *(71, 76),
    ]


def test_tokens_that_nest_deeper_than_the_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    runs = ["a" * length for length in range(1, 180, 2)]
    assert list(AddedTokenSearch(runs).starts("a" * 180)) == [0, 179]


@pytest.mark.parametrize(
    "texts", [["a" * length for length in range(1, 250)], ["a" * 513]], ids=["branch too deep", "too long"]
)
def test_tokens_that_would_take_long_are_not_searched_for(monkeypatch: pytest.MonkeyPatch, texts: list[str]) -> None:
    monkeypatch.undo()
    assert search_of([{"content": text} for text in texts]) is None
    assert search_of([{"content": text} for text in texts[:50] if len(text) < 513] + [{"content": "b" * 512}])


def most_branches(pattern: str) -> int:
    """The most branches that ``re`` tries at one position: the sum along the path with the widest alternations."""

    def cost(items: Any) -> int:
        total = 0
        for kind, value in items:
            name = str(kind)
            if name == "BRANCH":
                total += len(value[1]) + max(cost(branch) for branch in value[1])
            elif name == "SUBPATTERN":
                total += cost(value[3])
            else:
                assert name in ("LITERAL", "IN"), name
        return total

    return cost(import_module("re._parser").parse(pattern))


def gemma_like(number: int) -> list[str]:
    tags = [f"<{slash}{tag}>" for tag in ("table", "tbody", "td", "h1", "ul", "code") for slash in ("", "/")]
    return [*(f"<unused{index}>" for index in range(number)), *tags, *("\n" * length for length in range(1, 32))]


def test_work_at_a_position_does_not_grow_with_the_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    costs = [most_branches(AddedTokenSearch(gemma_like(number))._pattern.pattern) for number in (1, 60, 640, 6_400)]
    assert costs[-1] < 80  # of which 62 are for the runs of 31 line ends
    assert all(more - fewer <= 11 for fewer, more in pairwise(costs))  # one more digit
    listed = "|".join(map(re.escape, gemma_like(6_400)))
    assert most_branches(listed) > 6_000


def test_no_search_holds_the_interpreter_for_a_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """``re`` holds the interpreter's lock within a search: each is of one window."""
    search, spans = AddedTokenSearch(["<unused1>", "<a>"]), []
    pattern = search._pattern

    class Recording:
        def search(self, text: str, start: int, end: int) -> re.Match[str] | None:
            spans.append(end - start)
            return pattern.search(text, start, end)

    monkeypatch.setattr(search, "_pattern", Recording())
    assert list(search.starts("<" * 100 + "<a>")) == [100]
    assert max(spans) <= 7 + len("<unused1>") and len(spans) < 20


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, "normalized": False, **flags}


def test_tokens_whose_extent_is_not_their_text_are_not_searched_for() -> None:
    assert search_of([]) is None
    assert search_of([token("<a>", normalized=True)]) is None
    for flag in ("lstrip", "rstrip", "single_word"):
        assert search_of([token("<a>"), token("<b>", **{flag: True})]) is None
    search = search_of([token("<a>"), token("b", normalized=True), token("")])
    assert search is not None and list(search.starts("b<a>")) == [1]
