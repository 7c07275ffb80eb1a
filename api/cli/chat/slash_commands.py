"""Slash commands of the terminal chat, such as ``/clear`` and ``/system``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import orjson

from ....engine.errors import ConfigError
from ....engine.peer_options import nearest
from ...exact_json import dumps_exact, loads_exact
from .chat_history import ChatHistory, read_text

_NOTHING_SET = "Nothing is set. /set NAME VALUE sets a request field such as temperature, max_tokens or seed."
_COMMAND = re.compile(r"\s*/([a-z]+)(?:\s+(.*))?\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ChatSession:
    """State and functions that commands use.

    Attributes:
        conversation: the messages and settings.
        model: returns the model's name.
        models: returns the names that the server lists.
        take_model: switches to another model for further questions.
    """

    conversation: ChatHistory
    model: Callable[[], str]
    models: Callable[[], list[str]]
    take_model: Callable[[str], None]


class ChatEnd(Exception):
    """The user has ended the chat with a command."""


def run_slash_command(line: str, session: ChatSession) -> str | None:
    """Run the command of a line. Returns its output, which may be empty, or None if the line is a question.

    A line that begins with a slash is a question if a space precedes it, or its first word has another slash.

    Raises:
        ConfigError: the command does not exist, or cannot be executed.
        ChatEnd: the user ends the chat.
    """
    found = None if line[:1].isspace() else _COMMAND.fullmatch(line)
    if found is None:
        return None
    name, argument = found[1], (found[2] or "").strip()
    if name not in COMMANDS_OF_CHAT:
        hint = nearest(f"/{name}", [f"/{each}" for each in COMMANDS_OF_CHAT if each not in _ALIASES])
        raise ConfigError(
            f"unknown command /{name}.{hint} /help lists commands. To send it as text, put a space before it."
        )
    return COMMANDS_OF_CHAT[name][1](session, argument)


def _help(session: ChatSession, argument: str) -> str:
    lines = [f"/{name:8}{about}" for name, (about, _) in COMMANDS_OF_CHAT.items() if name not in _ALIASES]
    return "\n".join([*lines, 'Alt-Enter starts a new line. Between """ and """, Enter does too.'])


def _clear(session: ChatSession, argument: str) -> str:
    session.conversation.clear()
    return "Started a new conversation."


def _system(session: ChatSession, argument: str) -> str:
    if not argument:
        return session.conversation.system or "There is no system message. /system TEXT sets one."
    session.conversation.system = None if argument == "none" else argument
    return ""


def _set(session: ChatSession, argument: str) -> str:
    settings = session.conversation.settings
    name, _, value = argument.partition(" ")
    if not name:
        return "\n".join(f"{each} {dumps_exact(settings[each]).decode()}" for each in settings) or _NOTHING_SET
    if not value.strip():
        settings.pop(name, None)
        return ""
    if name in ("messages", "model", "stream", "stream_options", "n"):
        way = " /model NAME selects another one." if name == "model" else ""
        raise ConfigError(f"{name} cannot be set: the chat sets it.{way}")
    try:
        settings[name] = loads_exact(value.encode())
    except (orjson.JSONDecodeError, UnicodeEncodeError):
        settings[name] = value.strip()
    return ""


def _save(session: ChatSession, argument: str) -> str:
    path = _path("save", argument)
    session.conversation.save(path, session.model())
    return f"Saved as {path}."


def _load(session: ChatSession, argument: str) -> str:
    session.conversation.load(_path("load", argument))
    count = len(session.conversation.turns) // 2
    return "One question with its answer." if count == 1 else f"{count} questions with their answers."


def _model(session: ChatSession, argument: str) -> str:
    if not argument:
        return "\n".join(f"{'*' if each == session.model() else ' '} {each}" for each in session.models())
    session.take_model(argument)
    return ""


def _file(session: ChatSession, argument: str) -> str:
    path = _path("file", argument)
    text = read_text(path)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    session.conversation.files.append(f"{path.name}:\n{fence}\n{text.rstrip(chr(10))}\n{fence}")
    return f"The next question will include {path.name}, {len(text):,} characters."


def _exit(session: ChatSession, argument: str) -> str:
    raise ChatEnd


def _path(name: str, argument: str) -> Path:
    if not argument:
        raise ConfigError(f"/{name} needs the path of a file: /{name} PATH.")
    return Path(argument).expanduser()


_ALIASES = ("bye", "quit")
COMMANDS_OF_CHAT: dict[str, tuple[str, Callable[[ChatSession, str], str]]] = {
    "help": ("list the commands", _help),
    "clear": ("start a new conversation; keep the system message", _clear),
    "system": ("show the system message, or set it: /system Be brief. /system none removes it", _system),
    "set": ("show the settings, or set a request field: /set temperature 0.2; without a value, unset it", _set),
    "model": ("list the models and adapters, or select one", _model),
    "file": ("add a text file before the next question", _file),
    "save": ("write the conversation to a file", _save),
    "load": ("load a conversation from a file", _load),
    "exit": ("quit, like Ctrl-D", _exit),
    "bye": ("leave", _exit),
    "quit": ("leave", _exit),
}
