"""Sessions as files: what another engine takes of them, and what it takes for a miss."""

from __future__ import annotations

import io
import json
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from support.engine.adapter_engine import Engine, write
from support.engine.core_hooks import session_keys
from support.engine.fake_worker import FakePages
from support.engine.injected_faults import Fault

from rootgraft.engine.errors import RequestError
from rootgraft.engine.kv_cache.block_codec import (
    PREAMBLE_BYTES,
    block_checksum,
    block_preamble,
    block_size,
    check_preamble,
)
from rootgraft.engine.kv_cache.session_files import KEPT_MAGIC, MOST_KEPT_HEAD, pack_head, read_head_of
from rootgraft.engine.messages import Done, ExportSession, ImportSession, ReleaseSession, Reply, SessionReply
from rootgraft.engine.types import MAX_SESSION_NAME

T = TypeVar("T")
PROMPT = [random.Random(f"9 {each}").randrange(11) for each in range(42)]
WHOLE = 40  # tokens of its whole pages
FIELDS = {"salt": "s", "tenant": "team", "cache_tenant": "team", "session": "chat"}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write(root, "one", 1)
    write(root, "two", 2)
    return root


def say(engine: Engine, **fields: Any) -> int:
    """Ask for an answer, which must be right. Returns how many tokens of the prompt were cached."""
    number = engine.submit(PROMPT, max_tokens=4, ignore_eos=True, **fields)
    engine.run()
    engine.check_tokens(number)
    done = engine.ends[number]
    assert isinstance(done, Done)
    return done.usage.cached


def with_engine(run: Callable[[Engine], T], root: Path | None = None, **options: Any) -> T:
    engine = Engine(root, **options)
    try:
        return run(engine)
    finally:
        engine.core.close()


def exported(root: Path | None = None, *, options: dict[str, Any] | None = None, **fields: Any) -> bytes:
    def run(engine: Engine) -> bytes:
        load(engine, root, *fields.values())
        say(engine, **FIELDS, **fields)
        count, data = engine.core.sessions.export("team", "chat")
        assert count >= WHOLE
        return data

    return with_engine(run, root, **options or {})


def load(engine: Engine, root: Path | None, *names: str) -> None:
    for name in names:
        engine.load(name, str(root and root / name))
        engine.wait(lambda name=name: engine.pool.registry.get(name) is not None)


def taken(engine: Engine, data: bytes) -> int:
    return engine.core.sessions.load(data)


def head_of(data: bytes) -> dict[str, Any]:
    """Return what the head of a session's file says."""
    fields: dict[str, Any] = json.loads(read_head_of(io.BytesIO(data), KEPT_MAGIC) or b"{}")
    return fields


def blocks_of(data: bytes) -> bytes:
    """Return what follows the head of a session's file."""
    source = io.BytesIO(data)
    read_head_of(source, KEPT_MAGIC)
    return source.read()


def test_a_session_goes_on_in_another_engine() -> None:
    data = exported()

    def run(engine: Engine) -> None:
        assert taken(engine, data) >= WHOLE
        assert session_keys(engine.core) == [("team", "chat")]
        engine.core.check()
        other = {**FIELDS, "session": "", "salt": ""}
        assert say(engine, **other) == 0
        assert say(engine, **{**FIELDS, "cache_tenant": "other"}) == 0
        assert say(engine, **FIELDS) >= WHOLE
        assert engine.core.sessions.export("team", "chat")[0] >= WHOLE
        engine.core.check()

    with_engine(run)


def test_a_session_of_an_adapter_needs_the_same_content(adapters: Path, tmp_path: Path) -> None:
    data = exported(adapters, adapter="one")
    write(tmp_path, "one", 2)
    assert with_engine(lambda engine: taken(engine, data)) == 0
    assert with_engine(lambda engine: (load(engine, tmp_path, "one"), taken(engine, data))[1], tmp_path) == 0

    def run(engine: Engine) -> None:
        assert taken(engine, data) == 0, "no adapter is loaded yet"
        load(engine, adapters, "one", "two")
        assert taken(engine, data) >= WHOLE
        assert say(engine, adapter="two", **FIELDS) == 0
        assert say(engine, adapter="one", **FIELDS) >= WHOLE

    with_engine(run, adapters)


