"""Chat history: the messages and settings of a conversation with a model, which can be saved to a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....engine.errors import ConfigError
from ....engine.whole_file import write_whole

# Largest size in bytes of a conversation file or text file that is read.
MOST_FILE_BYTES = 4 << 20


@dataclass(slots=True)
class ChatHistory:
    """Messages and request fields of a chat.

    Attributes:
        system: the system message; None without one.
        settings: request fields other than the messages, such as ``temperature``.
        turns: messages after the system message: alternating questions and answers.
        files: texts of files that are put before the next question.
    """

    system: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    turns: list[dict[str, str]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages, in the format of a request."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def body(self) -> dict[str, Any]:
        """Return the fields of a request for the next answer."""
        return {"messages": self.messages, **self.settings}

    def ask(self, text: str) -> None:
        """Append a question, preceded by the files that were read for it."""
        self.turns.append({"role": "user", "content": "\n\n".join([*self.files, text])})
        self.files = []

    def answer(self, text: str) -> None:
        """Append the answer to the last question."""
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> None:
        """Remove the last question, which has no answer."""
        self.turns.pop()

    def clear(self) -> None:
        """Remove all turns and files, but keep the system message and the settings."""
        self.turns, self.files = [], []

    def drop_oldest(self) -> bool:
        """Remove the oldest question and its answer. Returns False if the last question is the only one."""
        if len(self.turns) < 3:
            return False
        del self.turns[:2]
        return True

    def save(self, path: Path, model: str) -> None:
        """Write the conversation as JSON. Raises ConfigError."""
        content = {"model": model, "settings": self.settings, "messages": self.messages}
        try:
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            write_whole(path, text.encode("utf-8", "surrogateescape"))
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error

    def load(self, path: Path) -> None:
        """Replace messages and settings by those in a file from ``save``. Raises ConfigError."""
        try:
            content = json.loads(read_text(path))
            settings, messages = content.get("settings", {}), content["messages"]
            turns = [{"role": str(each["role"]), "content": str(each["content"])} for each in messages]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{path} is not a conversation written by /save.") from error
        has_system = bool(turns) and turns[0]["role"] == "system"
        system, turns = (turns[0]["content"], turns[1:]) if has_system else (None, turns)
        roles = [each["role"] for each in turns]
        if roles != ["user", "assistant"] * (len(roles) // 2) or not isinstance(settings, dict):
            raise ConfigError(f"{path}: questions and answers must alternate, after an optional system message.")
        self.system, self.settings, self.turns, self.files = system, settings, turns, []


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ConfigError if it cannot be read, is too long or is not UTF-8."""
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_FILE_BYTES + 1)
        if len(raw) > MOST_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MOST_FILE_BYTES >> 20} MiB.")
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a UTF-8 text file.") from error
