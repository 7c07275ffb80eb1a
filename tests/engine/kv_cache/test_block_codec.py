"""Blocks of KV: what was written comes back, and nothing else is taken for it."""

from __future__ import annotations

import json
import random
from array import array
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rootgraft.engine.kv_cache.block_codec import (
    ALIGNMENT,
    PREAMBLE_BYTES,
    BlockCodec,
    NotABlock,
    block_checksum,
    block_preamble,
    block_size,
    describe,
)
from rootgraft.engine.kv_cache.block_keys import BlockId, BlockScheme
from rootgraft.radix.namespace import Namespace, Path

PAGE, BYTES = 4, 640
SCHEME = BlockScheme("float32 k,v 2x1x4x10", PAGE, BYTES)
BASE = Namespace("base", "adapter", "salt", "tenant")
KEYS = (b"", bytes(range(32)))


def blocks_of(path: Path, tokens: list[int], scheme: BlockScheme = SCHEME) -> list[BlockId]:
    data, keys = array("i", tokens).tobytes(), list[bytes]()
    count = len(tokens) // scheme.page_size
    scheme.extend(keys, path, data, count)
    return scheme.blocks(keys, path, data, 0, count)


def encoded(codec: BlockCodec, block: BlockId, payload: bytes) -> bytes:
    return b"".join(bytes(part) for part in codec.encode(block, payload))


PAYLOAD = random.Random(0).randbytes(BYTES)
BLOCK = blocks_of(Path(BASE), [*range(8)])[1]


@pytest.mark.parametrize("key", KEYS)
@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=PAGE, max_size=3 * PAGE), st.text(max_size=9), st.integers(0, PAGE * 2)
)
def test_a_block_comes_back(key: bytes, tokens: list[int], text: str, switch: int) -> None:
    codec, own = BlockCodec(SCHEME, key), Namespace("base", "adapter", text, text)
    path = Path(own, switch, replace(own, adapter=None)) if switch else Path(own)
    for block in blocks_of(path, tokens):
        data = encoded(codec, block, PAYLOAD)
        assert len(data) == block_size(data)
        assert codec.decode(block, data) == PAYLOAD
        assert codec.read(data, text) == (block, PAYLOAD)


def test_a_plain_header_says_what_the_block_is() -> None:
    data = memoryview(encoded(BlockCodec(SCHEME), BLOCK, PAYLOAD))
    parts = iter((data[:32], data[32:]))
    fields = describe(lambda count: bytes(next(parts)[:count]))
    assert fields is not None
    assert fields["form"] == SCHEME.form
    assert (fields["base"], fields["adapter"], fields["salt"], fields["tenant"]) == (
        "base",
        "adapter",
        "salt",
        "tenant",
    )
    assert (fields["position"], fields["tokens"], fields["page_size"]) == (4, [4, 5, 6, 7], PAGE)


def test_an_encrypted_block_tells_nothing() -> None:
    data = encoded(BlockCodec(SCHEME, KEYS[1]), BLOCK, PAYLOAD)
    assert b"tenant" not in data and b"salt" not in data and PAYLOAD[:16] not in data
    assert describe(lambda count: data[:count]) is None


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "other",
    [
        Path(replace(BASE, base="other")),
        Path(replace(BASE, adapter="other")),
        Path(replace(BASE, adapter=None)),
        Path(replace(BASE, salt="other")),
        Path(replace(BASE, tenant="other")),
        Path(replace(BASE, is_long=True)),
        Path(BASE, 2, replace(BASE, adapter=None)),
        # Fields that hold each other's content are still other namespaces.
        Path(Namespace("base", "adapter", "tenant", "salt")),
    ],
)
def test_a_block_of_another_namespace_is_a_miss(key: bytes, other: Path) -> None:
    codec = BlockCodec(SCHEME, key)
    for wanted in blocks_of(other, [*range(8)]):
        for block in blocks_of(Path(BASE), [*range(8)]):
            assert wanted.key != block.key
            with pytest.raises(NotABlock):
                codec.decode(wanted, encoded(codec, block, PAYLOAD))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "scheme",
    [replace(SCHEME, form="bfloat16 k,v 2x1x4x20"), replace(SCHEME, page_size=8), replace(SCHEME, page_bytes=641)],
)
def test_a_block_of_another_form_is_a_miss(key: bytes, scheme: BlockScheme) -> None:
    other = BlockCodec(scheme, key)
    block = blocks_of(Path(BASE), [*range(16)], scheme)[1]
    data = encoded(other, block, bytes(scheme.page_bytes))
    codec = BlockCodec(SCHEME, key)
    with pytest.raises(NotABlock):
        codec.decode(BLOCK, data)
    with pytest.raises(NotABlock):
        codec.read(data, "tenant")


