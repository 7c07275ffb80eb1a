"""The dry run of grammars: what it refuses as too slow would be slow when it is served, too."""

from __future__ import annotations

import pytest
from support.grammar.patch_grammar import PATCH

from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.match.completion_search import CompletionSearch
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

# By another name a terminal has no known text, so the search is told no end.
RENAMED = PATCH.replace("LF", "LINE_END").replace("common.LINE_END", "common.LF -> LINE_END")
INPUT = [
    {"type": "const_string", "value": '{"input": "'},
    {"type": "json_lark", "grammar": RENAMED},
    {"type": "const_string", "value": '"}'},
]


@pytest.mark.parametrize(
    "spec",
    [GrammarSpec.lark(RENAMED), GrammarSpec.structural_tag({"format": {"type": "sequence", "elements": INPUT}})],
    ids=["alone", "in JSON"],
)
def test_an_end_that_takes_long_to_find_is_looked_for_once(
    spec: GrammarSpec, real_vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search from the beginning takes more than a mask may, and gives up: it is no mask of an answer."""
    looked: list[None] = []
    search = CompletionSearch.shortest
    monkeypatch.setattr(CompletionSearch, "shortest", lambda *args: looked.append(None) or search(*args))
    assert compile(spec, real_vocabulary).artifact.search_failed
    assert len(looked) == 1
