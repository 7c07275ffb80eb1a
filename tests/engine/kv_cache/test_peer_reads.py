"""KV of other replicas: who asks, how long it waits, and that only what it asked for is ever used."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rootgraft.engine.kv_cache.block_codec import BlockCodec
from rootgraft.engine.kv_cache.block_keys import BlockId, BlockScheme
from rootgraft.engine.kv_cache.kv_tiers import KvTiers
from rootgraft.engine.kv_cache.peer_reads import ANSWER_SECONDS, PeerReads
from rootgraft.engine.messages import FetchKv, KvBlocks
from rootgraft.radix.namespace import Namespace, Path

PAGE = 4
SCHEME = BlockScheme("fake", PAGE, 1)
PATH = Path(Namespace("base", "adapter", "salt", "tenant"))
TOKENS = array("i", range(16))


class World:
    """Tiers without stores of their own, on a clock of this test."""

    def __init__(self, capacity: int = 100) -> None:
        self.now = 0.0
        self.peers = PeerReads(BlockCodec(SCHEME), capacity, lambda: self.now)
        self.tiers = KvTiers(SCHEME, _NoPool(), (), self.peers)

    def awaits(self, number: int, num_cached: int = 0) -> bool:
        return self.tiers.awaits(number, PATH, TOKENS, num_cached, len(TOKENS) // PAGE)

    def got(self, number: int) -> list[int]:
        assert not self.awaits(number)
        fetch = self.tiers.fetched(number)
        return [payload[0] for payload in fetch.payloads] if fetch else []


class _NoPool:
    def read_page(self, page: int) -> bytes:
        raise AssertionError("nothing is written")


def encoded(path: Path = PATH, tokens: array[int] = TOKENS, scheme: BlockScheme = SCHEME) -> tuple[bytes, ...]:
    """Return the blocks of a prefix, whose page i holds the byte i."""
    keys, count = list[bytes](), len(tokens) // PAGE
    scheme.extend(keys, path, tokens.tobytes(), count)
    blocks: Sequence[BlockId] = scheme.blocks(keys, path, tokens.tobytes(), 0, count)
    codec = BlockCodec(scheme)
    return tuple(b"".join(codec.encode(block, bytes([index]))) for index, block in enumerate(blocks))


def test_a_sequence_waits_for_what_it_asks_once() -> None:
    world = World()
    assert not world.awaits(1), "nobody is said to have anything"
    world.tiers.drop(1)
    world.peers.expect(2, 13)
    assert world.awaits(2, 1) and world.awaits(2, 1)
    assert world.peers.take_requests() == [FetchKv(2, PATH, TOKENS[:12], 1)]
    assert world.awaits(3, 1), "it needs the same pages"
    world.peers.take(KvBlocks(2, encoded()[1:2], False))
    assert world.awaits(2, 1)
    world.peers.take(KvBlocks(2, encoded()[2:3], True))
    assert not world.awaits(2, 1) and not world.awaits(3, 1)
    assert [fetch.payloads[0][0] for number in (2, 3) if (fetch := world.tiers.fetched(number))] == [1, 1]
    assert not world.peers.take_requests()
    keys: list[bytes] = []
    SCHEME.extend(keys, PATH, TOKENS.tobytes(), 4)
    world.tiers.arrived(keys)
    assert world.tiers.stats()["kv_bytes_peer"] == 0
    world.tiers.check([])


def test_a_wait_ends_without_an_answer() -> None:
    world = World()
    world.peers.expect(1, 16)
    assert world.awaits(1)
    world.now = ANSWER_SECONDS
    assert world.awaits(1)
    world.peers.take(KvBlocks(1, encoded()[:1], False))
    world.now = 2 * ANSWER_SECONDS
    assert world.awaits(1), "a part of it has come"
    world.now += 0.1
    assert world.got(1) == [0]


def test_one_that_ends_leaves_the_question_to_others() -> None:
    world = World()
    world.peers.expect(1, 16)
    world.peers.expect(2, 16)
    assert world.awaits(1) and world.awaits(2)
    world.tiers.drop(1)
    assert world.awaits(2)
    assert [request.id for request in world.peers.take_requests()] == [1, 2]
    world.tiers.reset()
    assert not world.awaits(2)


FOREIGN = [
    Namespace("other", "adapter", "salt", "tenant"),
    Namespace("base", "other", "salt", "tenant"),
    Namespace("base", None, "salt", "tenant"),
    Namespace("base", "adapter", "other", "tenant"),
    Namespace("base", "adapter", "salt", "other"),
    Namespace("base", "adapter", "salt", "tenant", is_long=True),
]


@pytest.mark.parametrize("namespace", FOREIGN, ids=str)
def test_pages_of_another_namespace_are_a_miss(namespace: Namespace) -> None:
    world = World()
    world.peers.expect(1, 16)
    assert world.awaits(1)
    world.peers.take(KvBlocks(1, encoded(Path(namespace)), True))
    assert world.got(1) == []


def test_pages_of_other_tokens_or_another_form_are_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    for number, blocks in enumerate(
        (
            encoded(tokens=array("i", [9, *TOKENS[1:]])),
            encoded(scheme=replace(SCHEME, form="other")),
            encoded(scheme=replace(SCHEME, secret=b"other")),
            tuple(block[:-1] for block in encoded()),
            (b"", b"no block"),
        )
    ):
        world.peers.expect(number, 16)
        assert world.awaits(number)
        world.peers.take(KvBlocks(number, blocks, True))
        assert world.got(number) == []
        world.tiers.drop(number)
    assert caplog.text.count("were not used") == 4


def test_what_came_and_nobody_took_is_bounded() -> None:
    world = World(capacity=2)
    world.peers.take(KvBlocks(0, encoded(), True))
    assert world.tiers.stats()["kv_bytes_peer"] == 2
    world.peers.expect(1, 16)
    assert world.awaits(1), "the first ones had to go"
    assert world.tiers.clear() == 2
