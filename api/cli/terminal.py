"""Terminal: prints streamed answers, dim reasoning, figures on one line, and errors after the command's name."""

from __future__ import annotations

import asyncio
import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from .options import RemoteOptions, SamplingOptions
from .remote_server import RemoteServer, Timing, timed

# Generated text must not control the terminal, so tab and newline are the only control characters that are printed.
_CONTROLS = dict.fromkeys(code for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n")
# Smallest number of seconds between first and last token for which a speed is printed. A short answer may arrive as one
# piece.
_LEAST_SECONDS = 0.01


class TextOutput(Protocol):
    """Output for the text of one answer."""

    def write(self, text: str) -> None:
        """Show a further piece."""

    def close(self) -> None:
        """Show the remaining text, and end the line. This is called once, also for a stopped answer."""


class PlainOutput:
    """Prints text as it arrives. In a terminal, control characters are left out."""

    def __init__(self) -> None:
        self._line_is_open = False

    def write(self, text: str) -> None:
        print(without_controls(text) if sys.stdout.isatty() else text, end="", flush=True)
        self._line_is_open = not text.endswith("\n")

    def close(self) -> None:
        if self._line_is_open:
            print(flush=True)


@dataclass(slots=True)
class ShownAnswer:
    """An answer that is being shown.

    Attributes:
        output: output for its text.
        pieces: the text so far, without the reasoning.
        has_thought: whether reasoning was printed. It is printed, dim, only in a terminal, so that pipes get only the
            answer.
    """

    output: TextOutput
    pieces: list[str] = field(default_factory=list)
    has_thought: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def write_text(self, text: str) -> None:
        """Show a piece of the answer."""
        if self.has_thought and not self.pieces:
            print("\n")
        self.pieces.append(text)
        self.output.write(text)

    def write_thought(self, text: str) -> None:
        """Show a piece of the reasoning before the answer."""
        if in_terminal():
            self.has_thought = True
            print(f"\x1b[2m{without_controls(text)}\x1b[0m", end="", flush=True)

    def close(self) -> None:
        """End the line of the shown text."""
        if self.pieces:
            self.output.close()
        elif self.has_thought:
            print()


def stream_answer(
    runner: asyncio.Runner, server: RemoteServer, path: str, body: dict[str, Any], answer: ShownAnswer
) -> Timing:
    """Show an answer as it arrives; in a terminal, also show its figures. Failures are in the returned timing.

    Raises:
        KeyboardInterrupt: the user stopped the answer; the text that has arrived is shown.
    """
    try:
        timing = runner.run(timed(server, path, body, answer.write_text, answer.write_thought))
    finally:
        answer.close()
    if timing.error is None:
        if not answer.pieces:
            print()
        if in_terminal() and (line := summary(timing)):
            print_dim(line)
    return timing


def summary(timing: Timing) -> str:
    """Return tokens, speed and cache hits on one line; empty if the server reports no usage."""
    if not timing.prompt or timing.ttft is None:
        return ""
    parts = [f"{timing.completion} tokens", f"first after {timing.ttft:.2f} s"]
    if timing.tpot and sum(timing.gaps) >= _LEAST_SECONDS:
        parts.append(f"{1 / timing.tpot:.1f} tokens/s")
    if timing.cached is not None:
        parts.append(f"{timing.cached} of {timing.prompt} prompt tokens cached")
    return ", ".join(parts)


def take_any_text() -> None:
    """Accept input that is not UTF-8, which requests then refuse, and print ``?`` for characters the output lacks."""
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


def sampling_fields(sampling: SamplingOptions, max_tokens: int | None) -> dict[str, Any]:
    """Return the request fields for the given options."""
    fields = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "max_tokens": max_tokens,
    }
    return {name: value for name, value in fields.items() if value is not None}


@contextlib.contextmanager
def connected(runner: asyncio.Runner, options: RemoteOptions) -> Iterator[RemoteServer]:
    """Context manager: connect to a server, for several calls of the runner."""
    connection = RemoteServer.connect(options)
    server = runner.run(connection.__aenter__())
    try:
        yield server
    finally:
        runner.run(connection.__aexit__(None, None, None))


def without_controls(text: str) -> str:
    """Return the text without characters that control a terminal."""
    return text.translate(_CONTROLS)


def in_terminal() -> bool:
    """Return whether input and output are both terminals."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def print_dim(text: str) -> None:
    """Print a line of information, dim in a terminal, else on standard error, because pipes get only the answers."""
    if in_terminal():
        print(f"\x1b[2m{text}\x1b[0m", flush=True)
    else:
        print(text, file=sys.stderr, flush=True)
