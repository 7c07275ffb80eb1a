"""A grammar's matcher that raises, wherever it does, ends its own request with a clear error and no other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.draft_engine import ASKS, GRAMMARS, VOCABULARY, Ask, Engine, compiled
from support.engine.structured_engine import TEXTS
from support.machine.thoroughness import repeats

from rootgraft.engine.core.structured_output import Compilation, StructuredOutputManager
from rootgraft.engine.errors import ModelError
from rootgraft.engine.messages import Failed
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.match.mask_buffer import MaskBuffer
from rootgraft.grammar.match.matcher import Matcher

METHODS = ("fill_mask", "accept", "rollback", "draft", "admits", "is_slow", "prepare")
PROPERTIES = ("is_done", "is_whole", "failure", "num_tokens")
MESSAGE = r"The grammar of this request could not be followed: {}."


def break_matchers(patch: pytest.MonkeyPatch, name: str, calls: int, *, late: bool) -> None:
    """Let the first matcher of which ``name`` is asked ``calls`` times raise from then on, in the middle or after."""
    original = getattr(Matcher, name)
    counts: dict[int, int] = {}
    broken: list[Matcher] = []

    def check(self: Matcher, work: Callable[[], Any]) -> Any:
        counts[id(self)] = counts.get(id(self), 0) + 1
        if not broken and counts[id(self)] > calls:
            broken.append(self)
        if not broken or broken[0] is not self:
            return work()
        if late:
            work()
        raise RuntimeError("a bug of a library")

    if isinstance(original, property):
        getter = original.fget
        assert getter is not None
        patch.setattr(Matcher, name, property(lambda self: check(self, lambda: getter(self))))
    else:
        patch.setattr(Matcher, name, lambda self, *args: check(self, lambda: original(self, *args)))


@settings(max_examples=repeats(100), deadline=None)
@given(
    asks=ASKS,
    name=st.sampled_from(METHODS + PROPERTIES),
    calls=st.integers(0, 25),
    late=st.booleans(),
    method=st.sampled_from(["auto", "off"]),
    overlaps=st.booleans(),
)
def test_a_matcher_that_raises_ends_its_request_alone(
    asks: list[Ask], name: str, calls: int, late: bool, method: str, overlaps: bool
) -> None:
    expected = _answers(asks, method, overlaps)
    with pytest.MonkeyPatch.context() as patch:
        if name != "num_tokens":  # of which the checks of this test ask too
            break_matchers(patch, name, calls, late=late)
        answers = _answers(asks, method, overlaps)
    failed = [number for number in expected if answers[number] != expected[number]]
    assert len(failed) <= 1
    for number in failed:
        tokens, *end = answers[number]
        assert asks[number].grammar is not None
        assert end == ["ModelError", MESSAGE.format("RuntimeError")] or name in ("is_done", "is_whole")
        assert tokens == expected[number][0][: len(tokens)] or name in ("is_done", "is_whole")


def _answers(asks: list[Ask], method: str, overlaps: bool) -> dict[int, tuple[Any, ...]]:
    engine = Engine.make(method, overlaps=overlaps)
    for number, ask in enumerate(asks):
        engine.submit(number, ask)
        engine.step()
    answers = engine.run()
    engine.close()
    return answers


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_exception_in_a_mask_fails_the_row_and_its_neighbours_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, overlaps: bool
) -> None:
    """Also one from the code around the matchers, on the mask thread. The log says where it came from."""
    engine = Engine.make("off", overlaps=overlaps)
    for number, grammar in enumerate((2, 1, None)):
        engine.submit(number, Ask((1, 2, number), SamplingParams(max_tokens=20, ignore_eos=True), grammar))
    fill, counts = MaskBuffer.fill, [0]

    def broken(self: MaskBuffer, jobs: Any) -> Any:
        counts[0] += 1
        if counts[0] == 5:
            raise IndexError("a bug")
        return fill(self, jobs)

    monkeypatch.setattr(MaskBuffer, "fill", broken)
    answers = engine.run()
    failures = [end for end in engine.ends.values() if isinstance(end, Failed)]
    assert [end.message for end in failures] == [MESSAGE.format("IndexError")]
    (record,) = caplog.records
    assert record.exc_info and isinstance(record.exc_info[1], IndexError) and record.exc_info[2]
    assert len(answers[2][0]) == 20
    engine.close()


def compilation(compiled_grammar: Any) -> Compilation:
    """A compile that is done, with this result."""
    service_built: Future[Any] = Future()

    class Service:
        def compile(self, spec: Any, tenant: str = "") -> Future[Any]:
            future: Future[Any] = Future()
            if isinstance(compiled_grammar, Exception):
                future.set_exception(compiled_grammar)
            else:
                future.set_result(compiled_grammar)
            return future

    service_built.set_result((Service(), None, None))
    return Compilation(service_built, GRAMMARS[0], None)


def test_a_matcher_that_cannot_be_made_is_that_request_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledGrammar, "matcher", lambda self: 1 / 0)
    for result, name in ((compiled(0), "ZeroDivisionError"), (RuntimeError("a bug"), "RuntimeError")):
        error = compilation(result).poll()
        assert isinstance(error, ModelError)
        assert str(error) == f"The grammar of this request could not be loaded: {name}."


def test_a_vocabulary_that_cannot_be_built_fails_requests_with_grammars_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise ValueError("no such tokenizer")

    monkeypatch.setattr("rootgraft.engine.core.structured_output._build", fail)
    manager = StructuredOutputManager(TEXTS, VOCABULARY.eos, 258, 4)
    compile = manager.compile((GRAMMARS[0].kind.value, GRAMMARS[0].content), None)
    while (outcome := compile.poll()) is None:
        pass
    assert isinstance(outcome, ModelError) and "ValueError" in str(outcome)
    assert manager.stats() == manager.take_observations() == {}
    manager.close()
