"""Links between ranks: messages in their order, and a rank that is gone or silent."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator

import psutil
import pytest
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.engine.executor import rank_link
from rootgraft.engine.executor.rank_link import SignsOfLife, receive
from rootgraft.engine.executor.rank_messages import HEADER, Kind, RankMessage, pack_numbers


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_messages_come_in_their_order(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    messages = [RankMessage(i, Kind.STEP, pack_numbers(range(i))) for i in (1, 2, 3)]
    ours.sendall(b"".join(each.to_bytes() for each in messages))
    assert [receive(theirs, i) for i in range(3)] == messages
    ours.close()
    with pytest.raises(ConnectionError):
        receive(theirs, 3)


@pytest.mark.parametrize("number", [3, 5, 1])
def test_a_step_that_comes_twice_or_out_of_order_stops_a_follower(
    number: int, pair: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = pair
    ours.sendall(RankMessage(number, Kind.STEP, b"").to_bytes())
    with pytest.raises(ValueError, match=f"message {number} of 0 bytes came after message 3"):
        receive(theirs, 3)


def test_a_length_that_no_message_has_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(HEADER.pack(1, Kind.STEP, -8))
    with pytest.raises(ValueError, match="-8 bytes"):
        receive(theirs, 0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_link, "PERIOD", 0.01)
    monkeypatch.setattr(rank_link, "START_PERIODS", 3 * rank_link.SILENT_PERIODS)


@pytest.fixture
def waiting() -> Iterator[int]:
    """A process that uses no processor time."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def stopped(waiting: int) -> int:
    """A process that a signal has stopped."""
    os.kill(waiting, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(waiting).status() == psutil.STATUS_STOPPED)
    return waiting


def test_a_rank_that_ends_is_lost_and_told_once(
    pair: tuple[socket.socket, socket.socket], quick: None, stopped: int
) -> None:
    ours, theirs = pair
    lost: queue.Queue[tuple[int, str]] = queue.Queue()
    signs = SignsOfLife({3: ours}, {3: stopped}, lambda rank, reason: lost.put((rank, reason)))
    theirs.close()
    assert lost.get(timeout=HANG_SECONDS) == (3, "has ended")
    signs.close()
    assert lost.empty()


@pytest.mark.parametrize("is_started", [True, False])
def test_a_rank_that_falls_silent_is_lost_and_later_while_ranks_start(
    is_started: bool, pair: tuple[socket.socket, socket.socket], quick: None, waiting: int
) -> None:
    """Also one that has never given a sign."""
    ours, theirs = pair
    lost: queue.Queue[tuple[int, str]] = queue.Queue()
    signs = SignsOfLife({1: ours}, {1: waiting}, lambda rank, reason: lost.put((rank, reason)))
    if is_started:
        signs.started()
    rank, reason = lost.get(timeout=HANG_SECONDS)
    signs.close()
    periods = rank_link.SILENT_PERIODS if is_started else rank_link.START_PERIODS
    assert (rank, reason) == (1, f"has been silent for {periods * rank_link.PERIOD:g} s")
    assert len(theirs.recv(1 << 10)) == periods  # our own signs: the other side may have read none


def test_a_rank_that_is_stopped_while_ranks_start_is_lost_as_soon_as_later(
    pair: tuple[socket.socket, socket.socket], quick: None, stopped: int
) -> None:
    """It imports nothing, so nothing is gained by waiting as long as for an import."""
    ours, theirs = pair
    lost: queue.Queue[tuple[int, str]] = queue.Queue()
    signs = SignsOfLife({1: ours}, {1: stopped}, lambda rank, reason: lost.put((rank, reason)))
    rank, reason = lost.get(timeout=HANG_SECONDS)
    signs.close()
    assert (rank, reason) == (1, f"has been silent for {rank_link.SILENT_PERIODS * rank_link.PERIOD:g} s")
    assert len(theirs.recv(1 << 10)) == rank_link.SILENT_PERIODS


def test_a_rank_that_is_closed_is_not_lost(
    pair: tuple[socket.socket, socket.socket], quick: None, stopped: int
) -> None:
    ours, theirs = pair
    lost: queue.Queue[tuple[int, str]] = queue.Queue()
    signs = SignsOfLife({1: ours}, {1: stopped}, lambda rank, reason: lost.put((rank, reason)))
    theirs.recv(1)
    signs.close()
    theirs.close()
    assert lost.empty()


def test_a_rank_that_computes_is_not_lost_before_it_stops(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is this process, which gives no sign and is busy until the other side has given three times as many."""
    monkeypatch.setattr(rank_link, "PERIOD", 0.02)
    ours, theirs = pair
    lost = threading.Event()
    signs = SignsOfLife({1: ours}, {1: os.getpid()}, lambda rank, reason: lost.set())
    signs.started()
    for _ in range(3 * rank_link.SILENT_PERIODS):
        theirs.setblocking(False)
        while True:
            try:
                theirs.recv(1)
                break
            except BlockingIOError:
                sum(range(1000))
    assert not lost.is_set()
    theirs.setblocking(True)
    assert lost.wait(HANG_SECONDS)
    signs.close()
