"""KV events: in vLLM's shape, and whoever follows them knows which pages are in the tree."""

from __future__ import annotations

import random
from array import array
from pathlib import Path as FilePath

from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.faulty_files import FaultyFiles
from support.machine.thoroughness import repeats

from rootgraft.engine.kv_cache.block_codec import BlockCodec
from rootgraft.engine.kv_cache.block_files import BlockFiles
from rootgraft.engine.kv_cache.block_keys import BlockId, BlockScheme
from rootgraft.engine.kv_cache.kv_events import MEDIUM, Event, KvEventLog, TierEventLog
from rootgraft.engine.kv_cache.kv_stores import DiskStore, HostStore, KvStore
from rootgraft.engine.kv_cache.prefix_cache import PrefixCache
from rootgraft.radix.namespace import Namespace, Path

PAGE = 4
SCHEME = BlockScheme("fake", PAGE, 8)
BASE = Path(Namespace("base"))
PATHS = (
    BASE,
    Path(Namespace("base", tenant="t")),
    Path(Namespace("base", salt="s")),
    Path(Namespace("base", "digest")),
    Path(Namespace("base", "digest"), 6, Namespace("base")),
)


def compute(cache: PrefixCache, path: Path, tokens: array[int]) -> None:
    """Let a sequence compute its tokens and end."""
    lease = cache.acquire(path, tokens, len(tokens) - 1)
    lease.take_copy()
    if cache.grow(lease, len(tokens)):
        cache.commit(lease, tokens, len(tokens))
    cache.release(lease, tokens, len(tokens) if lease.num_shared else lease.num_tokens)


def test_events_have_the_shape_of_vllm_s() -> None:
    log = KvEventLog(SCHEME)
    cache = PrefixCache(8, PAGE, events=log)
    path = Path(Namespace("base", "digest", salt="secret", tenant="t"))
    compute(cache, path, array("i", range(10)))
    [stored] = log.take()
    kind, hashes, parent, tokens, size, lora_id, medium, adapter, keys = stored
    assert (kind, parent, tokens, size, lora_id, medium) == ("BlockStored", None, [*range(8)], PAGE, None, MEDIUM)
    assert len(hashes) == 2 and all(0 <= each < 1 << 64 for each in hashes)
    assert adapter == "digest" and keys[0][:3] == ["base=base", "adapter=digest", "tenant=t"]
    assert len(keys) == 2 and "secret" not in str(keys)
    compute(cache, path, array("i", range(14)))
    [stored] = log.take()
    assert (stored[2], stored[3]) == (hashes[1], [8, 9, 10, 11]), "what follows names the block before it"
    cache.clear()
    [removed] = log.take()
    assert removed[0] == "BlockRemoved" and {*removed[1]} == {*hashes, *stored[1]} and log.is_empty
    log.clear()
    assert log.take() == [["AllBlocksCleared"]] and not log.take()


class Follower:
    """Knows what is in a tree from its events alone."""

    def __init__(self) -> None:
        self.tokens: dict[int, tuple[int | None, tuple[int, ...]]] = {}

    def take(self, events: list[Event]) -> None:
        for kind, *fields in events:
            if kind == "AllBlocksCleared":
                self.tokens.clear()
            elif kind == "BlockRemoved":
                for each in fields[0]:
                    del self.tokens[each]
            else:
                hashes, parent, tokens, size = fields[:4]
                assert parent is None or parent in self.tokens, "follows what is not there"
                for index, each in enumerate(hashes):
                    assert each not in self.tokens, "stored twice"
                    self.tokens[each] = parent, tuple(tokens[index * size : (index + 1) * size])
                    parent = each


@settings(max_examples=repeats(40), deadline=None)
@given(
    st.integers(6, 20),
    st.lists(
        st.tuples(st.sampled_from(PATHS), st.lists(st.integers(0, 1), min_size=2, max_size=20), st.integers(0, 9)),
        max_size=20,
    ),
)
def test_a_follower_knows_what_is_cached(num_pages: int, asked: list[tuple[Path, list[int], int]]) -> None:
    """Whatever is computed, evicted, dropped and cleared: its blocks are the tree's whole pages."""
    log, follower = KvEventLog(SCHEME), Follower()
    cache = PrefixCache(num_pages, PAGE, events=log)
    for path, tokens, chance in asked:
        compute(cache, path, array("i", tokens))
        if chance == 0:
            cache.clear()
        elif chance == 1:
            cache.drop(path.namespace)
        follower.take(log.take())
        for each, said, _ in asked:
            keys: list[bytes] = []
            num_whole = len(said) // PAGE
            SCHEME.extend(keys, each, array("i", said).tobytes(), num_whole)
            known = [int.from_bytes(key[:8], "big") in follower.tokens for key in keys]
            found = cache.match(each, array("i", said), len(said)) // PAGE
            assert (known.index(False) if False in known else num_whole) == found
        cache.check()


