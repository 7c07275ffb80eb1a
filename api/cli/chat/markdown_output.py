"""Markdown output: renders Markdown in a terminal. Complete blocks stay; the last block is redrawn as it grows."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

from ..terminal import PlainOutput, TextOutput, without_controls

_SECONDS_BETWEEN_DRAWS = 0.05
_LEAST_PAUSE = 3.0  # smallest pause between two redraws, as a multiple of the duration of the last redraw


def best_output() -> TextOutput:
    """Return a Markdown output if the terminal can move its cursor, else a plain output."""
    is_capable = sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb")
    return MarkdownOutput() if is_capable else PlainOutput()


class MarkdownOutput:
    """Text of one answer, rendered as Markdown (CommonMark) while it arrives.

    Args:
        console: console for the output; standard output by default.
        clock: returns the time in seconds; it is also called after a block was drawn, to measure how long drawing took.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._parser = MarkdownIt().enable("table")
        self._rest = ""  # the text of the last block, which may still grow
        self._live: Live | None = None
        self._draws_from = float("-inf")
        self._has_block = False

    def write(self, text: str) -> None:
        """Draw further text, at most twenty times per second and for at most a quarter of the time.

        Further pieces arrive while a block is drawn. Without a pause after it, each of these pieces would cause a
        redraw, and Ctrl-C would have to wait for all of them.
        """
        self._rest += without_controls(text)
        if (began := self._clock()) < self._draws_from:
            return
        self._draw()
        ended = self._clock()
        self._draws_from = ended + max(_SECONDS_BETWEEN_DRAWS, _LEAST_PAUSE * (ended - began))

    def _draw(self) -> None:
        if complete := self._take_complete():
            self._print(complete)
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="crop")
            self._live.start()
        self._live.update(_Lines(self._rest, self._has_block, most=max(1, self._console.height - 1)), refresh=True)

    def close(self) -> None:
        """Draw the remaining text for the last time."""
        self._print(self._rest)
        self._rest = ""

    def _take_complete(self) -> str:
        """Remove all blocks but the last from the remaining text, and return them."""
        starts = [token.map[0] for token in self._parser.parse(self._rest) if token.level == 0 and token.map]
        if len(set(starts)) < 2:
            return ""
        lines = self._rest.splitlines(keepends=True)
        self._rest = "".join(lines[starts[-1] :])
        return "".join(lines[: starts[-1]])

    def _print(self, text: str) -> None:
        """Print blocks that no longer change, with an empty line between them and the blocks before."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if not text.strip():
            return
        self._console.print(_Lines(text, self._has_block), end="")
        self._has_block = True


class _Lines:
    """Markdown as lines without trailing blanks, which would be copied together with the text.

    Args:
        text: the Markdown.
        is_later: whether to print an empty line before the Markdown.
        most: largest number of lines, of which the last are shown; None for all.
    """

    def __init__(self, text: str, is_later: bool, most: int | None = None) -> None:
        self._text = text
        self._is_later = is_later
        self._most = most

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(Markdown(self._text), options.update(height=None), pad=False)
        lines = [[], *lines] if self._is_later else lines
        for line in lines[-self._most :] if self._most else lines:
            yield from _without_trailing_blanks(line)
            yield Segment.line()


def _without_trailing_blanks(line: list[Segment]) -> list[Segment]:
    """Return a line up to its last visible character, or to the end of a coloured background."""
    line = list(line)
    while line and (line[-1].style is None or line[-1].style.bgcolor is None):
        text = line[-1].text.rstrip(" ")
        if text:
            line[-1] = Segment(text, line[-1].style)
            break
        line.pop()
    return line
