"""Grammars of a fleet: compiled on a second replica ahead, where sequences then go on; within bounds."""

from __future__ import annotations

from array import array

import pytest

from rootgraft.engine.messages import Message, PrepareGrammar, Ready, Submit, TokenOut
from rootgraft.engine.types import SamplingParams
from rootgraft.fleet.dispatcher import Dispatcher, DispatcherLimits
from rootgraft.fleet.placement import grammar_index
from rootgraft.fleet.placement.grammar_index import GrammarIndex, grammar_key

REGEX = ("regex", b"[a-z]+")


class Gateway:
    """A dispatcher, and which replica was sent what."""

    def __init__(self, *names: str) -> None:
        self.dispatcher = Dispatcher(DispatcherLimits())
        for name in names:
            self.join(name)

    def join(self, name: str, base: str = "base") -> None:
        self.dispatcher.join(name, Ready(1000, 50, 100, 16, (), base_digest=base), 0.0)

    def submit(self, number: int, grammar: tuple[str, bytes] | None = REGEX, tokens: int = 3) -> None:
        prompt = array("i", range(tokens))
        self.dispatcher.submit([Submit(number, prompt, SamplingParams(max_tokens=9), grammar=grammar)], 0.0)

    def sent(self) -> tuple[list[str], list[str]]:
        """The replicas that were sent sequences, and those that were to compile ahead, since the last call."""
        self.dispatcher.check()
        sent = self.dispatcher.take_sent()
        assert all(message.kind == "regex" for _, message in sent if isinstance(message, PrepareGrammar))
        submits = [name for name, message in sent if isinstance(message, Submit)]
        return submits, [name for name, message in sent if isinstance(message, PrepareGrammar)]

    def lose(self, name: str) -> None:
        self.dispatcher.leave(name, 0.0)


def test_a_second_replica_compiles_it_and_goes_on_with_it() -> None:
    gateway = Gateway("a", "b", "c", "d")
    gateway.submit(1)
    (first,), (second,) = gateway.sent()
    assert first != second
    gateway.submit(2)
    assert gateway.sent()[1] == []
    gateway.lose(first)
    took, ahead = gateway.sent()
    assert set(took) == {second}
    assert len(ahead) == 1 and ahead[0] not in (first, second)


def test_a_replica_that_joins_gets_what_lacks_a_second_one() -> None:
    gateway = Gateway("a")
    gateway.submit(1)
    gateway.submit(2, ("regex", b"[0-9]+"))
    gateway.submit(3, None)
    assert gateway.sent() == (["a", "a", "a"], [])
    gateway.join("b")
    assert gateway.sent() == ([], ["b", "b"])
    gateway.join("c")
    assert gateway.sent() == ([], [])


def test_the_second_one_has_the_same_base_model_once_there_are_tokens() -> None:
    gateway = Gateway("a")
    gateway.submit(1)
    [(_, message)] = gateway.dispatcher.take_sent()
    assert isinstance(message, Submit)
    said: list[Message] = [TokenOut(message.id, (5,))]
    gateway.dispatcher.take("a", 0, said, 0.0)
    gateway.join("b", base="other")
    assert gateway.sent() == ([], [])
    gateway.join("c")
    assert gateway.sent() == ([], ["c"])


def test_free_text_and_ends_compile_nothing() -> None:
    gateway = Gateway("a", "b")
    gateway.submit(1, None)
    assert gateway.sent()[1] == []


def test_new_sequences_go_where_their_grammar_is_unless_that_is_busy() -> None:
    gateway = Gateway("a", "b", "c", "d")
    gateway.submit(1)
    (first,), (second,) = gateway.sent()
    for number in range(2, 40):
        gateway.submit(number)
    took, ahead = gateway.sent()
    assert ahead == [] and took[0] in (first, second)
    assert set(took) == {"a", "b", "c", "d"}, "one schema for all requests leaves no replica idle"


def test_an_index_forgets_what_was_used_longest_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_index, "MOST_GRAMMARS", 2)
    index = GrammarIndex(3)
    for slot in (0, 2):
        index.open(slot)
    index.add(2, 5)
    for key in (5, 6, 5, 7):
        index.add(0, key)
    assert len(index) == 3
    assert [index.holders(key).tolist() for key in (5, 6, 7, 8)] == [
        [True, False, True], [False] * 3, [True, False, False], [False] * 3,
    ]  # fmt: skip
    index.close(0)
    assert index.holders(5).tolist() == [False, False, True] and len(index) == 1
    index.close(2)
    assert not index._holders and len(index) == 0


@pytest.mark.parametrize("other", [("choice", b"a"), ("regex", b"b"), ("regex", b"")])
def test_keys_tell_kinds_and_contents_apart(other: tuple[str, bytes]) -> None:
    assert grammar_key(("regex", b"a")) == grammar_key(("regex", b"a")) != grammar_key(other)
    assert grammar_key(None) == 0 != grammar_key(other)