def pages_of(path: Path, tokens: list[int]) -> list[BlockId]:
    keys: list[bytes] = []
    data = array("i", tokens).tobytes()
    SCHEME.extend(keys, path, data, len(tokens) // PAGE)
    return SCHEME.blocks(keys, path, data, 0, len(keys))


def known_after(events: list[Event], known: dict[str, set[int]]) -> dict[str, set[int]]:
    """Return the hashes of each medium that a subscriber knows after events; each is stored and removed in turns."""
    known = {medium: {*hashes} for medium, hashes in known.items()}
    for kind, hashes, *fields in events:
        medium = fields[4] if kind == "BlockStored" else fields[0]
        for each in hashes:
            assert (each in known[medium]) == (kind == "BlockRemoved")
        known[medium] ^= {*hashes}
    return known


def test_events_of_tiers_say_what_their_stores_have(tmp_path: FilePath) -> None:
    """Whatever is written, evicted, damaged, forgotten or cleared, in the tier of memory and in that of files."""
    rng, events = random.Random(5), TierEventLog()
    codec = BlockCodec(SCHEME)
    files = FaultyFiles(tmp_path, rng, 0.1)
    stores: dict[str, KvStore] = {
        "CPU": HostStore(6 * 8, events=events),
        "DISK": DiskStore(files, codec, 9 * (8 + 4096 + 16), events=events),
    }
    blocks = [each for path in PATHS for each in pages_of(path, [rng.randrange(9) for _ in range(16)])]
    known: dict[str, set[int]] = {medium: set() for medium in stores}
    for turn in range(400):
        store, block = rng.choice([*stores.values()]), rng.choice(blocks)
        what = rng.choice(("put", "put", "get", "get", "touch"))
        if what == "put" and not store.touch(block.key):
            store.put(block, bytes(8))
        elif what == "get":
            store.get(block)
        if turn % 97 == 96:
            store.clear()
        known = known_after(events.take(SCHEME), known)
        for medium, each in stores.items():
            assert known[medium] == {_hash_of(one) for one in blocks if each.touch(one.key)}
    assert files.num_faults > 10 and all(each.stats()[f"kv_evicted_{each.tier}"] for each in stores.values())  # type: ignore[attr-defined]
    for each in stores.values():
        each.close()


def _hash_of(block: BlockId) -> int:
    return int.from_bytes(block.key[:8], "big")


def test_a_file_of_an_earlier_process_is_noted_when_it_is_read(tmp_path: FilePath) -> None:
    [block] = pages_of(BASE, [1, 2, 3, 4])
    for turn in range(2):
        events = TierEventLog()
        store = DiskStore(BlockFiles(tmp_path), BlockCodec(SCHEME), 1 << 20, events=events)
        if turn == 0:
            store.put(block, bytes(8))
        else:
            assert events.take(SCHEME) == []
            assert store.get(block) is not None and store.get(block) is not None
        [[_, hashes, parent, tokens, _, _, medium, adapter, _]] = events.take(SCHEME)
        assert (hashes, parent, tokens, medium, adapter) == ([_hash_of(block)], None, [1, 2, 3, 4], "DISK", None)
        store.close()


def test_a_cleared_pool_has_subscribers_forget_the_tiers() -> None:
    tiers = TierEventLog()
    log, store = KvEventLog(SCHEME, tiers), HostStore(80, events=tiers)
    [block] = pages_of(BASE, [1, 2, 3, 4])
    store.put(block, bytes(8))
    log.clear()
    assert log.take() == [["AllBlocksCleared"]]
    assert store.get(block) is not None
    [stored] = log.take()
    assert stored[0] == "BlockStored" and stored[6] == "CPU", "it is there still"
