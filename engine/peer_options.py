"""Options of vLLM and SGLang: the corresponding options here, accepted values, and what to do instead of the others.

The tables are ``vllm_options.toml`` and ``sglang_options.toml``; the beginning of the first explains their fields. The
command line, the keywords of ``LLM`` and ``docs/reference/options.md`` are generated from them.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from .config import EngineConfig
from .errors import ConfigError

ENVIRONMENT = "Environment variables"
_NUMBER = re.compile(r"([+-]?\d+(?:\.\d+)?)([kmgtKMGT]?)")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PeerOption:
    """An option of another server.

    Attributes:
        name: long form without dashes; for an environment variable, its name.
        section: heading in the other server's help.
        ours: our option that it sets; empty if there is none.
        also: an option of ours that it switches on.
        values: the other server's values that have other names here.
        same: values that request what this engine does anyway; ``1..8`` is a range of numbers. With ``ours``: the
            values that are accepted where our option does not exist, as in ``LLM``.
        inert: why any value is accepted without effect; empty if some are refused.
        refuse: for a refused value, what the user can do instead.
        takes: flag, value or words (one or several values).
        short: other spellings, with their dashes.
        unit: bytes, if our option is in GiB.
    """

    name: str
    section: str
    ours: str = ""
    also: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    same: tuple[str, ...] = ()
    inert: str = ""
    refuse: str = ""
    takes: str = "value"
    short: tuple[str, ...] = ()
    unit: str = ""

    @property
    def status(self) -> str:
        """The status: done, accepted or refused."""
        if self.ours:
            return "done"
        return "accepted" if self.same or self.inert else "refused"

    def translate(self, value: Any, choices: tuple[Any, ...] = ()) -> Any:
        """Return a value for our option.

        Raises:
            ConfigError: the value is not among ``choices``; the message says what to do instead.
        """
        if isinstance(value, str):
            value = self.values.get(value, value)
        if choices and str(value) not in (*map(str, choices), "None"):
            wrong = f"must be one of {', '.join(map(str, choices))}, not {value}."
            raise ConfigError(" ".join(filter(None, (wrong, self.refuse))))
        return whole_number(str(value)) / _GIB if self.unit == "bytes" else value

    def note(self, value: str) -> str:
        """Return why a value has no effect; an empty string if it requests what this engine does anyway.

        Raises:
            ConfigError: the value is refused; the message says what to do instead.
        """
        is_off = self.takes == "flag" and value == "false" and "true" not in self.same
        if is_off or value in ("None", "null") or any(_matches(value, pattern) for pattern in self.same):
            return ""
        if not self.inert:
            raise ConfigError(self.refuse)
        return self.inert


@cache
def peer_options() -> Mapping[str, PeerOption]:
    """Return the options by name: vLLM's, and those of SGLang that vLLM does not have."""
    return {
        name: option
        for peer in ("sglang", "vllm")
        for name, option in read_options(peer).items()
        if option.section != ENVIRONMENT
    }


@cache
def environment() -> Mapping[str, PeerOption]:
    """Return the environment variables by name."""
    return {name: option for name, option in read_options("vllm").items() if option.section == ENVIRONMENT}


@cache
def read_options(peer: str) -> Mapping[str, PeerOption]:
    """Return the table of a peer by name, in its order."""
    text = Path(__file__).with_name(f"{peer}_options.toml").read_text("utf-8")
    sections = {title: rows for title, rows in tomllib.loads(text).items() if isinstance(rows, dict)}
    return {name: _option(name, section, row) for section, rows in sections.items() for name, row in rows.items()}


def _option(name: str, section: str, row: dict[str, Any]) -> PeerOption:
    row = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    if not row.keys() & {"ours", "same", "inert", "refuse"}:
        row["ours"] = name
    return PeerOption(name, section, **row)


def as_flag(name: str, value: str) -> str:
    """Return an option in the form of a command line, for messages."""
    return {"": f"--{name}", "true": f"--{name}", "false": f"--no-{name}"}.get(value, f"--{name} {value}")


def as_keyword(name: str, value: str) -> str:
    """Return an option in the form of a Python keyword, for messages."""
    return name.replace("-", "_") + (f"={value}" if value else "")


