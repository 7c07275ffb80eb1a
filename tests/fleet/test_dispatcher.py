"""The dispatcher, one rule at a time: replay, quarantine, holding, drain, order of frames, memory."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.engine.errors import CapacityError
from rootgraft.engine.messages import (
    Abort,
    AdapterChanged,
    Done,
    Failed,
    ForgetTokens,
    Heartbeat,
    Message,
    Ready,
    Submit,
    TokenOut,
    TokenTexts,
)
from rootgraft.engine.types import FinishReason, Logprob, Priority, SamplingParams, SequenceStats, Usage
from rootgraft.fleet.dispatcher import MOST_DEATHS, MOST_REPLAYS, Dispatcher, DispatcherLimits
from rootgraft.fleet.frame_order import MOST_EARLY, FrameGap, FrameOrder
from rootgraft.fleet.journal import Journal


def submit(number: int = 1, max_tokens: int = 8, **fields: Any) -> Submit:
    return Submit(number, array("i", [1, 2, 3]), SamplingParams(max_tokens=max_tokens, **fields))


def ready(base: str = "base") -> Ready:
    return Ready(100, 50, 100, 16, (), base_digest=base)


class Fleet:
    """A dispatcher, and what it sent and delivered; each replica numbers its frames."""

    def __init__(self, *names: str, **limits: Any) -> None:
        self.dispatcher = Dispatcher(DispatcherLimits(**limits))
        self.now = 0.0
        self.numbers: dict[str, int] = {}
        self.delivered: list[Message] = []
        for name in names:
            self.join(name)

    def join(self, name: str, base: str = "base") -> None:
        self.numbers[name] = 0
        self.dispatcher.join(name, ready(base), self.now)

    def submit(self, *submits: Submit) -> None:
        self.dispatcher.submit(submits, self.now)

    def sent(self) -> list[tuple[str, Message]]:
        self.dispatcher.check()
        return self.dispatcher.take_sent()

    def one(self) -> tuple[str, Submit]:
        """The only sequence that was sent since the last call."""
        [(name, message)] = self.sent()
        assert isinstance(message, Submit)
        return name, message

    def say(self, name: str, *messages: Message) -> list[Message]:
        """Let a replica send a frame; returns what the client gets."""
        self.numbers[name] += 1
        self.dispatcher.take(name, self.numbers[name] - 1, messages, self.now)
        self.dispatcher.check()
        return self.dispatcher.take_delivered()

    def kill(self, name: str) -> list[Message]:
        """Lose a replica. Returns what clients get once the moment of the loss is over, and the others have spoken."""
        self.lose(name)
        self.now += DispatcherLimits().quiet_seconds + 0.25
        for each in self.dispatcher.replicas:
            self.dispatcher.hear(each, self.now)
        self.dispatcher.tick(self.now)
        self.dispatcher.check()
        return self.dispatcher.take_delivered()

    def lose(self, name: str) -> None:
        """Lose a replica, and no time."""
        self.dispatcher.leave(name, self.now)
        self.dispatcher.check()


def out(number: int, *tokens: int) -> TokenOut:
    return TokenOut(number, tokens, tuple(Logprob(token, -1.0, 1, ()) for token in tokens))


def done(number: int, completion: int) -> Done:
    return Done(number, FinishReason.STOP, Usage(3, 0, completion), 7)


def test_a_sequence_goes_on_after_the_tokens_that_the_client_has() -> None:
    fleet = Fleet("a", "b")
    fleet.submit(submit(41, temperature=1.0))
    first, sent = fleet.one()
    assert fleet.say(first, out(sent.id, 5, 6)) == [out(41, 5, 6)]
    fleet.kill(first)
    second, again = fleet.one()
    assert second != first and again.id != sent.id
    assert list(again.generated) == [5, 6] and again.tokens == sent.tokens
    assert again.params.seed == sent.params.seed is not None
    assert again.priority is Priority.REALTIME
    assert fleet.say(first, out(sent.id, 9)) == []  # from beyond the grave
    assert fleet.say(second, out(sent.id, 9)) == []  # the number that it had elsewhere
    assert fleet.say(second, out(again.id, 7), done(again.id, 4)) == [out(41, 7), done(41, 4)]
    assert fleet.dispatcher.num_open == fleet.dispatcher.num_bytes == 0
    assert (fleet.dispatcher.num_replays, fleet.dispatcher.num_lost) == (1, 1)
    assert fleet.dispatcher.take_lost() == [first]


def test_what_the_client_has_already_is_not_sent_twice() -> None:
    """All tokens without an end, and logprobs of the prompt before the first token."""
    fleet = Fleet("a", "b")
    scores = tuple(Logprob(token, 0.0, 1, ()) for token in (2, 3))
    fleet.submit(submit(1, max_tokens=2, prompt_logprobs=0))
    name, sent = fleet.one()
    assert fleet.say(name, TokenOut(sent.id, (), (), scores[:1])) == [TokenOut(1, (), (), scores[:1])]
    fleet.kill(name)
    name, sent = fleet.one()
    assert not sent.generated
    both = TokenOut(sent.id, (5,), out(0, 5).logprobs, scores)
    assert fleet.say(name, both) == [replace(both, id=1, prompt_logprobs=scores[1:])]
    assert fleet.say(name, out(sent.id, 6)) == [out(1, 6)]
    fleet.join("c")
    fleet.kill(name)
    name, sent = fleet.one()
    assert list(sent.generated) == [5]
    assert fleet.say(name, out(sent.id, 6), done(sent.id, 2)) == [done(1, 2)]


def test_an_answer_that_a_request_brings_goes_to_every_replica() -> None:
    """As beam search asks: the first tokens of the answer are known, and the replica draws the next ones."""
    fleet = Fleet("a", "b", "c")
    fleet.submit(replace(submit(1, max_tokens=4), generated=array("i", [5, 6])))
    name, sent = fleet.one()
    assert list(sent.generated) == [5, 6]
    assert fleet.say(name, out(sent.id, 7)) == [out(1, 7)]
    fleet.kill(name)
    name, sent = fleet.one()
    assert list(sent.generated) == [5, 6, 7]
    assert fleet.say(name, out(sent.id, 8)) == [out(1, 8)]
    fleet.kill(name)
    name, sent = fleet.one()
    assert list(sent.generated) == [5, 6, 7]  # the last token is drawn again, as its end is not known
    assert fleet.say(name, out(sent.id, 8), done(sent.id, 4)) == [done(1, 4)]
    fleet.submit(replace(submit(2), generated=array("i", [5, 6])))
    fleet.sent()
    fleet.kill(name)
    fleet.dispatcher.abort([2])
    fleet.dispatcher.tick(fleet.now)
    assert [each for each in fleet.dispatcher.take_delivered() if isinstance(each, Done)] == [
        Done(2, FinishReason.ABORT, Usage(3, 0, 2))
    ]


@pytest.mark.parametrize(("losses", "decode"), [(0, 0.5), (1, 9.0)])
def test_seconds_of_decoding_are_those_of_all_tokens(losses: int, decode: float) -> None:
    fleet = Fleet("a", "b")
    fleet.submit(submit(1))
    name, sent = fleet.one()
    fleet.now = 1.0
    fleet.say(name, out(sent.id, 7, 8))
    for _ in range(losses):
        fleet.dispatcher.leave(name, fleet.now)
        name, sent = fleet.one()
    fleet.now = 10.0
    stats = SequenceStats(0.1, 0.2, 0.5, 0, 1.0, 1)
    [end] = fleet.say(name, replace(done(sent.id, 2), stats=stats))
    assert isinstance(end, Done) and end.stats == replace(stats, decode=decode)


def test_a_sequence_that_kills_three_replicas_fails_and_harms_no_fourth() -> None:
    fleet = Fleet("a", "b", "c", "d")
    fleet.submit(submit(1))
    for death in range(MOST_DEATHS):
        name, _ = fleet.one()
        delivered = fleet.kill(name)
        assert bool(delivered) == (death == MOST_DEATHS - 1)
    [failed] = delivered
    assert isinstance(failed, Failed) and (failed.id, failed.kind) == (1, "EngineError")
    assert "3 times in a row" in failed.message
    assert not fleet.sent() and len(fleet.dispatcher.replicas) == 1


def test_a_token_clears_a_sequence_of_suspicion() -> None:
    fleet = Fleet("a", "b")
    fleet.submit(submit(1, max_tokens=80))
    for round_ in range(MOST_REPLAYS):
        name, sent = fleet.one()
        assert fleet.say(name, out(sent.id, round_)) == [out(1, round_)]
        fleet.join(f"new-{round_}")
        assert fleet.kill(name) == []
    name, _ = fleet.one()
    [failed] = fleet.kill(name)  # but not for ever
    assert isinstance(failed, Failed) and f"failed {MOST_REPLAYS + 1} times" in failed.message


def test_suspects_are_alone_among_suspects() -> None:
    """Of four sequences that were on two lost replicas, one goes on at a time where there is one replica."""
    fleet = Fleet("a")
    fleet.submit(*(submit(number) for number in range(4)))
    assert len(fleet.sent()) == 4
    fleet.kill("a")
    fleet.join("b")
    assert len(fleet.sent()) == 4
    fleet.kill("b")
    fleet.join("c")
    for left in (3, 2, 1, 0):
        name, sent = fleet.one()
        assert (name, fleet.dispatcher.num_held) == ("c", left)
        fleet.say("c", out(sent.id, 5))
    assert not fleet.sent()


def test_a_new_sequence_does_not_join_a_suspect() -> None:
    fleet = Fleet("a")
    fleet.submit(submit(1))
    fleet.kill("a")
    fleet.join("b")
    fleet.kill("b")
    fleet.join("c")
    fleet.sent()
    fleet.submit(submit(2))
    assert not fleet.sent() and fleet.dispatcher.num_held == 1
    [failed] = fleet.kill("c")
    assert failed.id == 1  # type: ignore[union-attr]
    fleet.join("d")
    assert fleet.one()[0] == "d"


@pytest.mark.parametrize(("silent", "losses"), [(1.4, MOST_DEATHS), (1.6, MOST_DEATHS + 1)])
def test_a_replica_that_was_silent_before_is_nobodys_fault(silent: float, losses: int) -> None:
    """A sequence goes there if there is no other; that the replica is lost then does not count against it."""
    fleet = Fleet("r0", heartbeat_seconds=3.0)
    fleet.now = silent
    fleet.submit(submit(1))
    for number in range(losses):
        assert fleet.one()[0] == f"r{number}"
        fleet.join(f"r{number + 1}")
        assert bool(fleet.kill(f"r{number}")) == (number == losses - 1)


def test_a_failed_step_is_the_end_of_a_replica_and_not_of_its_sequences() -> None:
    fleet = Fleet("a", "b")
    fleet.submit(submit(1))
    name, sent = fleet.one()
    assert fleet.say(name, Failed(sent.id, "EngineError", "A step of the engine failed")) == []
    assert fleet.one()[0] != name and name not in fleet.dispatcher.replicas


@pytest.mark.parametrize("kind", ["RequestError", "GrammarRefused", "ModelError", "CapacityError", "UnknownModel"])
def test_errors_of_a_sequence_go_to_its_client(kind: str) -> None:
    fleet = Fleet("a", "b")
    fleet.submit(submit(1))
    name, sent = fleet.one()
    failed = Failed(sent.id, kind, "why", param="p", code="c", refusal=("k", "/", "r"))
    assert fleet.say(name, failed) == [replace(failed, id=1)]
    assert not fleet.sent() and name in fleet.dispatcher.replicas


def test_silence_is_a_death() -> None:
    fleet = Fleet("a", "b", heartbeat_seconds=3.0)
    fleet.submit(submit(1))
    name, _ = fleet.one()
    fleet.now = 2.9
    fleet.say("b" if name == "a" else "a")
    fleet.dispatcher.tick(fleet.now)
    assert not fleet.sent()
    fleet.now = 3.1
    fleet.dispatcher.tick(fleet.now)
    assert fleet.one()[0] != name and fleet.dispatcher.take_lost() == [name]


def test_sequences_wait_for_the_first_replica_within_a_bound() -> None:
    fleet = Fleet(most_held=2, hold_seconds=10.0)
    fleet.submit(submit(1), submit(2))
    with pytest.raises(CapacityError, match="No replica is ready"):
        fleet.submit(submit(3))
    assert fleet.dispatcher.num_open == 2
    fleet.dispatcher.abort([2, 77])
    [end] = fleet.dispatcher.take_delivered()
    assert end == Done(2, FinishReason.ABORT, Usage(3, 0, 0))
    fleet.now = 9.0
    fleet.submit(submit(3))
    fleet.now = 11.0
    fleet.dispatcher.tick(fleet.now)
    [failed] = fleet.dispatcher.take_delivered()
    assert isinstance(failed, Failed) and (failed.id, failed.kind) == (1, "EngineDead")
    fleet.join("a")
    assert fleet.one()[0] == "a"


def beat(*waiting: int) -> Heartbeat:
    return Heartbeat({}, {}, waiting=waiting)


def test_who_waits_in_the_queue_is_not_blamed_for_its_replica() -> None:
    """However many are lost while it waits: it is in no quarantine, where one would go on after the other."""
    fleet = Fleet("r0")
    fleet.submit(*(submit(number, max_tokens=100) for number in range(4)))
    for lost in range(MOST_REPLAYS):
        numbers = [message.id for _, message in fleet.sent() if isinstance(message, Submit)]
        assert len(numbers) == 4, "all go on at once"
        fleet.say(f"r{lost}", beat(*numbers[1:]), out(numbers[0], 5))
        fleet.join(f"r{lost + 1}")
        fleet.now += 1
        assert fleet.kill(f"r{lost}") == []
    ended = fleet.kill(f"r{MOST_REPLAYS}")
    assert all(isinstance(end, Failed) and f"failed {MOST_REPLAYS + 1} times," in end.message for end in ended)
    assert len(ended) == 4


def test_who_has_begun_is_blamed() -> None:
    fleet = Fleet(*(f"r{number}" for number in range(MOST_DEATHS)))
    fleet.submit(submit(1))
    for _ in range(MOST_DEATHS):
        name, sent = fleet.one()
        fleet.say(name, beat(sent.id), beat())
        ended = fleet.kill(name)
    [failed] = ended
    assert isinstance(failed, Failed) and f"failed {MOST_DEATHS} times in a row" in failed.message


@pytest.mark.parametrize("is_proven", [True, False])
def test_a_grammar_that_is_compiled_is_blamed_until_an_answer_has_begun_under_it(*, is_proven: bool) -> None:
    fleet = Fleet(*(f"r{number}" for number in range(9)))
    asked = replace(submit(1), grammar=("regex", b"[0-9]+"))
    if is_proven:
        fleet.submit(replace(asked, id=9))
        name, sent = next((name, each) for name, each in fleet.sent() if isinstance(each, Submit))
        fleet.say(name, out(sent.id, 5), done(sent.id, 1))
    fleet.submit(asked)
    ended: list[Message] = []
    for _ in range(MOST_DEATHS):
        [(name, sent)] = [(name, each) for name, each in fleet.sent() if isinstance(each, Submit)]
        fleet.say(name, beat(sent.id))
        ended += fleet.kill(name)
    assert [isinstance(end, Failed) for end in ended] == ([] if is_proven else [True])


def test_an_abort_ends_a_sequence_once_wherever_it_is() -> None:
    fleet = Fleet("a", "b")
    fleet.submit(submit(1), submit(2))
    (name, one), (_, two) = fleet.sent()
    fleet.dispatcher.abort([1, 2])
    fleet.dispatcher.abort([1])
    assert sorted(message.ids for _, message in fleet.sent() if isinstance(message, Abort)) == [(one.id,), (two.id,)]  # type: ignore[union-attr]
    end = Done(one.id, FinishReason.ABORT, Usage(3, 0, 1))  # type: ignore[union-attr]
    assert fleet.say(name, out(one.id, 5), end) == [out(1, 5), replace(end, id=1)]  # type: ignore[union-attr]
    ended = [message for each in ("a", "b") for message in fleet.kill(each)]
    assert ended == [Done(2, FinishReason.ABORT, Usage(3, 0, 0))]


def test_tokens_of_one_base_model_are_not_continued_by_another() -> None:
    fleet = Fleet("old", hold_seconds=10.0)
    fleet.submit(submit(1), submit(2))
    (_, one), _ = fleet.sent()
    fleet.say("old", out(one.id, 5))  # type: ignore[union-attr]
    fleet.join("new", "other")
    fleet.kill("old")
    name, sent = fleet.one()
    assert (name, sent.tokens, fleet.dispatcher.num_held) == ("new", submit().tokens, 1)
    fleet.join("same")
    name, sent = fleet.one()
    assert (name, list(sent.generated)) == ("same", [5])


def test_the_next_call_of_a_conversation_goes_where_its_answer_is() -> None:
    """From the end of its first call on, whoever else has the prompt alone."""
    fleet = Fleet("a", "b", "c")
    prompt = array("i", range(64))
    fleet.submit(*(replace(submit(number, max_tokens=200), tokens=prompt) for number in range(12)))
    sent = fleet.sent()
    assert {name for name, _ in sent} == {"a", "b", "c"}
    for turn, (name, message) in enumerate(sent[:6]):
        answer = [number + turn for number in range(64)]
        fleet.say(name, out(message.id, *answer), done(message.id, 64))  # type: ignore[union-attr]
        fleet.submit(replace(submit(100 + turn), tokens=prompt + array("i", [*answer, 1, 2])))
        assert fleet.one()[0] == name


def test_a_draining_replica_ends_what_it_has() -> None:
    fleet = Fleet("a")
    fleet.submit(submit(1))
    _, sent = fleet.one()
    fleet.dispatcher.drain("a")
    fleet.submit(submit(2))
    assert not fleet.sent() and not fleet.dispatcher.is_drained("a")
    fleet.say("a", done(sent.id, 1))
    assert fleet.dispatcher.is_drained("a") and fleet.dispatcher.num_held == 1
    fleet.join("b")
    assert fleet.one()[0] == "b"


def test_a_name_means_the_same_version_until_the_end() -> None:
    fleet = Fleet("a", "b")
    fleet.dispatcher.name_adapter("sql", "digest-1")
    named = replace(submit(1), adapter="sql", tokenizer="of digest-1")
    fleet.submit(named)
    name, sent = fleet.one()
    fleet.dispatcher.name_adapter("sql", "digest-2")
    fleet.kill(name)
    fleet.submit(replace(named, id=2))
    (_, again), (_, other) = fleet.sent()
    assert (sent.adapter, again.adapter, other.adapter) == ("digest-1", "digest-1", "digest-2")  # type: ignore[union-attr]
    assert again.tokenizer == other.tokenizer == "of digest-1", "by which the replica refuses the last one"  # type: ignore[union-attr]
    fleet.dispatcher.name_adapter("sql", None)
    fleet.submit(replace(named, id=3))
    assert fleet.one()[1].adapter == "sql"


def test_names_in_a_combination_mean_the_same_versions_until_the_end() -> None:
    fleet = Fleet("a", "b")
    fleet.dispatcher.name_adapter("sql", "sql@2")
    fleet.submit(replace(submit(1), adapter="0.5*sql + 0.5*chat"))
    name, sent = fleet.one()
    assert sent.adapter == "0.5*chat + 0.5*sql@2"
    assert fleet.dispatcher.uses_adapter("sql@2") and fleet.dispatcher.uses_adapter("chat")
    assert not fleet.dispatcher.uses_adapter("sql")
    fleet.dispatcher.name_adapter("sql", "sql@3")
    fleet.kill(name)
    assert fleet.one()[1].adapter == sent.adapter
    assert not fleet.dispatcher.uses_adapter("sql@3")


def test_a_sequence_goes_on_where_its_adapter_is() -> None:
    fleet = Fleet("a", heartbeat_seconds=3.0)
    fleet.submit(replace(submit(1), adapter="sql"))
    assert fleet.one()[0] == "a"
    fleet.now = 2.0  # "a" is silent, so "b" gets the next one
    fleet.join("b")
    fleet.submit(replace(submit(2), adapter="sql"))
    assert fleet.one()[0] == "b"
    fleet.say("a")
    for name in ("c", "d", "e", "f"):
        fleet.join(name)
    fleet.dispatcher.leave("b", fleet.now)
    assert fleet.one()[0] == "a", "it went where the adapter must be loaded first"


def test_the_bytes_of_tokens_precede_the_sequences_on_every_replica() -> None:
    fleet, texts = Fleet("a"), TokenTexts(array("i", [1]), b"a", ())
    fleet.dispatcher.describe_tokens(texts)
    assert fleet.sent() == [("a", texts)]
    fleet.kill("a")
    fleet.submit(submit(1))
    fleet.join("b")
    (_, first), (_, second) = fleet.sent()
    assert first is texts and isinstance(second, Submit)


def test_the_bytes_of_tokens_are_given_up_on_every_replica_and_not_sent_to_later_ones() -> None:
    fleet, texts = Fleet("a", "b"), TokenTexts(array("i", [1]), b"a", (), "wide")
    fleet.dispatcher.describe_tokens(texts)
    fleet.dispatcher.describe_tokens(ForgetTokens("wide"))
    assert fleet.sent()[2:] == [("a", ForgetTokens("wide")), ("b", ForgetTokens("wide"))]
    fleet.join("c")
    assert fleet.sent() == []


def test_clients_are_told_that_a_name_stands_for_another_version() -> None:
    fleet = Fleet("a")
    fleet.dispatcher.name_adapter("sql", "sql@2")
    fleet.dispatcher.name_adapter("sql", None)
    assert fleet.dispatcher.take_delivered() == [AdapterChanged("sql", None)] * 2


def test_the_journal_reserves_the_memory_of_whole_answers() -> None:
    size = Journal(1 << 20).open(submit()).num_bytes
    fleet = Fleet("a", most_bytes=2 * size)
    fleet.submit(submit(1), submit(2))
    with pytest.raises(CapacityError, match=r"journal is full: it holds 2 requests"):
        fleet.submit(submit(3))
    _, (name, sent) = fleet.sent()
    fleet.say(name, done(sent.id, 1))  # type: ignore[union-attr]
    with pytest.raises(CapacityError):
        fleet.submit(submit(3), submit(4))
    assert fleet.dispatcher.num_open == 1
    fleet.submit(submit(3))
    with pytest.raises(ValueError, match="open already"):
        fleet.submit(submit(3))


def test_frames_are_taken_in_order_and_once() -> None:
    order: FrameOrder[str] = FrameOrder()
    assert order.feed(1, "b") == []
    assert order.feed(0, "a") == ["a", "b"]
    assert order.feed(1, "b") == order.feed(0, "a") == []
    with pytest.raises(FrameGap, match="frame 2 is missing"):
        for number in range(MOST_EARLY + 1):
            assert order.feed(3 + number, "c") == []


def test_a_gap_in_the_frames_of_a_replica_is_its_death() -> None:
    fleet = Fleet("a", "b")
    fleet.submit(submit(1))
    name, _ = fleet.one()
    for number in range(MOST_EARLY + 1):
        fleet.dispatcher.take(name, 1 + number, [], 0.0)
    assert fleet.one()[0] != name


def test_no_sequence_goes_where_its_adapter_cannot_be() -> None:
    """Nor waits for a replica that has it, where one is there that lacks it; others are served by all."""
    fleet = Fleet("a")
    fleet.dispatcher.join("b", ready(), fleet.now, lacking=["sql@2"])
    fleet.submit(*(replace(submit(number), adapter="sql@2") for number in range(6)))
    assert {name for name, _ in fleet.sent()} == {"a"}
    fleet.submit(submit(6))
    assert fleet.one()[0] == "b"
    ended = fleet.kill("a")
    assert [(each.id, each.kind) for each in ended] == [(n, "AdapterUnavailable") for n in range(6)]  # type: ignore[union-attr]
    assert not fleet.sent()
    fleet.join("c")
    fleet.submit(replace(submit(20), adapter="sql@2"))
    assert fleet.one()[0] == "c"
    fleet.dispatcher.drain("c")
    fleet.submit(replace(submit(21), adapter="sql@2"))
    [failed] = fleet.dispatcher.take_delivered()
    assert isinstance(failed, Failed) and failed.kind == "AdapterUnavailable" and not fleet.sent()


def test_a_sequence_stays_on_a_draining_replica_where_no_other_has_its_adapter() -> None:
    """While it is there it can end; elsewhere it fails, as its adapter's files are gone."""
    fleet = Fleet("a")
    fleet.submit(replace(submit(1), adapter="sql@2"), submit(2))
    first, second = (message for _, message in fleet.sent())
    fleet.dispatcher.join("b", ready(), fleet.now, lacking=["sql@2"])
    fleet.dispatcher.drain("a")
    fleet.dispatcher.hand_over("a", fleet.now)
    (_, ended), (name, moved) = fleet.sent()
    assert ended == Abort((second.id,)) and name == "b"  # type: ignore[union-attr]
    assert isinstance(moved, Submit) and moved.adapter is None
    numbered = first.id  # type: ignore[union-attr]
    fleet.numbers["b"] = 0
    assert fleet.say("a", out(numbered, 5), done(numbered, 1)) == [out(1, 5), done(1, 1)]


