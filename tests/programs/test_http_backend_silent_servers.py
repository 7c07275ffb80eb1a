"""Programs against servers that vanish without a word: stopped, or behind a network that is cut."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest
from support.machine.waits import HANG_SECONDS

from rootgraft import LLM
from rootgraft.programs import ProgramError, Session

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
PIECE = b'data: {"choices": [{"delta": {"content": "one "}}]}\n\n'


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=8) as made:
        yield made


def session(listener: socket.socket, timeout: float = 0.2) -> Session:
    made = Session(f"http://127.0.0.1:{listener.getsockname()[1]}", model="tiny", timeout=timeout)
    made.user("?")
    return made


def test_a_server_that_says_nothing_fails_the_call(listener: socket.socket) -> None:
    """The system takes the connection of a process that is stopped, and the request."""
    for call in (lambda: session(listener).gen("x"), lambda: session(listener).select("x", ["a", "b"])):
        with pytest.raises(ProgramError, match=r"'x': 127\.0\.0\.1:\d+ has sent nothing for 0\.2 s \(timeout\)$"):
            call()


def test_a_server_that_stops_in_the_middle_of_an_answer(listener: socket.socket) -> None:
    opened: list[socket.socket] = []

    def answer() -> None:
        opened.append(listener.accept()[0])
        opened[0].sendall(HEAD + PIECE + PIECE)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    pieces, asked = [], session(listener)
    with pytest.raises(ProgramError, match=r"gen 'x': .* has sent nothing for 0\.2 s"):
        pieces.extend(asked.stream("x"))
    assert "x" not in asked.values and len(asked.messages) == 1
    thread.join(HANG_SECONDS)
    opened[0].close()


def test_a_long_answer_is_no_silence(listener: socket.socket) -> None:
    """Its pieces come a thirtieth of the timeout apart; the whole takes longer than that."""

    def answer() -> None:
        with listener.accept()[0] as opened:
            opened.sendall(HEAD)
            for _ in range(50):
                opened.sendall(PIECE)
                time.sleep(0.05)
            opened.sendall(b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n')

    threading.Thread(target=answer, daemon=True).start()
    assert session(listener, 2.0).gen("x") == "one " * 50


def test_a_network_that_takes_no_connection(listener: socket.socket) -> None:
    """A full backlog drops what comes, as a cut network does."""
    place = listener.getsockname()
    listener.listen(0)
    waiting = []
    for _ in range(4):
        waiting.append(socket.socket())
        waiting[-1].setblocking(False)
        waiting[-1].connect_ex(place)
    with pytest.raises(ProgramError, match=r"gen 'x': 127\.0\.0\.1:\d+ did not accept a connection within 0\.2 s$"):
        session(listener).gen("x")
    for each in waiting:
        each.close()


@pytest.mark.parametrize("timeout", [0, -1, 86_401, float("nan"), True, "5"])
def test_timeouts_out_of_bounds(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be above 0 and at most 86400 seconds, not"):
        Session("http://127.0.0.1:1", timeout=timeout)
    for taken in (1e-3, 86_400):
        Session("http://127.0.0.1:1", timeout=taken)


def test_an_llm_takes_none() -> None:
    with pytest.raises(ValueError, match="model, api_key and timeout are only for servers"):
        Session(LLM.__new__(LLM), timeout=5.0)
