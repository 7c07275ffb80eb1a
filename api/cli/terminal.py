"""``rootgraft chat`` and ``rootgraft complete``: terminal clients of a server."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...engine.errors import ConfigError
from .options import ChatOptions, CompleteOptions, RemoteOptions, SamplingOptions
from .remote_server import RemoteError, RemoteServer

# Generated text must not control the terminal: tab and newline are the only control characters printed.
_CONTROLS = dict.fromkeys(code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n")


@dataclass(slots=True)
class TerminalAnswer:
    """A streamed answer, kept if the stream is interrupted. Times are of ``time.perf_counter``.

    Attributes:
        started: time of the request.
        first: arrival of the first text, or None.
        last: arrival of the last text.
        usage: the server's usage, empty until the end of the stream.
    """

    started: float = field(default_factory=time.perf_counter)
    parts: list[str] = field(default_factory=list)
    first: float | None = None
    last: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    def add(self, event: dict[str, Any]) -> str:
        """Add one event of either endpoint and return its text."""
        self.usage = event.get("usage") or self.usage
        text = "".join(_text(choice) for choice in event.get("choices") or ())
        if text:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.parts.append(text)
        return text

    def summary(self) -> str:
        """Tokens, speed and cache hits in one line; empty if the server reports no usage."""
        tokens = self.usage.get("completion_tokens") or 0
        if not tokens or self.first is None:
            return ""
        parts = [f"{tokens} tokens", f"first after {self.first - self.started:.2f} s"]
        if self.last > self.first and tokens > 1:
            parts.append(f"{(tokens - 1) / (self.last - self.first):.1f} tokens/s")
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            parts.append(f"{cached} of {self.usage.get('prompt_tokens')} prompt tokens cached")
        return ", ".join(parts)


def _text(choice: dict[str, Any]) -> str:
    return str((choice.get("delta") or {}).get("content") or choice.get("text") or "")


def chat(remote: RemoteOptions, sampling: SamplingOptions, options: ChatOptions) -> int:
    """Chat until the end of the input. Ctrl-C stops an answer, Ctrl-D leaves. Returns the exit code."""
    with asyncio.Runner() as runner, _connected(runner, remote) as server:
        messages: list[dict[str, str]] = []
        if options.system is not None:
            messages.append({"role": "system", "content": options.system})
        if _in_terminal():
            _dim(f"{server.model}. Ctrl-C stops an answer, Ctrl-D leaves.")
        fields = _fields(sampling, options.max_tokens)
        for line in _lines():
            messages.append({"role": "user", "content": line})
            answer = TerminalAnswer()
            try:
                succeeded = _stream_answer(runner, server, "chat/completions", {"messages": messages, **fields}, answer)
            except KeyboardInterrupt:
                succeeded = True
                _dim("\n(stopped)" if answer.parts else "(stopped)")
            if succeeded:
                messages.append({"role": "assistant", "content": answer.text})
            else:
                messages.pop()
    return 0


def complete(remote: RemoteOptions, sampling: SamplingOptions, options: CompleteOptions) -> int:
    """Continue one text. Returns the exit code."""
    if options.prompt is None and sys.stdin.isatty():
        raise ConfigError("give the text to continue as an argument or on standard input.")
    prompt = sys.stdin.read() if options.prompt is None else options.prompt
    with asyncio.Runner() as runner, _connected(runner, remote) as server:
        body = {"prompt": prompt, **_fields(sampling, options.max_tokens)}
        succeeded = _stream_answer(runner, server, "completions", body, TerminalAnswer())
    return 0 if succeeded else 1


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


def _lines() -> Iterator[str]:
    """Yield the lines of the input until its end; empty and interrupted lines are skipped."""
    if _in_terminal():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (arrow keys and history for input())
    while True:
        try:
            line = input("> " if _in_terminal() else "")
        except KeyboardInterrupt:
            print()
            continue
        except EOFError:
            if _in_terminal():
                print()
            return
        if line.strip():
            yield line


def _stream_answer(
    runner: asyncio.Runner, server: RemoteServer, path: str, body: dict[str, Any], answer: TerminalAnswer
) -> bool:
    """Stream the answer to the terminal. If the server fails, print the error and return False."""
    try:
        runner.run(_print(server, path, body, answer))
    except RemoteError as error:
        print(f"{chr(10) if answer.parts else ''}rootgraft: {error}", file=sys.stderr)
        return False
    if not answer.text.endswith("\n"):
        print()
    if _in_terminal() and (summary := answer.summary()):
        _dim(summary)
    return True


async def _print(server: RemoteServer, path: str, body: dict[str, Any], answer: TerminalAnswer) -> None:
    async for event in server.stream(path, body):
        if text := answer.add(event):
            print(text.translate(_CONTROLS) if sys.stdout.isatty() else text, end="", flush=True)


def _in_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _dim(text: str) -> None:
    print(f"\x1b[2m{text}\x1b[0m" if sys.stdout.isatty() else text, flush=True)
