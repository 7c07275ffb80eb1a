"""The dry run of grammars: what it refuses as too slow would be slow when it is served, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count, repeat

import pytest
from support.grammar.patch_grammar import PATCH

from rootgraft.grammar.compile import dry_run
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


class Clock:
    """A clock on which masks take what is given: the seconds between each two readings, in turn."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self.readings, self._now, self._seconds = 0, 0.0, iter(seconds)

    def __call__(self) -> float:
        self.readings += 1
        if self.readings % 2 == 0:
            self._now += next(self._seconds)
        return self._now


def busy() -> Iterator[float]:
    """Each mask is slow the first time that a walk gets to it, as where other processes take the processor."""
    for walk in count():
        yield from repeat(0.001, walk)
        yield 0.1


PLAIN = GrammarSpec.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 20})


def test_a_machine_that_is_busy_refuses_no_grammar(real_vocabulary: Vocabulary) -> None:
    """A mask counts with the least of its times."""
    compiled = compile(PLAIN, real_vocabulary)
    assert dry_run.FEW_TOKENS < dry_run.MAX_REPEATED_WALKS
    assert dry_run.check(compiled, real_vocabulary, Clock(busy())) == pytest.approx(0.001)


def test_a_mask_that_is_slow_each_time_is_refused(real_vocabulary: Vocabulary) -> None:
    compiled = compile(PLAIN, real_vocabulary)
    clock = Clock((0.001, 0.5, 0.001, 0.106, 0.001, 0.2))
    with pytest.raises(dry_run.DryRunError, match="one mask took 106 ms; the limit is 80"):
        dry_run.check(compiled, real_vocabulary, clock)


def test_the_walks_have_a_bound(real_vocabulary: Vocabulary) -> None:
    """So has the time that a grammar can take whose masks are all near the limit."""
    compiled = compile(GrammarSpec.regex("[a-z ]{400}"), real_vocabulary)
    clock = Clock(busy())
    with pytest.raises(dry_run.DryRunError, match="one mask took 100 ms"):
        dry_run.check(compiled, real_vocabulary, clock)
    assert clock.readings == 2 * sum(range(1, dry_run.MAX_REPEATED_WALKS + 1))
