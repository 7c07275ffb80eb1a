"""Hot prefixes: what another replica gets first, each page once, as much as it has room for."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from pathlib import Path as FilePath

import pytest
from support.engine.adapter_engine import Engine, write
from support.engine.core_hooks import cache_of, scheduler_of, worker_of

from rootgraft.engine.core.hot_prefixes import MOST_PREFIXES, hot_prefixes, session_prefixes, within
from rootgraft.engine.kv_cache.block_keys import BlockScheme
from rootgraft.engine.kv_cache.make_tiers import plain_scheme
from rootgraft.engine.messages import CachedPrefixes, ListPrefixes
from rootgraft.engine.types import KvPrefix
from rootgraft.radix.namespace import Namespace, Path

DOCUMENTS = [
    [random.Random(f"{each} hot").randrange(11) for each in range(8 * number, 8 * number + 40)] for number in range(4)
]
PAGE = 4


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(num_pages=200)
    yield engine
    engine.core.close()


def ask(engine: Engine, prompt: list[int], **fields: object) -> None:
    engine.submit(prompt, max_tokens=1, ignore_eos=True, **fields)
    engine.run()


def scheme_of(engine: Engine) -> BlockScheme:
    return plain_scheme(worker_of(engine.core).kv_pages, PAGE)


def hot(engine: Engine, most_pages: int = 1000) -> tuple[KvPrefix, ...]:
    return within(hot_prefixes(cache_of(engine.core)), scheme_of(engine), {}, most_pages)


def test_what_was_hit_most_often_comes_first_and_what_never_was_not_at_all(engine: Engine) -> None:
    for number, times in ((0, 2), (1, 5), (2, 1), (3, 3)):
        for turn in range(times):
            ask(engine, [*DOCUMENTS[number], turn, turn])
    found = hot(engine)
    assert [list(each.tokens) for each in found] == [DOCUMENTS[number] for number in (1, 3, 0)]
    assert all((each.first, each.adapter) == (0, None) for each in found)


def test_a_page_of_two_prefixes_is_copied_once(engine: Engine) -> None:
    stem = DOCUMENTS[0]
    for branch in ([1] * 8, [2] * 8, [1] * 8, [2] * 8):
        ask(engine, [*stem, *branch, 3])
    found = hot(engine)
    pages = [list(each.tokens)[each.first * PAGE :] for each in found]
    assert pages[0] == stem and sorted(pages[1:]) == [[1] * 8, [2] * 8]
    assert all(list(each.tokens)[: len(stem)] == stem for each in found), "a read has all tokens from the first on"


def test_no_more_pages_than_there_is_room_for(engine: Engine) -> None:
    for number, times in ((0, 2), (1, 3)):
        for turn in range(times):
            ask(engine, [*DOCUMENTS[number], turn])
    assert [list(each.tokens) for each in hot(engine, 19)] == [DOCUMENTS[1]]
    assert len(hot(engine, 20)) == 2 and not hot(engine, 9)


def test_a_list_has_a_bound() -> None:
    namespace = Path(Namespace("base"))
    many = [(namespace, array("i", [number] * PAGE)) for number in range(MOST_PREFIXES + 5)]
    assert len(within(many, BlockScheme("fake", PAGE, 8), {}, 1000)) == MOST_PREFIXES
    assert not within([(namespace, array("i", [1] * (PAGE - 1)))], BlockScheme("fake", PAGE, 8), {}, 1000)


def test_the_last_session_comes_first(engine: Engine) -> None:
    for number in (0, 1, 2):
        ask(engine, DOCUMENTS[number], session=f"chat {number}")
    ask(engine, [*DOCUMENTS[0], 1], session="chat 0")
    found = within(session_prefixes(scheduler_of(engine.core).session_pins), scheme_of(engine), {}, 1000)
    assert [list(each.tokens)[:40] for each in found] == [DOCUMENTS[number] for number in (0, 2, 1)]


def test_prefixes_of_adapters_have_their_name_and_those_of_unknown_ones_are_left_out(tmp_path: FilePath) -> None:
    write(tmp_path, "one", 1)
    engine = Engine(tmp_path, num_pages=200)
    engine.load("one", str(tmp_path / "one"))
    for turn in range(3):
        ask(engine, [*DOCUMENTS[0], turn], adapter="one")
    [digest] = {each.adapter for each in (path.namespace for path, _ in hot_prefixes(cache_of(engine.core)))}
    assert digest
    found = within(hot_prefixes(cache_of(engine.core)), scheme_of(engine), {digest: "one"}, 1000)
    assert [(each.path.namespace.adapter, each.adapter) for each in found] == [(digest, "one")]
    assert not hot(engine)
    engine.core.close()


def test_an_engine_without_copies_has_nothing_to_list(engine: Engine) -> None:
    ask(engine, DOCUMENTS[0], session="chat")
    engine.core.handle([ListPrefixes(7, of_sessions=True)])
    assert engine.core.step() == [CachedPrefixes(7, ())]