def test_with_a_key_only_the_same_key_opens_it(tmp_path: Path) -> None:
    keys = tmp_path / "key", tmp_path / "other"
    for number, key in enumerate(keys):
        key.write_bytes(bytes([number] * 32))
    options = [
        {"kv_disk": str(tmp_path / str(number)), "kv_disk_key_file": str(key)} for number, key in enumerate(keys)
    ]
    data = exported(options=options[0])
    assert b"[" + b", ".join(b"%d" % token for token in PROMPT[:4]) + b"]" not in data
    for wrong in ({}, options[1]):
        assert with_engine(lambda engine: taken(engine, data), **wrong) == 0
    assert with_engine(lambda engine: taken(engine, data.replace(b'"cache_tenant": "team"', b'"cache_tenant": "teem"')), **options[0]) == 0  # fmt: skip  # noqa: E501
    fresh = {**options[0], "kv_disk": str(tmp_path / "fresh")}
    assert with_engine(lambda engine: taken(engine, data), **fresh) >= WHOLE
    assert with_engine(lambda engine: taken(engine, exported()), **fresh) == 0


def test_a_session_of_another_base_model_is_a_miss() -> None:
    data = exported()

    def run(engine: Engine) -> None:
        base = engine.core.ready.base_digest
        head = pack_head(json.dumps({**head_of(data), "base": "f" * len(base)}).encode(), KEPT_MAGIC)
        assert taken(engine, head + blocks_of(data)) == 0
        assert engine.core.sessions.export("team", "chat") == (0, b"")
        same = pack_head(json.dumps(head_of(data)).encode(), KEPT_MAGIC)
        assert taken(engine, same + blocks_of(data)) >= WHOLE
        engine.core.check()

    with_engine(run)


def test_damaged_files_are_never_wrong_tokens() -> None:
    """Cut, flipped at seeded places: fewer tokens are cached, or none, and answers are right."""
    data, rng = exported(), random.Random(3)

    def run(engine: Engine) -> None:
        for _ in range(40):
            place = rng.randrange(len(data))
            flipped = data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]
            for damaged in (flipped, data[:place]):
                assert 0 <= taken(engine, damaged) <= WHOLE + 4
                engine.core.check()
                say(engine, **FIELDS)
                engine.core.reset_cache()
        assert taken(engine, b"") == taken(engine, b"\x00" * 64) == 0

    with_engine(run)


def test_calls_are_answered_by_number() -> None:
    data = exported()

    def run(engine: Engine) -> None:
        calls = ImportSession(1, data), ExportSession(2, "team", "chat"), ReleaseSession(3, "team", "chat")
        absent = ExportSession(4, "team", "chat"), ReleaseSession(5, "other", "chat")
        engine.core.handle([*calls, *absent])
        replies = {message.id: message for message in engine.core.step() if isinstance(message, SessionReply)}
        assert [bool(replies[number].count) for number in range(1, 6)] == [True, True, True, False, False]
        assert replies[2].data == data

    with_engine(run)


def test_a_session_too_large_for_a_file_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from rootgraft.engine.core import session_transfer

    def run(engine: Engine) -> None:
        say(engine, **FIELDS)
        transfer = engine.core.sessions
        held = transfer.size("team", "chat")
        monkeypatch.setattr(session_transfer, "MAX_SESSION_BYTES", held)
        assert transfer.export("team", "chat")[0] >= WHOLE
        monkeypatch.setattr(session_transfer, "MAX_SESSION_BYTES", held - 1)
        with pytest.raises(RequestError, match="rootgraft cache export"):
            transfer.export("team", "chat")
        engine.core.handle([ExportSession(7, "team", "chat")])
        [reply] = [message for message in engine.core.step() if isinstance(message, Reply)]
        assert reply.failure is not None and reply.failure.param == "prompt_cache_key"

    with_engine(run)


ODD: tuple[Any, ...] = (
    *(None, True, -1, 2**31, 2**63, 2**70, 1e308, "", "x" * 300, "\ud800", "zz", [], {}, [[]], {"a": []}, [None]),
    *(
        [2**70],
        [-1] * 16,
        ["x"],
        "00" * 32,
        "f" * 63,
        {"base": 1, "adapter": None, "salt": "", "tenant": "", "is_long": 0},
    ),
)
"""Values that no file of ours has at some field."""
DEEP = b"[" * 100_000


def with_header(block: bytes, header: bytes) -> bytes:
    """A block of another header, whose checksum is right."""
    head_bytes, payload_bytes = check_preamble(memoryview(block), sealed=False)
    payload = block[PREAMBLE_BYTES + head_bytes :][:payload_bytes]
    preamble = block_preamble(0, len(header), payload_bytes, bytes(12))
    return preamble + header + payload + block_checksum(preamble, header, payload)