def test_a_sequence_that_waits_for_its_adapter_holds_no_other_up() -> None:
    """The only replica that has the adapter is in quarantine; another one takes what waits behind it."""
    fleet = Fleet("a", "b", "c")
    fleet.submit(submit(1))
    for _ in range(2):
        name, _ = fleet.one()
        fleet.kill(name)
    [(quarantined, _)] = fleet.sent()
    fleet.submit(replace(submit(2), adapter="sql"), submit(3))
    assert not fleet.sent() and fleet.dispatcher.num_held == 2
    fleet.dispatcher.join("d", ready(), fleet.now, lacking=["sql"])
    [(name, sent)] = fleet.sent()
    assert name == "d" != quarantined and isinstance(sent, Submit) and sent.adapter is None


def test_a_replica_that_drains_takes_what_waits_when_it_is_opened_again() -> None:
    fleet = Fleet("a")
    fleet.dispatcher.drain("a")
    fleet.submit(submit(1))
    assert not fleet.sent() and fleet.dispatcher.num_held == 1
    fleet.dispatcher.reopen("gone", fleet.now)
    fleet.dispatcher.reopen("a", fleet.now)
    assert fleet.one()[0] == "a" and fleet.dispatcher.num_held == 0


def test_a_replica_that_is_not_wanted_any_more_is_no_loss() -> None:
    """Its sequences go on, however often that happens to them."""
    fleet = Fleet("r0")
    fleet.submit(submit(1))
    for number in range(MOST_DEATHS + 1):
        name, _ = fleet.one()
        assert name == f"r{number}"
        fleet.join(f"r{number + 1}")
        fleet.dispatcher.retire(name, fleet.now)
        assert fleet.dispatcher.take_delivered() == [] and name not in fleet.dispatcher.replicas
    assert fleet.dispatcher.num_lost == 0 and fleet.dispatcher.take_lost() == []


