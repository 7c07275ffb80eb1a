"""Question input: reads a chat's questions from a terminal, with history and multi-line input, or from a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..terminal import in_terminal
from .slash_commands import COMMANDS_OF_CHAT

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings

QUOTES = '"""'


def questions(runner: asyncio.Runner) -> Iterator[str]:
    """Yield the questions of the input: each is one line, or the lines between two marks of three quotes.

    In a terminal a paste is part of one question, and Alt-Enter begins a new line. Empty and interrupted lines are
    skipped.
    """
    quoted: list[str] | None = None
    for line in _lines(runner):
        if quoted is None and line.lstrip().startswith(QUOTES):
            line, quoted = line.lstrip().removeprefix(QUOTES), []
        if quoted is None:
            if line.strip():
                yield line
            continue
        is_end = line.rstrip().endswith(QUOTES)
        quoted.append(line.rstrip().removesuffix(QUOTES) if is_end else line)
        if is_end:
            whole, quoted = "\n".join(quoted).strip("\n"), None
            if whole.strip():
                yield whole
    if quoted and (rest := "\n".join(quoted).strip("\n")).strip():
        yield rest


def _lines(runner: asyncio.Runner) -> Iterator[str]:
    """Yield entries from the terminal, or the lines of a pipe, until the end; interrupted entries are skipped."""
    read = _typed(runner) if in_terminal() else input
    while True:
        try:
            yield read()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return


def _typed(runner: asyncio.Runner) -> Callable[[], str]:
    """Return a function that reads one entry from the terminal. It raises KeyboardInterrupt or EOFError."""
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(
        history=_history(),
        completer=_completer(),
        complete_while_typing=False,
        key_bindings=_key_bindings(),
        prompt_continuation="  ",
        enable_open_in_editor=True,
    )
    return lambda: runner.run(session.prompt_async("> "))


def _completer() -> WordCompleter:
    from prompt_toolkit.completion import WordCompleter

    return WordCompleter([f"/{name}" for name in COMMANDS_OF_CHAT], sentence=True)


def _key_bindings() -> KeyBindings:
    """Return key bindings that include Alt-Enter for a new line."""
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()
    bindings.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    return bindings


def state_folder() -> Path:
    """Return the user's folder for state (XDG Base Directory Specification), created if missing. Raises OSError."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    folder = Path(state) / "rootgraft"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _history() -> History:
    """Return the history of earlier chats from a file that only the user can read, or else of this chat only."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    with contextlib.suppress(OSError, RuntimeError):
        path = state_folder() / "chat_history"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return FileHistory(path)
    return InMemoryHistory()