@pytest.mark.parametrize(
    "count", [pytest.param(60, marks=pytest.mark.sample), pytest.param(2000, marks=pytest.mark.heavy)]
)
def test_files_that_are_almost_right_are_misses(count: int) -> None:
    """Heads and blocks whose checksums are right and whose fields are not: seeded, nested deep, of any length."""
    data, rng = exported(), random.Random(49)
    fields, blocks = head_of(data), blocks_of(data)
    size = block_size(blocks[:PREAMBLE_BYTES])
    first, rest = blocks[:size], blocks[size:]
    whole = len(blocks) // size * 4
    header_bytes, _ = check_preamble(memoryview(first), sealed=False)
    header = json.loads(first[PREAMBLE_BYTES:][:header_bytes])

    def changed(good: dict[str, Any]) -> bytes:
        if rng.random() < 0.1:
            return rng.choice((b"", b"[]", b"null", b"3", DEEP, b'{"a":' * 50_000, b"\xff", b"1" * 5000))
        odd = dict(good)
        for _ in range(rng.randint(1, 2)):
            odd[rng.choice([*good, "before", "switch", "kind"])] = rng.choice(ODD)
        return json.dumps(odd).encode()

    def run(engine: Engine) -> None:
        for _ in range(count):
            if rng.random() < 0.5:
                # What it says beside its fields is not read, and another name is as good as its own.
                assert taken(engine, pack_head(changed(fields), KEPT_MAGIC) + blocks) in (0, whole)
            else:
                file = pack_head(json.dumps(fields).encode(), KEPT_MAGIC) + with_header(first, changed(header)) + rest
                assert taken(engine, file) == 0
        engine.core.handle([ImportSession(1, pack_head(DEEP, KEPT_MAGIC))])
        [reply] = [message for message in engine.core.step() if isinstance(message, SessionReply)]
        assert reply.count == 0
        engine.core.check()
        say(engine, **FIELDS)

    with_engine(run)


def test_a_head_and_its_names_have_lengths() -> None:
    data = exported()
    fields, blocks = head_of(data), blocks_of(data)

    def run(engine: Engine) -> None:
        def load(**changes: Any) -> int:
            return taken(engine, pack_head(json.dumps({**fields, **changes}).encode(), KEPT_MAGIC) + blocks)

        assert load(session="x" * MAX_SESSION_NAME) >= WHOLE
        for changes in ({"session": "x" * (MAX_SESSION_NAME + 1)}, {"tenant": "x" * (MAX_SESSION_NAME + 1)}):
            assert load(**changes) == 0
        assert load(session="") == 0
        spare = MOST_KEPT_HEAD - len(json.dumps({**fields, "more": ""}).encode())
        assert load(more="x" * spare) >= WHOLE
        assert load(more="x" * (spare + 1)) == 0

    with_engine(run)


def test_a_block_that_says_it_is_huge_takes_no_memory() -> None:
    data = exported()
    blocks = blocks_of(data)
    head = data[: len(data) - len(blocks)]
    header_bytes, payload_bytes = check_preamble(memoryview(blocks), sealed=False)
    asked: list[int] = []

    class Source(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            asked.append(size or 0)
            return super().read(size)

    def run(engine: Engine) -> None:
        transfer = engine.core.prefix_transfer()
        for header, payload in ((header_bytes, (1 << 32) - 1), ((1 << 32) - 1, payload_bytes)):
            claim = block_preamble(0, header, payload, bytes(12))
            assert taken(engine, head + claim + blocks[PREAMBLE_BYTES:]) == 0
            assert transfer.read(Source(claim + blocks[PREAMBLE_BYTES:]), "team") == (None, array("i"))
        assert max(asked) == PREAMBLE_BYTES
        assert transfer.read(Source(blocks), "team")[0] is not None and max(asked) > PREAMBLE_BYTES

    with_engine(run)


def test_a_file_for_which_there_is_no_memory_is_taken_later() -> None:
    """Neither call ends the engine, and no page is lost."""
    error = torch.OutOfMemoryError("CUDA out of memory.")

    def run(engine: Engine) -> None:
        calls = (ImportSession(1, exported()), ExportSession(2, "team", "chat"))
        for call, name in zip(calls, ("load", "read_page"), strict=True):
            with Fault((FakePages, name), 0, error, late=False).injected():
                reply = engine.core.sessions.reply(call)
            assert isinstance(reply, Reply) and reply.failure is not None
            assert reply.failure.kind == "CapacityError" and "ask again" in reply.failure.message
            engine.core.check()
            assert engine.core.stats()["pages_private"] == 0
            reply = engine.core.sessions.reply(call)
            assert isinstance(reply, SessionReply) and reply.count >= WHOLE

    with_engine(run)
