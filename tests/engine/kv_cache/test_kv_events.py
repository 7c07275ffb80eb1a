"""KV events: in vLLM's shape, and whoever follows them knows which pages are in the tree."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from rootgraft.engine.kv_cache.block_keys import BlockScheme
from rootgraft.engine.kv_cache.kv_events import MEDIUM, Event, KvEventLog
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


@settings(max_examples=40, deadline=None)
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