def test_a_block_of_another_key_is_a_miss() -> None:
    codecs = [BlockCodec(SCHEME, key) for key in (*KEYS, bytes(32))]
    for writer in codecs:
        data = encoded(writer, BLOCK, PAYLOAD)
        for reader in codecs:
            if reader is not writer:
                with pytest.raises(NotABlock):
                    reader.decode(BLOCK, data)


def test_tenants_have_keys_of_their_own() -> None:
    codec = BlockCodec(SCHEME, KEYS[1])
    with pytest.raises(NotABlock, match="another key"):
        codec.read(encoded(codec, BLOCK, PAYLOAD), "other")


@pytest.mark.parametrize("key", KEYS)
def test_changed_cut_and_longer_files_are_misses(key: bytes) -> None:
    """A thousand bit flips at seeded places, every length up to the preamble, some beyond, and one byte too many."""
    codec, rng = BlockCodec(SCHEME, key), random.Random(7)
    data = encoded(codec, BLOCK, PAYLOAD)
    wrong: list[bytes] = [data[:length] for length in (*range(33), *rng.sample(range(len(data)), 50))]
    wrong += [data + b"\0", data[1:], bytes(len(data)), data[: len(data) // 2] + bytes(len(data) - len(data) // 2)]
    for _ in range(1000):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        wrong.append(bytes(changed))
    for each in wrong:
        with pytest.raises(NotABlock):
            codec.decode(BLOCK, each)


def test_a_block_under_a_name_of_other_content_is_no_block() -> None:
    """Whoever can write files can write a right checksum: the name still follows from the content."""
    codec = BlockCodec(SCHEME)
    renamed = replace(BLOCK, key=bytes(24))
    with pytest.raises(NotABlock, match="name"):
        codec.read(encoded(codec, renamed, PAYLOAD), "tenant")


FIELDS = json.loads(bytes(BlockCodec(SCHEME).header(BLOCK)))
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.text(max_size=9),
    st.lists(st.integers(-9, 9) | st.text(max_size=2), max_size=6),
    st.just(FIELDS),
    st.sampled_from([str(BLOCK.key.hex()), "00" * 24, "state", "float32 k,v 2x1x4x10", "tenant", "salt"]),
)


@given(st.sampled_from([*FIELDS, "switch", "before", "kind", "more"]), VALUES, st.booleans())
@example("position", 4.0, False)
@example("tenant", "other", False)
@example("tokens", [4, 5, 6, 8], False)
@example("position", 8, False)
def test_a_rewritten_field_is_a_miss(name: str, value: object, is_removed: bool) -> None:
    """With the checksum of the rewritten header: whoever can write the file can write that too.

    A position is in no name: the chain of pages in front of a block says where it is.
    """
    changed = {key: FIELDS[key] for key in FIELDS if key != name} | ({} if is_removed else {name: value})
    if changed == FIELDS and json.dumps(changed) == json.dumps(FIELDS):
        return
    codec, text = BlockCodec(SCHEME), json.dumps(changed).encode()
    header = text + b" " * (-(len(text) + PREAMBLE_BYTES) % ALIGNMENT)
    preamble = block_preamble(0, len(header), BYTES, bytes(12))
    forged = preamble + header + PAYLOAD + block_checksum(preamble, header, PAYLOAD)
    with pytest.raises(NotABlock, match="other tokens"):
        codec.decode(BLOCK, forged)
    if name != "position" or is_removed or type(value) is not int or abs(value) >= 2**63:
        with pytest.raises(NotABlock):
            codec.read(forged, "tenant")


def test_names_follow_from_all_tokens_before_and_from_the_secret() -> None:
    one, other = blocks_of(Path(BASE), [*range(8)]), blocks_of(Path(BASE), [9, *range(1, 8)])
    assert one[1].tokens == other[1].tokens and one[1].key != other[1].key
    secret = blocks_of(Path(BASE), [*range(8)], replace(SCHEME, secret=b"s"))
    assert not {block.key for block in one} & {block.key for block in secret}


def test_a_payload_that_is_no_page_is_refused() -> None:
    with pytest.raises(ValueError, match="640 bytes, not 5"):
        BlockCodec(SCHEME).encode(BLOCK, b"12345")
