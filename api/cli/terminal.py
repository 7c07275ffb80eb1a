"""``rootgraft chat`` and ``rootgraft complete``: terminal clients of a server."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...engine.errors import ConfigError
from .options import ChatOptions, CompleteOptions, RemoteOptions, SamplingOptions
from .remote_server import RemoteServer, Timing, timed

# Generated text must not control the terminal: tab and newline are the only control characters printed.
_CONTROLS = dict.fromkeys(code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n")
_QUOTES = '"""'
_SEVERAL_LINES = f"{_QUOTES} before and after a message gives it several lines."
_LEAST_SECONDS = 0.01  # from first to last token for a speed: a short answer may arrive as one piece


def chat(remote: RemoteOptions, sampling: SamplingOptions, options: ChatOptions) -> int:
    """Chat until the end of the input. Ctrl-C stops an answer, Ctrl-D leaves.

    ``/clear`` begins a new conversation. Returns the exit code: 1 if an answer failed and nobody saw it in a terminal.
    """
    _take_any_text()
    has_failed = False
    with asyncio.Runner() as runner, _connected(runner, remote) as server:
        system = [] if options.system is None else [{"role": "system", "content": options.system}]
        messages = list(system)
        if _in_terminal():
            _dim(f"{server.model}. Ctrl-C stops an answer, Ctrl-D leaves. /clear begins anew. {_SEVERAL_LINES}")
        fields = _fields(sampling, options.max_tokens)
        for line in _questions():
            if line.strip() == "/clear":
                messages = list(system)
                continue
            messages.append({"role": "user", "content": line})
            answer = _Answer()
            try:
                body = {"messages": messages, **fields}
                succeeded = _stream_answer(runner, server, "chat/completions", body, answer, "rootgraft chat")
            except KeyboardInterrupt:
                succeeded = True
                _dim("\n(stopped)" if answer.begun else "(stopped)")
            if succeeded:
                messages.append({"role": "assistant", "content": "".join(answer.pieces)})
                continue
            has_failed = True
            messages.pop()
            if _in_terminal() and messages != system:
                _dim("The question was left out. /clear begins a new conversation.")
    return 1 if has_failed and not _in_terminal() else 0


def complete(remote: RemoteOptions, sampling: SamplingOptions, options: CompleteOptions) -> int:
    """Continue one text. Returns the exit code."""
    _take_any_text()
    if options.prompt is None and sys.stdin.isatty():
        raise ConfigError("give the text to continue as an argument or on standard input.")
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    with asyncio.Runner() as runner, _connected(runner, remote) as server:
        body = {"prompt": prompt, **_fields(sampling, options.max_tokens)}
        succeeded = _stream_answer(runner, server, "completions", body, _Answer(), "rootgraft complete")
    return 0 if succeeded else 1


def _take_any_text() -> None:
    """Let input that is not UTF-8 reach the request, which refuses it, and print ``?`` for what the output lacks."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def _fields(sampling: SamplingOptions, max_tokens: int | None) -> dict[str, Any]:
    """Return the request fields of the given options."""
    fields = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "max_tokens": max_tokens,
    }
    return {name: value for name, value in fields.items() if value is not None}


@contextlib.contextmanager
def _connected(runner: asyncio.Runner, options: RemoteOptions) -> Iterator[RemoteServer]:
    """Connect for the block, for several calls of the runner."""
    connection = RemoteServer.connect(options)
    server = runner.run(connection.__aenter__())
    try:
        yield server
    finally:
        runner.run(connection.__aexit__(None, None, None))


def _questions() -> Iterator[str]:
    """Yield the questions of the input until its end: a line each, or the lines between two lots of three quotes.

    What is pasted into a terminal is one question. Empty and interrupted lines are skipped.
    """
    quoted: list[str] | None = None
    for line in _lines():
        if quoted is None and line.lstrip().startswith(_QUOTES):
            line, quoted = line.lstrip().removeprefix(_QUOTES), []
        if quoted is None:
            if line.strip():
                yield line
            continue
        is_end = line.rstrip().endswith(_QUOTES)
        quoted.append(line.rstrip().removesuffix(_QUOTES) if is_end else line)
        if is_end:
            whole, quoted = "\n".join(quoted).strip("\n"), None
            if whole.strip():
                yield whole
    if quoted and (rest := "\n".join(quoted).strip("\n")).strip():
        yield rest


def _lines() -> Iterator[str]:
    """Yield the lines of the input until its end; interrupted lines are skipped."""
    if _in_terminal():
        with contextlib.suppress(ImportError):
            import readline  # arrow keys and history for input()

            readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
    while True:
        try:
            yield input("> " if _in_terminal() else "")
        except KeyboardInterrupt:
            print()
        except EOFError:
            if _in_terminal():
                print()
            return


@dataclass(slots=True)
class _Answer:
    """An answer as it is printed.

    Attributes:
        pieces: its text so far, without the thought.
        has_thought: a thought was printed. It is dim, and only where somebody reads: pipes get the answer alone.
    """

    pieces: list[str] = field(default_factory=list)
    has_thought: bool = False

    @property
    def begun(self) -> bool:
        return bool(self.pieces) or self.has_thought

    def print_text(self, text: str) -> None:
        if self.has_thought and not self.pieces:
            print("\n")
        self.pieces.append(text)
        print(text.translate(_CONTROLS) if sys.stdout.isatty() else text, end="", flush=True)

    def print_thought(self, text: str) -> None:
        if _in_terminal():
            self.has_thought = True
            print(f"\x1b[2m{text.translate(_CONTROLS)}\x1b[0m", end="", flush=True)


def _stream_answer(
    runner: asyncio.Runner, server: RemoteServer, path: str, body: dict[str, Any], answer: _Answer, command: str
) -> bool:
    """Print the answer as it arrives. If the server fails, print the error after the command's name: False."""
    timing = runner.run(timed(server, path, body, answer.print_text, answer.print_thought))
    if timing.error is not None:
        print(f"{chr(10) if answer.begun else ''}{command}: {timing.message}", file=sys.stderr)
        return False
    if not answer.pieces or not answer.pieces[-1].endswith("\n"):
        print()
    if _in_terminal() and (line := summary(timing)):
        _dim(line)
    return True


def summary(timing: Timing) -> str:
    """Tokens, speed and cache hits in one line; empty if the server reports no usage."""
    if not timing.prompt or timing.ttft is None:
        return ""
    parts = [f"{timing.completion} tokens", f"first after {timing.ttft:.2f} s"]
    if timing.tpot and sum(timing.gaps) >= _LEAST_SECONDS:
        parts.append(f"{1 / timing.tpot:.1f} tokens/s")
    if timing.cached is not None:
        parts.append(f"{timing.cached} of {timing.prompt} prompt tokens cached")
    return ", ".join(parts)


def _in_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _dim(text: str) -> None:
    print(f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else text, flush=True)
