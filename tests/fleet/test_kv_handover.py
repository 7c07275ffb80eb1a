"""KV handover: each copy begins once and ends once, one at a time of a source, and nothing is left of who leaves."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st
from support.machine.thoroughness import repeats

from rootgraft.engine.messages import ListPrefixes
from rootgraft.engine.types import KvPrefix
from rootgraft.fleet.kv_handover import KvHandover, PlannedCopy
from rootgraft.radix.namespace import Namespace, Path

PREFIX = KvPrefix(Path(Namespace("base")), array("i", range(8)), 0, None)


def copy(source: str, target: str) -> PlannedCopy:
    return PlannedCopy(source, target, PREFIX, (1, 2))


def test_a_question_is_answered_once() -> None:
    handover = KvHandover()
    drains, joins = handover.ask("a"), handover.ask("b", "c")
    assert (drains.of_sessions, joins.of_sessions) == (True, False) and drains.id != joins.id
    assert handover.uses("a") and handover.uses("b") and not handover.uses("c")
    assert handover.answered(drains.id) == ("a", "") and handover.answered(joins.id) == ("b", "c")
    assert handover.answered(drains.id) is None and not handover.uses("a")


def test_a_replica_that_drains_is_asked_once_each_time() -> None:
    handover = KvHandover()
    assert handover.begin_drain("a") and not handover.begin_drain("a")
    handover.reopen("a")
    assert handover.begin_drain("a")


def test_what_was_asked_for_a_replica_that_left_is_not_copied() -> None:
    handover = KvHandover()
    question: ListPrefixes = handover.ask("a", "b")
    handover.leave("b")
    assert handover.answered(question.id) is None and not handover.uses("a")


@settings(max_examples=repeats(40), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("def")), max_size=12),
    st.lists(st.sampled_from(["take", "end", "leave a", "leave d"]), max_size=30),
)
def test_copies_begin_in_order_and_end(pairs: list[tuple[str, str]], steps: list[str]) -> None:
    handover, running, gone = KvHandover(), dict[int, PlannedCopy](), set[str]()
    for pair in pairs:
        handover.plan(copy(*pair))
    begun: list[PlannedCopy] = []
    for step in [*steps, *["take", "end"] * len(pairs)]:
        if step == "take" and (taken := handover.take()) is not None:
            assert taken.source not in {each.source for each in running.values()}, "two at once of a source"
            assert not gone & {taken.source, taken.target}
            handover.begin(len(begun), taken)
            running[len(begun)] = taken
            begun.append(taken)
        elif step == "end" and running:
            ticket = min(running)
            assert handover.end(ticket) == running.pop(ticket) and handover.end(ticket) is None
        elif step.startswith("leave"):
            gone.add(step[-1])
            handover.leave(step[-1])
            running = {k: each for k, each in running.items() if not gone & {each.source, each.target}}
        for source in "abc":
            assert handover.uses(source) or source not in {each.source for each in running.values()}
    assert not any(map(handover.uses, "abc"))
    for source in {*"abc"} - gone:
        of_source = [each.target for each in begun if each.source == source]
        wanted = [target for each, target in pairs if each == source]
        assert [each for each in of_source if each not in gone] == [each for each in wanted if each not in gone]
