"""An answer is drawn as it grows, in a bounded share of the time."""

from __future__ import annotations

import io

from rich.console import Console

from rootgraft.api.cli.chat.markdown_output import MarkdownOutput


class SlowScreen(io.StringIO):
    """A terminal that takes a second for each write, by its own clock."""

    seconds = 0.0
    writes = 0

    def write(self, text: str) -> int:
        self.seconds += 1.0
        self.writes += 1
        return super().write(text)


def test_pieces_that_waited_for_a_slow_draw_are_drawn_together() -> None:
    screen = SlowScreen()
    console = Console(file=screen, force_terminal=True, width=80, height=40, legacy_windows=False)
    output = MarkdownOutput(console, clock=lambda: screen.seconds)
    output.write("word ")
    first = screen.writes
    for _ in range(2000):
        output.write("word ")
    assert screen.writes == first, "each piece would wait for a draw of its own"
    screen.seconds += 1000.0
    output.write("more ")
    assert screen.writes > first
    output.close()
    assert screen.getvalue().count("more") >= 1
