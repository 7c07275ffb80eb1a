"""``rootgraft chat`` and ``rootgraft complete`` against a small server."""

from __future__ import annotations

import io
import os
import pty
import select
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyte
import pytest
from support.api.fake_openai import FakeServer
from support.machine.waits import HANG_SECONDS

from rootgraft.api.cli.main import main
from rootgraft.api.cli.remote_server import Timing
from rootgraft.api.cli.terminal import summary

ROOT = Path(__file__).parents[4]


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
    assert capsys.readouterr().err == "rootgraft chat: The server returned HTTP 503: no room now\n"
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
        done.stderr.startswith(f"rootgraft {command}: The text is not valid UTF-8".encode())
        and done.stderr.count(b"\n") == 1
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
    assert capsys.readouterr().err.startswith("rootgraft complete: The text is not valid UTF-8")


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


class Terminal:
    """A terminal as a program sees it, and what it shows."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.screen = pyte.Screen(80, 40)
        self.stream = pyte.ByteStream(self.screen)
        self.screen.write_process_input = lambda data: self.write(data.encode())

    def write(self, keys: bytes) -> None:
        os.write(self.descriptor, keys)

    def read(self) -> None:
        """Read what is shown next, which comes within a minute."""
        assert select.select([self.descriptor], [], [], 60)[0], self.lines
        self.stream.feed(os.read(self.descriptor, 1 << 16))

    @property
    def lines(self) -> list[str]:
        """The lines that show something, without trailing blanks."""
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def until(self, *words: str) -> list[str]:
        """Wait until a line begins with each of these words; returns the lines."""
        while not all(any(line.startswith(word) for line in self.lines) for word in words):
            self.read()
        return self.lines

    def until_prompt(self) -> list[str]:
        """Wait for an empty prompt in the last line; returns the lines before it."""
        while self.lines[-1:] != [">"]:
            self.read()
        return self.lines[:-1]


@contextmanager
def chat_terminal(url: str, folder: Path) -> Iterator[Terminal]:
    """Run ``rootgraft chat`` in a terminal of its own, up to its first question; it is left with Ctrl-D."""
    terminal, its = pty.openpty()
    launch = (
        "import os, signal, sys; os.login_tty(0); signal.signal(signal.SIGINT, signal.SIG_DFL);"  # xdist ignores it
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", launch, "-m", "rootgraft.api.cli.main", "chat", "--url", url]
    state = {**os.environ, "XDG_STATE_HOME": str(folder), "TERM": "xterm-256color"}
    with subprocess.Popen(command, cwd=ROOT, env=state, stdin=its, stdout=its, stderr=its) as process:
        termios.tcsetwinsize(its, (40, 80))
        os.close(its)
        screen = Terminal(terminal)
        try:
            screen.until_prompt()
            yield screen
            screen.write(b"\x04")
            with suppress(OSError):  # the other end is closed
                while True:
                    screen.read()
            assert process.wait(HANG_SECONDS) == 0
        finally:
            process.kill()
            os.close(terminal)


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(fake_server: FakeServer, tmp_path: Path) -> None:
    fake_server.endless = True
    fake_server.pieces = ("tick\x1b[2J ",)
    with chat_terminal(fake_server.url, tmp_path) as terminal:
        terminal.write(b"hello\r")
        terminal.until("tick[2J tick")  # a model must not steer the terminal
        terminal.write(b"\x03")
        terminal.until("(stopped)")
        terminal.until_prompt()
        assert fake_server.left.wait(HANG_SECONDS), "the server must see that nobody listens"


def test_a_thought_is_dim_before_its_answer(fake_server: FakeServer, tmp_path: Path) -> None:
    fake_server.thoughts = ("They\x1b[2J ", "greet.")
    with chat_terminal(fake_server.url, tmp_path) as terminal:
        terminal.write(b"hello\r")
        terminal.until("They[2J greet.", "Hello wörld")
        terminal.until_prompt()


def test_a_paste_is_one_question_and_alt_enter_begins_a_line(fake_server: FakeServer, tmp_path: Path) -> None:
    with chat_terminal(fake_server.url, tmp_path) as terminal:
        terminal.write(b"\x1b[200~one\ntwo\nthree\x1b[201~\x1b\rfour\r")
        terminal.until("Hello wörld")
        terminal.until_prompt()
    assert [each["messages"][-1]["content"] for each in fake_server.asked] == ["one\ntwo\nthree\nfour"]


def test_questions_are_remembered_by_the_next_chat(fake_server: FakeServer, tmp_path: Path) -> None:
    with chat_terminal(fake_server.url, tmp_path) as terminal:
        terminal.write(b"earlier\r")
        terminal.until("Hello wörld")
        terminal.until_prompt()
    assert (tmp_path / "rootgraft" / "chat_history").stat().st_mode & 0o777 == 0o600
    with chat_terminal(fake_server.url, tmp_path) as terminal:
        terminal.write(b"\x1b[A\r")
        terminal.until("Hello wörld")
        terminal.until_prompt()
    assert [each["messages"][0]["content"] for each in fake_server.asked] == ["earlier", "earlier"]


def test_markdown_is_drawn(fake_server: FakeServer, tmp_path: Path) -> None:
    fake_server.pieces = ("Some *words*", ".\n\n- one\n- t", "wo\n\n```\nco", "de\n```\n")
    with chat_terminal(fake_server.url, tmp_path) as terminal:
        terminal.write(b"hello\r")
        lines = terminal.until("Some words.", " • one", " • two", " code")
        assert not any("`" in line or "*" in line for line in lines)
        terminal.until_prompt()


def test_a_refused_setting_is_told_how_to_unset(fake_server: FakeServer, tmp_path: Path) -> None:
    fake_server.refuse = [400]
    with chat_terminal(fake_server.url, tmp_path) as terminal:
        terminal.write(b"/set bogus 1\r")
        terminal.until_prompt()
        terminal.write(b"one\r")
        terminal.until(
            "The question was removed from the conversation.", "It was sent with these settings: bogus. /set NAME"
        )
        terminal.until_prompt()
        terminal.write(b"/set bogus\r")
        terminal.until_prompt()
        terminal.write(b"two\r")
        terminal.until("Hello wörld")
        terminal.until_prompt()
    assert [each.get("bogus") for each in fake_server.asked] == [1, None]


def test_what_a_conversation_has_no_room_for_is_left_out(fake_server: FakeServer, typed, capsys) -> None:
    fake_server.most_messages = 4
    typed("one\ntwo\nthree\n")
    assert main(["chat", "--url", fake_server.url, "--system", "Be brief."]) == 0
    contents = [[each["content"] for each in asked["messages"]] for asked in fake_server.asked]
    assert contents[-1] == ["Be brief.", "two", "Hello wörld", "three"]
    told = capsys.readouterr().err
    assert "The context is full: the oldest question was left out of the request, answers included." in told
    assert "cut off" not in told


def test_an_answer_that_is_cut_off_says_so(fake_server: FakeServer, typed, capsys) -> None:
    typed("one\n")
    assert main(["chat", "--url", fake_server.url, "--max-tokens", "3"]) == 0
    told = capsys.readouterr()
    assert told.out == "Hello wörld\n"
    assert "The answer was cut off after 3 tokens, its limit. /set max_tokens N" in told.err


def test_a_question_that_is_too_long_alone_is_a_failure(fake_server: FakeServer, typed, capsys) -> None:
    fake_server.most_messages = 0
    typed("one\n")
    assert main(["chat", "--url", fake_server.url]) == 1
    assert "HTTP 400: too long" in capsys.readouterr().err


def test_settings_files_and_models(fake_server: FakeServer, typed, tmp_path: Path, capsys) -> None:
    text, saved = tmp_path / "notes.txt", tmp_path / "saved.json"
    text.write_text("a ``` b\n")
    typed(
        f"/set temperature 0.5\n/set stop end\n/model second\n/file {text}\nsum up\n/save {saved}\n/clear\n"
        f"/set stop\n/system Be brief.\ntwo\n/load {saved}\nthree\n /no command\n/etc/hosts, what is it?\n"
    )
    assert main(["chat", "--url", fake_server.url]) == 0
    first, second, third, fourth, fifth = fake_server.asked
    assert (first["temperature"], first["stop"], first["model"]) == (0.5, "end", "second")
    assert first["messages"][0]["content"] == "notes.txt:\n````\na ``` b\n````\n\nsum up"
    assert "stop" not in second and second["messages"][0] == {"role": "system", "content": "Be brief."}
    assert third["stop"] == "end"
    assert [each["role"] for each in third["messages"]] == ["user", "assistant", "user"]
    assert third["messages"][0] == first["messages"][0]
    assert fourth["messages"][-1]["content"] == " /no command"
    assert fifth["messages"][-1]["content"] == "/etc/hosts, what is it?"


@pytest.mark.parametrize(
    "line, says",
    [
        ("/cleer", "unknown command /cleer. Did you mean /clear?"),
        ("/load nowhere.json", "nowhere.json cannot be read"),
        ("/file", "/file needs the path of a file: /file PATH."),
        ("/set messages []", "messages cannot be set"),
        ("/save /dev/null/x", "cannot be written"),
    ],
)
def test_a_wrong_command_is_told_and_not_sent(fake_server: FakeServer, typed, capsys, line: str, says: str) -> None:
    typed(f"{line}\none\n")
    assert main(["chat", "--url", fake_server.url]) == 1
    assert says in capsys.readouterr().err
    assert [each["messages"][-1]["content"] for each in fake_server.asked] == ["one"]


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"messages": [{"role": "user"}]}', '{"messages": [{"role": "user", "content": "x"}]}', "x"]
)
def test_a_file_that_is_no_conversation(fake_server: FakeServer, typed, tmp_path: Path, capsys, content: str) -> None:
    path = tmp_path / "saved.json"
    path.write_text(content)
    typed(f"/load {path}\n")
    assert main(["chat", "--url", fake_server.url]) == 1
    error = capsys.readouterr().err
    assert str(path) in error and error.count("\n") == 1


def test_exit_leaves(fake_server: FakeServer, typed) -> None:
    typed("/exit\none\n")
    assert main(["chat", "--url", fake_server.url]) == 0
    assert fake_server.asked == []


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
    assert f"The server at {url}/v1 accepts connections but does not respond." in capsys.readouterr().err
