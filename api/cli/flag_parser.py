"""Flag parser: command lines from dataclasses; each field made with ``engine.config.option`` is one flag."""

from __future__ import annotations

import argparse
import difflib
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, Field, fields
from types import UnionType
from typing import Any

from ...engine.errors import ConfigError


def parse(prog: str, about: str, classes: Sequence[type[Any]], positional: str, argv: Sequence[str]) -> list[Any]:
    """Parse ``argv`` into one instance of each class. ``--help`` prints the help and raises ``SystemExit``.

    Args:
        prog: the command, for help and messages.
        about: a sentence for the help.
        classes: dataclasses of options with distinct field names.
        positional: a field that may also be given without its flag, or an empty string.
        argv: the words after the command.

    Raises:
        ConfigError: an option is unknown, malformed, out of its bounds or contradicts another.
    """
    given = _given(_parser(prog, about, classes, positional), positional, argv)
    return [cls(**{spec.name: given[spec.name] for spec in fields(cls) if spec.name in given}) for cls in classes]


def closest(word: str, known: Sequence[str]) -> str:
    """Suggest a known word similar to ``word``, as a question; an empty string if there is none."""
    found = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {found[0]}?" if found else ""


def _parser(prog: str, about: str, classes: Sequence[type[Any]], positional: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog, description=about, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    if positional:
        parser.add_argument(
            _bare(positional), nargs="?", metavar=positional.upper(), help=f"The same as --{positional}."
        )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for spec, kind in _specs(classes):
        title = spec.metadata["group"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add(groups[title], spec, kind)
    return parser


def _bare(positional: str) -> str:
    """Name of the positional argument in the namespace; its own, to detect that both are given."""
    return positional + " without flag"


def _specs(classes: Sequence[type[Any]]) -> Iterator[tuple[Field[Any], Any]]:
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for spec in fields(cls):
            yield spec, hints[spec.name]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _add(group: argparse._ArgumentGroup, spec: Field[Any], kind: Any) -> None:
    text = _help(spec)
    if kind is bool:
        group.add_argument(_flag(spec.name), action=argparse.BooleanOptionalAction, help=text)
        return
    many = typing.get_origin(kind) is tuple
    if isinstance(kind, UnionType) or many:
        kind = next(arg for arg in typing.get_args(kind) if arg not in (type(None), ...))
    group.add_argument(
        *filter(None, (spec.metadata["short"], _flag(spec.name))),
        type=kind,
        action="extend" if many else "store",
        nargs="+" if spec.metadata["words"] else 1 if many else None,
        choices=spec.metadata["choices"] or None,
        metavar=None if spec.metadata["choices"] else {int: "N", float: "X"}.get(kind, "TEXT"),
        help=text,
    )


def _help(spec: Field[Any]) -> str:
    text: str = spec.metadata["help"]
    if spec.default is not None and spec.default is not MISSING and spec.default != ():
        default = {True: "on", False: "off"}[spec.default] if isinstance(spec.default, bool) else spec.default
        text += f" (default: {default})"
    return text.replace("%", "%%")


def _given(parser: argparse.ArgumentParser, positional: str, argv: Sequence[str]) -> dict[str, Any]:
    """Return the given options by field name."""
    try:
        namespace, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}.") from error
    if rest:
        raise ConfigError(_unknown(rest[0], parser))
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(namespace).items()}
    if positional and (bare := given.pop(_bare(positional), None)) is not None:
        if given.get(positional, bare) != bare:
            raise ConfigError(f"{bare} and {_flag(positional)} {given[positional]} contradict each other.")
        given[positional] = bare
    return given


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}."
    name = word.partition("=")[0]
    known = [flag for action in parser._actions for flag in action.option_strings]
    return f"unknown option {name}.{closest(name, known)}"
