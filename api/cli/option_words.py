"""Option words: convert options from the command line and YAML files to our spelling, also those of other servers.

``--max_model_len 4k``, ``-tp 1``, ``--enable-lora=true`` and ``--speculative-config.method off`` become
``--max-model-len 4k``, ``--tensor-parallel-size 1``, ``--enable-lora`` and ``--speculative-config={"method": "off"}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...engine.errors import ConfigError

_DOTTED = re.compile(r"(--[\w-]+)\.([\w.-]+)(\+?)")
_SWITCH = {"true": "--", "false": "--no-"}


def plain_words(words: Sequence[str], shorts: Mapping[str, str], flags: frozenset[str]) -> list[str]:
    """Return command-line words with options in their long form, and dotted keys collected into JSON objects.

    Args:
        words: the words after the command.
        shorts: long forms, with dashes, by short forms such as ``-tp``.
        flags: options without a value, with their dashes. ``--flag=true`` and ``--flag true`` mean ``--flag``, and with
            ``false`` they mean ``--no-flag``.

    Raises:
        ConfigError: a dotted key has no value, or contradicts another key or the whole option.
    """
    plain: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = list(words)
    while rest:
        name, equals, value = _split(rest.pop(0), shorts)
        following = rest[0] if rest and not equals and not rest[0].startswith("--") else None
        if dotted := _DOTTED.fullmatch(name):
            if not equals and following is None:
                raise ConfigError(f"{name}: expected one argument.")
            _put(objects.setdefault(dotted[1], {}), dotted, value if equals else rest.pop(0))
        elif name in flags and (switch := _SWITCH.get((value if equals else following or "").lower())):
            plain.append(switch + name.removeprefix("--"))
            del rest[: 0 if equals else 1]
        else:
            plain.append(name + equals + value)
    if both := objects.keys() & {word.partition("=")[0] for word in plain}:
        raise ConfigError(f"{min(both)} is given both as a JSON object and key by key: use one of the two.")
    return [*plain, *(f"{name}={json.dumps(given)}" for name, given in objects.items())]


def options_of_file(name: str) -> dict[str, Any]:
    """Return the content of a YAML file whose keys are long option names.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping.
    """
    import yaml

    try:
        given = yaml.safe_load(Path(name).expanduser().read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"--config: {name} cannot be read: {error.strerror}.") from error
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config: {name} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(given, dict):
        raise ConfigError(f"--config: {name} must contain options, one per line, such as 'port: 8000'.")
    return {str(key): value for key, value in given.items()}


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Return the command-line words for options given by their long names."""
    return [word for key, value in options.items() for word in _words_of(key, value)]


def _split(word: str, shorts: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the option, the equals sign and the attached value. A word that is not an option is returned alone."""
    option, equals, value = word.partition("=")
    name, dot, keys = option.partition(".")
    if name in shorts:
        return shorts[name] + dot + keys, equals, value
    # The value may follow without a space, as in ``-O3``.
    if word.startswith("-O") and "-O" in shorts:
        return shorts["-O"], "=", word[2:]
    if not word.startswith("--"):
        return word, "", ""
    return name.replace("_", "-") + dot + keys, equals, value


def _put(target: dict[str, Any], dotted: re.Match[str], text: str) -> None:
    """Set the value of a dotted key in a JSON object, or append to the value if the key ends with ``+``."""
    *outer, last = dotted[2].split(".")
    for key in outer:
        target = target.setdefault(key, {})
        if not isinstance(target, dict):
            raise ConfigError(f"{dotted[0]}: {key} already has a value that is not an object.")
    value = _parsed(text)
    if dotted[3]:
        values = target.setdefault(last, [])
        values += [_parsed(part) for part in text.split(",")]
    elif target.setdefault(last, value) != value:
        raise ConfigError(f"{dotted[0]} is given twice.")


def _parsed(text: str) -> Any:
    """Return the value of a text if it is JSON, or else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _words_of(key: str, value: Any) -> Iterator[str]:
    """Yield the words of one entry. A list gives several values of one option."""
    flag = f"--{key.lstrip('-')}"
    if isinstance(value, bool):
        yield flag if value else f"--no-{key.lstrip('-')}"
    elif isinstance(value, list):
        yield from (f"{flag}={_text(each)}" for each in value)
    elif value is not None:
        yield f"{flag}={_text(value)}"


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)