def take(option: PeerOption, value: Any, shown: Callable[[str, str], str] = as_flag) -> list[str]:
    """Check a value of an option that sets none of ours. Return a sentence for each part that has no effect.

    Args:
        value: a text, bool or number; a JSON object or its text if the table has rows ``name.key``.
        shown: how a message names the option.

    Raises:
        ConfigError: the value is refused; the message says what to do instead.
    """
    inner = {name: row for name, row in peer_options().items() if name.startswith(f"{option.name}.")}
    parts = {option.name: value}
    if inner:
        given = _object(value)
        if given is None:
            raise ConfigError(f"{shown(option.name, _text(value))}: must be a JSON object.")
        parts = {f"{option.name}.{key}": part for key, part in given.items()}
    notes = []
    for name, part in parts.items():
        row = (inner or {name: option}).get(name)
        if row is None:
            raise ConfigError(f"{shown(name, _text(part))}: unknown key.{nearest(name, inner)}")
        try:
            note = row.note(_text(part))
        except ConfigError as error:
            # A value that is never accepted may be a secret, so the message does not quote it.
            raise ConfigError(f"{shown(name, _text(part) if row.same else '')}: {error}") from error
        notes += [f"{shown(name, _text(part))} has no effect: {note}"] if note else []
    return notes


def engine_keywords(keywords: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Translate keywords of vLLM's ``LLM`` to those of ``EngineConfig``.

    Returns:
        Our options that are set, and a sentence for each keyword that has no effect.

    Raises:
        ConfigError: a keyword does not exist or is refused.
    """
    ours = {spec.name: spec for spec in fields(EngineConfig)}
    rows = {name.replace("-", "_"): row for name, row in peer_options().items()}
    given: dict[str, Any] = {}
    notes: list[str] = []
    for keyword, value in keywords.items():
        row = rows.get(keyword, PeerOption(keyword, "", ours=keyword))
        name = row.ours.replace("-", "_")
        if not row.ours or (name not in ours and row.same):
            notes += take(row, value, as_keyword)
        elif name not in ours:
            raise ConfigError(f"There is no option {keyword!r}.{nearest(keyword, ours)}")
        elif value is not None:
            try:
                given[name] = row.translate(_plain(value), ours[name].metadata["choices"])
            except ConfigError as error:
                raise ConfigError(f"{keyword} {error}") from error
    return complete(given), notes


def engine_option_names() -> list[str]:
    """Return the keywords that ``engine_keywords`` accepts: options of ``EngineConfig``, and vLLM's."""
    return sorted({spec.name for spec in fields(EngineConfig)} | {name.replace("-", "_") for name in peer_options()})


def complete(given: dict[str, Any]) -> dict[str, Any]:
    """Remove values that equal the default behaviour: the model's own tokenizer."""
    if given.get("tokenizer") is not None and given["tokenizer"] == given.get("model"):
        del given["tokenizer"]
    return given


def whole_number(text: str) -> int:
    """Parse a whole number as vLLM does: 1k is 1000, 25.6k is 25600, 1K is 1024. Raises ConfigError."""
    if found := _NUMBER.fullmatch(text.strip()):
        base = 1024 if found[2].isupper() else 1000
        number = Decimal(found[1]) * base ** (" kmgt".index(found[2].lower() or " "))
        if number == int(number):
            return int(number)
    raise ConfigError(f"must be a whole number such as 4096, 4k (4000) or 4K (4096), not {text}.")


# Options and commands of llama.cpp and Ollama, and ours with the same meaning.
_OTHERS = {
    "--ctx-size": "--max-model-len",
    "--parallel": "--max-num-seqs",
    "--batch-size": "--max-num-batched-tokens",
    "--alias": "--served-model-name",
    "--threads-batch": "--threads",
    "--lora": "--lora-modules",
    "--cache-type-k": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
    "--model-draft": "--speculative-config",
    "--chat-template-file": "--chat-template",
    "--n-predict": "--max-tokens",
    "show": "doctor",
    "ls": "list",
    "delete": "rm",
    "download": "pull",
}


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest a known word of the same meaning elsewhere, or similar to ``word``, as a question; "" if none."""
    known = list(known)
    if (ours := _OTHERS.get(word)) in known:
        return f" Did you mean {ours}?"
    found = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {found[0]}?" if found else ""


def _matches(value: str, pattern: str) -> bool:
    low, dots, high = pattern.partition("..")
    if not dots:
        return value.lower() == pattern.lower()
    try:
        return float(low) <= float(value) <= float(high)
    except ValueError:
        return False


def _object(value: Any) -> dict[str, Any] | None:
    """Return a JSON object, given as an object or as text; None if the value is not one."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _text(value: Any) -> str:
    """Return a value in the form of a command line."""
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str) if isinstance(value, bool | dict | list | tuple) else str(value)


def _plain(value: Any) -> Any:
    """Return a keyword's value in the type of our options: JSON for a dict, a tuple for a list, a name for a dtype."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, list):
        return tuple(value)
    return value if isinstance(value, bool | int | float | str | tuple) else str(value).removeprefix("torch.")
