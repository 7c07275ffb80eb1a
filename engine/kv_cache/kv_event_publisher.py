"""KV event publisher: sends batches of KV events over ZMQ, and past batches on request, in vLLM's frames.

PUB      topic, number of the batch (8 bytes, big-endian), msgpack of [seconds since 1970, events, 0]
ROUTER   question: number of the first batch; answer: number and batch each, then -1 and nothing
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

import msgpack

from ..errors import ConfigError
from ..kv_events_config import KvEventsConfig
from .kv_events import Event

logger = logging.getLogger("rootgraft.kv")

_NUMBER_BYTES = 8
ANSWER_MILLISECONDS = 10_000
"""For which an answer waits for a client that reads slowly; others wait behind it."""
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)


class KvEventPublisher:
    """A PUB socket of the calling thread, and a ROUTER socket with a thread of its own.

    Raises:
        ConfigError: the package pyzmq is missing, or an endpoint cannot be bound.
    """

    def __init__(self, config: KvEventsConfig) -> None:
        try:
            import zmq
        except ImportError:
            raise ConfigError(
                "--kv-events-config needs the package pyzmq. Try: pip install 'rootgraft[kv-events]'"
            ) from None
        self._zmq = zmq
        self._topic = config.topic.encode()
        self._lock = threading.Lock()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._context = zmq.Context()
        self._thread: threading.Thread | None = None
        try:
            self._pub = self._bind(zmq.PUB, config.endpoint, config.hwm)
            if config.replay_endpoint:
                router = self._bind(zmq.ROUTER, config.replay_endpoint, config.buffer_steps + 1)
                # Else what a client has not yet fetched of an answer would have parts of its next one dropped.
                router.setsockopt(zmq.ROUTER_MANDATORY, 1)
                router.setsockopt(zmq.SNDTIMEO, ANSWER_MILLISECONDS)
                self._thread = threading.Thread(target=self._replay, args=(router,), name="kv-replay", daemon=True)
                self._thread.start()
        except ConfigError:
            self._context.destroy(linger=0)
            raise

    def _bind(self, kind: int, endpoint: str, hwm: int) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.setsockopt(self._zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError(f"--kv-events-config: {endpoint} cannot be bound: {error.strerror}.") from None
        return socket

    @property
    def endpoint(self) -> str:
        """The address of the PUB socket, with the port that the system chose where it ends in ``:*``."""
        return str(self._pub.getsockopt_string(self._zmq.LAST_ENDPOINT))

    def publish(self, events: list[Event]) -> None:
        """Send a batch, which no subscriber can hold up. Nothing is sent for no events."""
        if not events:
            return
        payload = msgpack.packb([time.time(), events, 0])
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._sent.append((number, payload))
        self._pub.send_multipart((self._topic, number.to_bytes(_NUMBER_BYTES, "big"), payload), self._zmq.NOBLOCK)

    def close(self) -> None:
        """Close the sockets, and wait for the thread."""
        self._pub.close()
        self._context.term()
        if self._thread is not None:
            self._thread.join()

    def _replay(self, router: Any) -> None:
        """Answer questions until the context ends."""
        while True:
            try:
                self._answer(router, router.recv_multipart())
            except self._zmq.ContextTerminated:
                router.close()
                return
            except self._zmq.ZMQError as error:
                logger.warning("A request for past KV events was not answered: %s", error)

    def _answer(self, router: Any, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != _NUMBER_BYTES:
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        with self._lock:
            batches = [each for each in self._sent if each[0] >= first]
        for number, payload in batches:
            router.send_multipart((client, b"", number.to_bytes(_NUMBER_BYTES, "big"), payload))
        router.send_multipart((client, b"", _END, b""))
