"""Copies of KV under way: each target gets one last answer, whoever leaves, and nothing of what it did not ask for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.messages import KvBlocks
from rootgraft.fleet.transfer_table import TransferTable


def test_answers_go_to_who_asked_under_its_own_number() -> None:
    table = TransferTable(2)
    first, second = table.begin("a", "b", 7), table.begin("a", "c", 8)
    assert first and second and table.begin("a", "d", 9) is None, "as many as there may be"
    assert table.forward("a", KvBlocks(first, (b"page",), False)) == ("b", KvBlocks(7, (b"page",), False))
    assert table.forward("c", KvBlocks(first, (b"other",), True)) is None, "not from another one"
    assert table.forward("a", KvBlocks(first, (), True)) == ("b", KvBlocks(7, (), True))
    assert table.forward("a", KvBlocks(first, (b"late",), True)) is None
    assert table.reads_from("a") and not table.reads_from("b")
    assert table.leave("a") == [("c", KvBlocks(8, (), True))] and not len(table)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("abc")), max_size=20), st.permutations("abc"))
def test_every_target_that_stays_gets_one_last_answer(pairs: list[tuple[str, str]], leaving: list[str]) -> None:
    table, waiting = TransferTable(20), set()
    for number, (source, target) in enumerate(pairs):
        assert table.begin(source, target, number) is not None
        waiting.add((target, number))
    gone: set[str] = set()
    for name in leaving[:2]:
        gone.add(name)
        for target, answer in table.leave(name):
            assert answer.is_last and not answer.blocks
            waiting.remove((target, answer.id))
    left = {(target, number) for target, number in waiting if target not in gone}
    assert len(table) == len([pair for pair in pairs if not gone.intersection(pair)]) == len(left)
