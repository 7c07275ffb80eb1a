"""KV event publisher: frames of vLLM's subscribers, from an engine that computes, evicts and clears."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
from support.engine.adapter_engine import Engine
from support.engine.core_hooks import cache_of

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.kv_cache import kv_event_publisher
from rootgraft.engine.kv_cache.kv_event_publisher import KvEventPublisher
from rootgraft.engine.kv_events_config import KvEventsConfig

END = (-1).to_bytes(8, "big", signed=True)
MILLISECONDS = 300_000


@pytest.fixture
def sockets() -> Iterator[Any]:
    """Connects sockets, which are closed in the end."""
    context, opened = zmq.Context(), []

    def connect(kind: int, endpoint: str, hwm: int = 1000) -> Any:
        socket = context.socket(kind)
        opened.append(socket)
        socket.setsockopt(zmq.RCVHWM, hwm)
        socket.setsockopt(zmq.RCVTIMEO, MILLISECONDS)
        socket.connect(endpoint)
        return socket

    yield connect
    for socket in opened:
        socket.close(linger=0)
    context.term()


def options(folder: Path, **changes: Any) -> dict[str, Any]:
    given = {"endpoint": f"ipc://{folder}/pub", "replay_endpoint": f"ipc://{folder}/replay"}
    return {"enable_kv_cache_events": True, **given, **changes}


def replay(socket: Any, first: int) -> list[tuple[int, Any]]:
    """Ask for past batches. Returns number and content of each."""
    socket.send_multipart((b"", first.to_bytes(8, "big")))
    found = []
    while (frames := socket.recv_multipart())[1] != END:
        found.append((int.from_bytes(frames[1], "big"), msgpack.unpackb(frames[2])))
    return found


def test_subscribers_get_numbered_batches_of_their_topic(tmp_path: Path, sockets: Any) -> None:
    publisher = KvEventPublisher(KvEventsConfig(**options(tmp_path, topic="kv@one", buffer_steps=3)))
    subscriber = sockets(zmq.SUB, f"ipc://{tmp_path}/pub")
    subscriber.setsockopt(zmq.RCVTIMEO, 10)
    subscriber.subscribe(b"kv@")
    sent, frames = 0, None
    while frames is None:  # until the subscription has come to the publisher
        publisher.publish([["AllBlocksCleared"]])
        publisher.publish([])
        sent += 1
        try:
            frames = subscriber.recv_multipart()
        except zmq.Again:
            assert sent < 30_000
    topic, number, payload = frames
    seconds, events, rank = msgpack.unpackb(payload)
    assert topic == b"kv@one" and int.from_bytes(number, "big") < sent
    assert seconds > 1.7e9 and (events, rank) == ([["AllBlocksCleared"]], 0)
    for _ in range(4):
        publisher.publish([["BlockRemoved", [sent], "GPU"]])
    asker = sockets(zmq.DEALER, f"ipc://{tmp_path}/replay")
    asker.send_multipart((b"nonsense",))
    assert [number for number, _ in replay(asker, 0)] == [sent + 1, sent + 2, sent + 3], "the last three"
    assert [number for number, _ in replay(asker, sent + 3)] == [sent + 3]
    assert replay(asker, sent + 4) == []
    publisher.close()


def test_no_answer_is_cut_for_a_client_that_asks_before_it_reads(
    tmp_path: Path, sockets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers larger than the buffers of the connection, and than what the publisher keeps for a client."""
    monkeypatch.setattr(kv_event_publisher, "ANSWER_MILLISECONDS", MILLISECONDS)
    publisher = KvEventPublisher(KvEventsConfig(**options(tmp_path, buffer_steps=2)))
    for _ in range(2):
        publisher.publish([["BlockRemoved", ["x" * 400_000], "GPU"]])
    asker = sockets(zmq.DEALER, f"ipc://{tmp_path}/replay", hwm=1)
    for _ in range(6):
        asker.send_multipart((b"", bytes(8)))
    numbers = [asker.recv_multipart()[1] for _ in range(18)]
    assert numbers == [bytes(8), (1).to_bytes(8, "big"), END] * 6
    publisher.close()


def test_an_engine_s_events_say_what_is_in_its_tree(tmp_path: Path, sockets: Any) -> None:
    engine = Engine(num_pages=24, kv_events_config=json.dumps(options(tmp_path)))
    asker = sockets(zmq.DEALER, f"ipc://{tmp_path}/replay")
    for number in range(8):
        engine.submit([number, *range(30)], max_tokens=4, ignore_eos=True, cache_tenant=str(number % 2))
        engine.run()
    known: set[int] = set()
    batches = replay(asker, 0)
    assert [number for number, _ in batches] == [*range(len(batches))]
    for _, (_, events, _) in batches:
        for kind, *fields in events:
            known = known | {*fields[0]} if kind == "BlockStored" else known - {*(fields[0] if fields else known)}
    nodes = cache_of(engine.core).tree_view(1000)
    assert 0 < len(known) == sum(len(node.tokens) // 16 for node in nodes), "four tokens of four bytes in a whole page"
    engine.core.reset_cache()
    (_, (_, events, _)) = replay(asker, len(batches))[-1]
    assert events[-1] == ["AllBlocksCleared"]
    engine.core.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("on", "must be JSON such as"),
        ("[]", "must be JSON such as"),
        ('{"port": 1}', "has no key 'port'; its keys are enable_kv_cache_events, publisher"),
        ('{"enable_kv_cache_events": 1}', "enable_kv_cache_events must be true or false, not 1"),
        ('{"publisher": "kafka"}', 'publisher must be zmq or null, not "kafka"'),
        ('{"hwm": 0}', "hwm must be 1 to 1048576, not 0"),
        ('{"buffer_steps": 1048577}', "buffer_steps must be 1 to 1048576"),
        ('{"buffer_steps": true}', "buffer_steps must be 1 to 1048576, not true"),
        ('{"topic": null}', "topic must be a string, not null"),
        ('{"replay_endpoint": 5}', "replay_endpoint must be a string or null"),
    ],
)
def test_options_that_are_wrong_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(kv_events_config=text)


def test_what_vllm_s_command_lines_hold_is_taken() -> None:
    assert not EngineConfig().kv_events.is_on
    assert not EngineConfig(kv_events_config='{"enable_kv_cache_events": true, "publisher": "null"}').kv_events.is_on
    taken = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "max_queue_size": 5}'
    found = EngineConfig(kv_events_config=taken).kv_events
    assert found.is_on and found.endpoint == "tcp://*:5557" and found.hwm == 100_000


def test_an_address_that_is_taken_is_refused(tmp_path: Path) -> None:
    first = KvEventPublisher(KvEventsConfig(**options(tmp_path, endpoint="tcp://127.0.0.1:*")))
    assert first.endpoint.startswith("tcp://127.0.0.1:")
    with pytest.raises(ConfigError, match="cannot be bound: Address already in use"):
        KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, endpoint=first.endpoint))
    with pytest.raises(ConfigError, match="cannot be bound"):
        KvEventPublisher(KvEventsConfig(enable_kv_cache_events=True, endpoint="nowhere"))
    first.close()
