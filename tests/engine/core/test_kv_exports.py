"""KV exports: what another replica is sent of a prefix cache, part by part, and that each read ends once."""

from __future__ import annotations

import random
from array import array

import pytest
import torch
from support.engine.adapter_engine import Engine
from support.engine.core_hooks import cache_of, tree_of, worker_of
from support.engine.fake_worker import FakePages
from support.engine.injected_faults import Fault

from rootgraft.engine.core import kv_exports
from rootgraft.engine.core.kv_exports import KvExports
from rootgraft.engine.kv_cache.block_codec import BlockCodec
from rootgraft.engine.kv_cache.make_tiers import plain_scheme
from rootgraft.engine.kv_cache.state_cache import StateSlots
from rootgraft.engine.messages import KvBlocks, ReadKv
from rootgraft.engine.sequence.sequence import Sequence
from rootgraft.radix.namespace import Namespace, Path

PROMPT = [*map(random.Random(7).randrange, [11] * 42)]
PAGES = 10  # whole ones of the prompt


class Source:
    """An engine that has computed the prompt, and its exports."""

    def __init__(self, states: StateSlots | None = None) -> None:
        self.engine = Engine(states=states)
        self.engine.submit(PROMPT, max_tokens=1, ignore_eos=True)
        self.engine.run()
        pages = worker_of(self.engine.core).kv_pages
        self.codec = BlockCodec(plain_scheme(pages, 4))
        self.exports = KvExports(self.codec, pages)
        [namespace] = tree_of(self.engine.core).tops
        self.path = Path(namespace)

    def ask(self, number: int = 1, *, path: Path | None = None, first: int = 0) -> None:
        self.exports.add(ReadKv(number, path or self.path, array("i", PROMPT), first))

    def poll(self, sequence: Sequence | None = None, *, is_open: bool = False) -> list[KvBlocks]:
        return self.exports.poll(cache_of(self.engine.core), lambda number: sequence, lambda number: is_open)

    def positions(self, answers: list[KvBlocks]) -> list[tuple[int, bool]]:
        """Return the position of each block, and whether it is a state."""
        blocks = [self.codec.read(data, "")[0] for answer in answers for data in answer.blocks]
        return [(block.position, block.is_state) for block in blocks]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for three pages after a step."""
    monkeypatch.setattr(kv_exports, "STEP_BYTES", 3 * 32)


def test_all_pages_of_a_prefix_come_and_the_read_ends() -> None:
    source = Source()
    source.ask()
    [answer] = source.poll()
    assert (answer.id, answer.is_last) == (1, True) and not source.exports.has_work
    assert source.positions([answer]) == [(4 * page, False) for page in range(PAGES)]


def test_what_is_there_already_is_left_out() -> None:
    source = Source()
    source.ask(first=7)
    assert source.positions(source.poll()) == [(28, False), (32, False), (36, False)]
    source.ask(first=PAGES)
    [answer] = source.poll()
    assert answer.blocks == () and answer.is_last


@pytest.mark.parametrize(
    "namespace",
    [{"base": "other"}, {"salt": "s"}, {"tenant": "t"}, {"adapter": "digest"}],
    ids=str,
)
def test_another_namespace_gets_nothing(namespace: dict[str, str]) -> None:
    source = Source()
    base = source.path.namespace.base
    source.ask(path=Path(Namespace(**{"base": base} | namespace)))
    assert source.poll() == [KvBlocks(1, (), True)]


def test_a_state_follows_the_last_page() -> None:
    source = Source(StateSlots(4, 16, 12))
    source.ask()
    assert source.positions(source.poll()) == [*((4 * page, False) for page in range(PAGES)), (36, True)]


@pytest.mark.usefixtures("small_steps")
def test_parts_are_bounded_and_the_first_read_goes_first() -> None:
    source = Source()
    source.ask(1)
    source.ask(2)
    seen: dict[int, int] = {1: 0, 2: 0}
    order: list[int] = []
    for _ in range(40):
        for answer in source.poll():
            assert len(answer.blocks) <= 3
            seen[answer.id] += len(answer.blocks)
            if answer.is_last:
                order.append(answer.id)
        if not source.exports.has_work:
            break
    assert seen == {1: PAGES, 2: PAGES} and order == [1, 2]


def test_a_sequence_that_is_not_known_yet_is_waited_for() -> None:
    source = Source()
    source.exports.add(ReadKv(1, None, array("i"), 0, follows=5))
    assert source.poll(is_open=True) == [] and source.exports.has_work
    assert source.poll(is_open=False) == [KvBlocks(1, (), True)] and not source.exports.has_work


def test_clear_answers_all_reads() -> None:
    source = Source()
    source.ask(1)
    source.ask(2)
    assert source.exports.clear() == [KvBlocks(1, (), True), KvBlocks(2, (), True)]
    assert not source.exports.has_work and source.poll() == []


def test_an_engine_whose_pages_cannot_be_read_answers_with_none() -> None:
    exports, source = KvExports(None, None), Source()
    exports.add(ReadKv(1, source.path, array("i", PROMPT), 0, 0))
    answers = exports.poll(cache_of(source.engine.core), lambda number: None, lambda number: False)
    assert answers == [KvBlocks(1, (), True)]


@pytest.mark.parametrize("follows", [0, 9])
def test_a_read_without_memory_ends_and_the_engine_goes_on(follows: int) -> None:
    """The other replica computes what it was not sent, and later reads find all pages."""
    source = Source()
    error = torch.OutOfMemoryError("CUDA out of memory.")
    source.exports.add(ReadKv(1, source.path, array("i", PROMPT), 0, follows))
    with Fault((FakePages, "read_page"), 3, error, late=False).injected():
        [answer] = source.poll(is_open=True)
    assert (answer.id, answer.blocks, answer.is_last) == (1, (), True) and not source.exports.has_work
    source.ask(2)
    assert len(source.positions(source.poll())) == PAGES
