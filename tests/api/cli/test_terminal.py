"""``rootgraft chat`` and ``rootgraft complete`` against a small server."""

from __future__ import annotations

import io
import os
import pty
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.api.fake_openai import FakeServer

from rootgraft.api.cli.main import main
from rootgraft.api.cli.remote_server import Timing
from rootgraft.api.cli.terminal import summary

ROOT = Path(__file__).parents[3]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch):
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def test_complete_streams_the_text_and_sends_only_what_was_given(fake_server: FakeServer, capsys) -> None:
    assert main(["complete", "Once", "--url", fake_server.url, "--max-tokens", "7", "--api-key", "secret"]) == 0
    assert capsys.readouterr().out == "Hello wörld\n"
    assert fake_server.asked == [
        {
            "model": "first",
            "prompt": "Once",
            "max_tokens": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert fake_server.headers[0]["Authorization"] == "Bearer secret"


def test_complete_reads_standard_input(fake_server: FakeServer, typed, capsys) -> None:
    typed("from a pipe\n")
    assert main(["complete", "--url", fake_server.url, "--model", "mine"]) == 0
    assert (fake_server.asked[0]["prompt"], fake_server.asked[0]["model"]) == ("from a pipe\n", "mine")


def test_chat_keeps_the_conversation(fake_server: FakeServer, typed, capsys) -> None:
    typed("one\n\ntwo\n")
    address = fake_server.url.removesuffix("/v1")
    assert main(["chat", "--url", address, "--system", "Be brief.", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "Hello wörld\nHello wörld\n"
    assert [message["role"] for message in fake_server.asked[1]["messages"]] == ["system", "user", "assistant", "user"]
    assert fake_server.asked[1]["messages"][2]["content"] == "Hello wörld"
    assert fake_server.asked[1]["temperature"] == 0


def test_a_thought_stays_out_of_pipes_and_of_the_conversation(fake_server: FakeServer, typed, capsys) -> None:
    fake_server.thoughts = ("They ", "greet.")
    typed("one\ntwo\n")
    assert main(["chat", "--url", fake_server.url]) == 0
    assert capsys.readouterr().out == "Hello wörld\nHello wörld\n"
    assert fake_server.asked[1]["messages"][1] == {"role": "assistant", "content": "Hello wörld"}


def test_a_refused_turn_is_told_and_forgotten(fake_server: FakeServer, typed, capsys) -> None:
    fake_server.refuse = [503]
    typed("one\ntwo\n")
    assert main(["chat", "--url", fake_server.url]) == 1
    assert capsys.readouterr().err == "rootgraft chat: The server answers HTTP 503: no room now\n"
    assert [message["content"] for message in fake_server.asked[1]["messages"]] == ["two"]


def test_a_message_of_several_lines_is_one_question(fake_server: FakeServer, typed, capsys) -> None:
    typed('"""one\n\n  two\nthree"""\nfour\n"""\nfive\n"""\n"""six\n')
    assert main(["chat", "--url", fake_server.url]) == 0
    asked = [each["messages"][-1]["content"] for each in fake_server.asked]
    assert asked == ["one\n\n  two\nthree", "four", "five", "six"]


def test_a_conversation_begins_anew(fake_server: FakeServer, typed, capsys) -> None:
    typed("one\n/clear\ntwo\n")
    assert main(["chat", "--url", fake_server.url, "--system", "Be brief."]) == 0
    assert [[each["content"] for each in asked["messages"]] for asked in fake_server.asked] == [
        ["Be brief.", "one"],
        ["Be brief.", "two"],
    ]


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_text_that_is_not_utf8_is_refused_in_one_line(fake_server: FakeServer, command: str) -> None:
    words = [sys.executable, "-m", "rootgraft.api.cli.main", command, "--url", fake_server.url]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}  # as in most locales
    done = subprocess.run(words, input=b"caf\xe9\n", cwd=ROOT, env=strict, capture_output=True)
    assert (
        done.stderr.startswith(f"rootgraft {command}: The text is not UTF-8".encode()) and done.stderr.count(b"\n") == 1
    )
    assert done.returncode == 1
    assert fake_server.asked == []


def test_what_the_terminal_cannot_show_is_a_question_mark(fake_server: FakeServer) -> None:
    words = [sys.executable, "-m", "rootgraft.api.cli.main", "complete", "x", "--url", fake_server.url]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, cwd=ROOT, env=ascii_only, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"Hello w?rld\n", b"")


def test_an_option_that_is_not_utf8_is_refused_in_one_line(fake_server: FakeServer, capsys) -> None:
    assert main(["complete", "caf\udce9", "--url", fake_server.url]) == 1
    assert capsys.readouterr().err.startswith("rootgraft complete: The text is not UTF-8")


@pytest.mark.parametrize("key", ["two\nlines", "caf\udce9", "nul\0"])
def test_a_key_that_no_header_can_hold_is_named(fake_server: FakeServer, key: str, capsys) -> None:
    assert main(["complete", "x", "--url", fake_server.url, "--api-key", key]) == 1
    error = capsys.readouterr().err
    assert error.startswith("rootgraft complete: --api-key ") and error.count("\n") == 1


def test_a_stream_that_breaks_off_is_a_failure(fake_server: FakeServer, capsys) -> None:
    fake_server.cut = True
    assert main(["complete", "x", "--url", fake_server.url]) == 1
    assert "before its last event" in capsys.readouterr().err


def test_no_server_says_how_to_start_one(closed_port: int, capsys) -> None:
    assert main(["complete", "x", "--url", f"http://127.0.0.1:{closed_port}/v1"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "rootgraft serve" in error
    assert "connection refused" in error


@pytest.mark.parametrize("url", ["ftp://example.org", "http://", "http://[::1"])
def test_an_address_that_is_none(url: str, capsys) -> None:
    assert main(["complete", "x", "--url", url]) == 1
    assert capsys.readouterr().err.startswith("rootgraft complete: --url must be an address")


def test_the_summary_counts_tokens_and_hits() -> None:
    timing = Timing(ttft=0.5, gaps=[0.25, 0.75], prompt=9, cached=8, completion=3)
    assert summary(timing) == "3 tokens, first after 0.50 s, 2.0 tokens/s, 8 of 9 prompt tokens cached"
    timing.gaps = [1e-5, 2e-5]
    assert summary(timing) == "3 tokens, first after 0.50 s, 8 of 9 prompt tokens cached", "one piece has no speed"


class Screen:
    """What a program shows in its terminal, read up to given words."""

    def __init__(self, terminal: int) -> None:
        self.terminal = terminal
        self.unread = ""

    def until(self, words: str) -> str:
        while words not in self.unread:
            self.unread += os.read(self.terminal, 1 << 16).decode(errors="replace")
        seen, found, self.unread = self.unread.partition(words)
        return seen + found


@contextmanager
def chat_terminal(url: str) -> Iterator[Screen]:
    """Run ``rootgraft chat`` in a terminal of its own, up to its first question; it is left with Ctrl-D."""
    terminal, its = pty.openpty()
    launch = (
        "import os, signal, sys; os.login_tty(0); signal.signal(signal.SIGINT, signal.SIG_DFL);"  # xdist ignores it
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", launch, "-m", "rootgraft.api.cli.main", "chat", "--url", url]
    with subprocess.Popen(command, cwd=ROOT, stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        screen = Screen(terminal)
        try:
            screen.until("> ")
            yield screen
            os.write(terminal, b"\x04")
            assert process.wait(60) == 0
        finally:
            process.kill()
            os.close(terminal)


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(fake_server: FakeServer) -> None:
    fake_server.endless = True
    fake_server.pieces = ("tick\x1b[2J ",)
    with chat_terminal(fake_server.url) as screen:
        os.write(screen.terminal, b"hello\n")
        assert "\x1b[2J" not in screen.until("tick[2J tick"), "a model must not steer the terminal"
        os.write(screen.terminal, b"\x03")
        screen.until("(stopped)")
        screen.until("> ")
        assert fake_server.left.wait(60), "the server must see that nobody listens"


def test_a_thought_is_dim_before_its_answer(fake_server: FakeServer) -> None:
    fake_server.thoughts = ("They\x1b[2J ", "greet.")
    with chat_terminal(fake_server.url) as screen:
        os.write(screen.terminal, b"hello\n")
        screen.until("hello")
        seen = screen.until("Hello wörld").replace("\r", "").replace("\x1b[?2004l", "")
        assert seen == "\n\x1b[2mThey[2J \x1b[0m\x1b[2mgreet.\x1b[0m\n\nHello wörld"
        screen.until("> ")


def test_a_paste_is_one_question(fake_server: FakeServer) -> None:
    with chat_terminal(fake_server.url) as screen:
        os.write(screen.terminal, b"\x1b[200~one\ntwo\nthree\x1b[201~\n")
        screen.until("Hello wörld")
        screen.until("> ")
    assert [each["messages"][-1]["content"] for each in fake_server.asked] == ["one\ntwo\nthree"]


@pytest.mark.parametrize("words", ["fleet status", "models list", "complete text --model m", "complete text", "chat"])
def test_a_server_that_takes_a_connection_and_says_nothing(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one that is stopped: the system takes the connection, and the request."""
    monkeypatch.setattr("rootgraft.api.cli.remote_server._HEALTH_TIMEOUT", 0.2)
    monkeypatch.setattr("rootgraft.api.cli.remote_server._SILENT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert main([*words.split(), "--url", url]) == 1
    assert f"The server at {url}/v1 takes a connection, and then says nothing." in capsys.readouterr().err
