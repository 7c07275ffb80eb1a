"""Links between rank 0 and a follower: messages in order, and signs of life in both directions.

Each side writes a byte every quarter of a second. It counts the quarters of a second in which it was running itself and
got no byte from the other side, so a rank does not count as silent because the machine was suspended or busy. A rank
that uses processor time does not count as silent either: native code may hold the interpreter lock, for a long time if
many processes share the processors. A rank that is still importing its libraries may be silent for longer, unless a
signal has stopped its process.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping

import psutil

from .rank_messages import HEADER, MOST_BYTES, Kind, RankMessage

PERIOD = 0.25
"""Seconds between two signs of life."""
SILENT_PERIODS = 14
"""Periods without a sign of life after which the other side counts as hanging."""
START_PERIODS = 120
"""The same while ranks start: an import from a slow disk may keep the interpreter's lock for seconds."""
ENDED = "has ended"
_LEAST_PROCESSOR_SECONDS = 0.01
"""A rank that has used this processor time in half of the periods is not stopped. It is one tick of Linux's clock."""


def receive(link: socket.socket, after: int) -> RankMessage:
    """Wait for the message that comes after number ``after``.

    Raises:
        ConnectionError: the other side is gone.
        ValueError: the message has another number, because a message was lost or arrived twice.
    """
    number, kind, length = HEADER.unpack(receive_exactly(link, HEADER.size))
    if number != after + 1 or not 0 <= length <= MOST_BYTES:
        raise ValueError(f"message {number} of {length} bytes came after message {after}")
    return RankMessage(number, Kind(kind), receive_exactly(link, length))


def receive_exactly(link: socket.socket, size: int) -> bytes:
    """Wait for a number of bytes, and return them. Raises ConnectionError at the end of the stream."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = link.recv_into(view)
        if not count:
            raise ConnectionError("the other rank is gone")
        view = view[count:]
    return bytes(data)


def read_line(link: socket.socket) -> str:
    """Read up to the end of a line. Raises ConnectionError at the end of the stream."""
    data = bytearray()
    while not data.endswith(b"\n"):
        byte = link.recv(1)
        if not byte:
            raise ConnectionError("the other rank is gone")
        data += byte
    return data[:-1].decode()


class SignsOfLife:
    """Exchanges signs of life with other ranks on a thread of its own, until one of them is gone or silent.

    Until ``started`` is called, the other ranks may be silent for ``START_PERIODS``, and then for ``SILENT_PERIODS``. A
    rank whose process is stopped may be silent for ``SILENT_PERIODS`` at any time.

    Args:
        links: sockets by rank, used only for signs of life.
        processes: process ids by rank.
        lost: called once, on the thread, with the rank and the reason.
    """

    def __init__(
        self,
        links: Mapping[int, socket.socket],
        processes: Mapping[int, int],
        lost: Callable[[int, str], None],
    ) -> None:
        self._links = dict(links)
        self._processes = dict(processes)
        self._lost = lost
        self._closed = threading.Event()
        self._most_silent = START_PERIODS
        for link in links.values():
            link.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="rank-signs", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """Record that all ranks have imported their libraries, so that silence is noticed sooner from now on."""
        self._most_silent = SILENT_PERIODS

    def close(self) -> None:
        """End the thread; nobody is lost from now on."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        silences = {rank: _Silence(number) for rank, number in self._processes.items()}
        while not self._closed.wait(PERIOD):
            for rank in self._links:
                if reason := self._look(rank, silences[rank]):
                    self._lost(rank, reason)
                    return

    def _look(self, rank: int, silence: _Silence) -> str:
        """Exchange signs with a rank. Returns the fault, "" for none."""
        link = self._links[rank]
        try:
            link.send(b"+")
        except BlockingIOError:
            # The other side reads nothing. If that lasts, it gives no signs either, and is found silent.
            pass
        except OSError:
            return ENDED
        try:
            signs = link.recv(4096)
        except BlockingIOError:
            return silence.last(self._most_silent)
        except OSError:
            return ENDED
        silence.end()
        return "" if signs else ENDED


class _Silence:
    """Periods for which a process has given no sign of life and has used no processor time."""

    def __init__(self, process: int) -> None:
        self._periods = 0
        self._stopped = 0  # The last of these periods, at the ends of which the process was stopped.
        self._process = process
        self._used = 0.0  # Processor seconds at half of the periods.

    def end(self) -> None:
        """Record a sign of life."""
        self._periods = self._stopped = 0

    def last(self, most: int) -> str:
        """Count one more silent period. Returns what is wrong with the process; "" if it is not silent for too long."""
        self._periods += 1
        self._stopped = self._stopped + 1 if self._is_stopped() else 0
        half = most // 2
        if self._periods == half:
            self._used = self._processor_seconds()
        # A process that a signal has stopped imports nothing, so waiting longer for it would be in vain.
        is_stopped = self._stopped >= SILENT_PERIODS
        if self._periods < most and not is_stopped:
            return ""
        used = self._processor_seconds()
        if is_stopped or used - self._used < _LEAST_PROCESSOR_SECONDS:
            return f"has been silent for {self._periods * PERIOD:g} s"
        self._periods, self._used = half, used
        return ""

    def _is_stopped(self) -> bool:
        try:
            return bool(psutil.Process(self._process).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def _processor_seconds(self) -> float:
        try:
            times = psutil.Process(self._process).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)