STEP_SECONDS = 0.05
FIRST_TOKEN_SECONDS = 0.3
OFFSETS = st.lists(st.floats(0, 0.4), min_size=1, max_size=7)


class MachineLosses:
    """A fleet in which many replicas are lost in the same moment, and others come in their place.

    Args:
        deadly: a sequence whose replica dies a step after it came there.
    """

    def __init__(self, num_replicas: int, num_sequences: int, deadly: int | None = None) -> None:
        self.fleet = Fleet(*(f"r{number}" for number in range(num_replicas)))
        self.deadly = deadly
        self.running: dict[str, dict[int, float]] = {name: {} for name in self.fleet.numbers}
        self.clients: dict[tuple[str, int], int] = {}
        self.deaths = 0
        self.failed: list[int] = []
        for number in range(num_sequences):
            self.fleet.submit(submit(number, seed=number))
            self._deliver()

    def lose(self, name: str) -> None:
        self.running.pop(name, None)
        self.fleet.lose(name)
        self._take(self.fleet.dispatcher.take_delivered())

    def step(self) -> None:
        """Compute a step on each replica that lives, and let the dispatcher look at its clock."""
        self.fleet.now += STEP_SECONDS
        for name, numbers in list(self.running.items()):
            ended = [number for number, since in numbers.items() if self.fleet.now - since >= FIRST_TOKEN_SECONDS]
            if any(self.clients[name, number] == self.deadly for number in numbers):
                self.deaths += 1
                self.lose(name)
                continue
            self._take(self.fleet.say(name, beat(), *(done(number, 1) for number in ended)))
            for number in ended:
                del numbers[number]
        self.fleet.dispatcher.tick(self.fleet.now)
        self._deliver()

    def _deliver(self) -> None:
        for name, message in self.fleet.sent():
            if isinstance(message, Submit) and name in self.running:
                self.running[name][message.id] = self.fleet.now
                self.clients[name, message.id] = message.params.seed or 0

    def _take(self, delivered: list[Message]) -> None:
        self.failed += [message.id for message in delivered if isinstance(message, Failed)]
        self._deliver()

    def lose_many(self, offsets: list[float]) -> None:
        """Lose replicas one by one within half a second, while the others compute, and start others."""
        began, names = self.fleet.now, list(self.running)
        for name, offset in zip(names, sorted(offsets), strict=False):
            while self.fleet.now < began + offset:
                self.step()
            if name in self.running:
                self.lose(name)
        for _ in names:
            self.fleet.join(name := f"n{len(self.fleet.numbers)}")
            self.running[name] = {}

    def settle(self) -> None:
        for _ in range(round(4 / STEP_SECONDS)):
            self.step()


@settings(max_examples=repeats(60))
@given(st.integers(1, 8), st.integers(1, 12), st.lists(OFFSETS, min_size=1, max_size=3))
def test_no_sequence_fails_by_the_loss_of_many_replicas_in_one_moment(
    num_replicas: int, num_sequences: int, bursts: list[list[float]]
) -> None:
    """However often it was moved to the next one that was about to go."""
    world = MachineLosses(num_replicas, num_sequences)
    for offsets in bursts:
        world.lose_many(offsets)
        world.settle()
    assert not world.failed and not world.fleet.dispatcher.num_open


@settings(max_examples=repeats(40))
@given(st.integers(1, 6), st.integers(1, 6), OFFSETS)
def test_a_deadly_sequence_ends_beside_the_loss_of_many_replicas(
    num_replicas: int, num_sequences: int, offsets: list[float]
) -> None:
    world = MachineLosses(num_replicas, num_sequences, deadly=0)
    world.lose_many(offsets)
    for _ in range(MOST_DEATHS):
        world.fleet.join(name := f"n{len(world.fleet.numbers)}")
        world.running[name] = {}
        world.settle()
    assert world.failed == [0] and world.deaths <= MOST_DEATHS
    assert not world.fleet.dispatcher.num_open


def test_silent_replicas_are_given_up_together() -> None:
    """A power cut closes no connection: none of them gets the sequences of another one."""
    fleet = Fleet(*(f"r{number}" for number in range(20)), heartbeat_seconds=3.0)
    fleet.submit(submit(1))
    fleet.one()
    fleet.now = 3.1
    fleet.dispatcher.tick(fleet.now)
    assert not fleet.sent() and not fleet.dispatcher.replicas and fleet.dispatcher.num_held == 1
    fleet.join("new")
    assert fleet.one()[0] == "new" and fleet.dispatcher.num_replays == 1


def test_a_sequence_goes_on_where_there_was_a_sign_of_life_since() -> None:
    """Not on a replica that was silent when it lost its own: that may be gone too."""
    fleet = Fleet("a", "b", heartbeat_seconds=3.0)
    fleet.submit(submit(1))
    name, _ = fleet.one()
    other = "b" if name == "a" else "a"
    fleet.now = 1.6
    fleet.lose(name)
    assert not fleet.sent() and fleet.dispatcher.num_held == 1
    fleet.say(other)
    fleet.dispatcher.tick(fleet.now)
    assert fleet.one()[0] == other
