"""Flag parser: parses command lines to dataclasses. Each field made with ``engine.config.option`` is one flag.

A command that starts an engine also takes the options of vLLM and SGLang (``engine.peer_options``), a YAML file of
options (``--config``) and vLLM's environment variables. The command line takes precedence over the file, and the file
over the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from itertools import pairwise
from types import UnionType
from typing import Any

from ...engine.config import EngineConfig
from ...engine.errors import ConfigError
from ...engine.peer_options import PeerOption, complete, environment, nearest, peer_options, take, whole_number
from ..models_file import MODEL_OPTIONS, OWN_OPTIONS, ModelEntry, ModelsFile, models_file_of
from .option_words import options_of_file, plain_words, words_of

# Names in the namespace that are not fields: the YAML file, and options of vLLM and SGLang without an equivalent here.
_CONFIG = "config file"
_PEER = "peer "

# Options that accept several words, none of which can be a model's name.
_NO_MODELS = ("lora-modules", "adapter-sources")

_SHORT_HELP = 170  # characters: two or three lines
_EPILOG = "Options of vLLM and SGLang also work, or an error says what to use instead: see docs/reference/options.md."


def parse(
    prog: str,
    about: str,
    classes: Sequence[type[Any]],
    positional: str,
    argv: Sequence[str],
    note: Callable[[str], None] = lambda sentence: None,
) -> list[Any]:
    """Parse ``argv`` into one instance of each class. ``--help`` prints the help and raises ``SystemExit``.

    Args:
        prog: the command, for help and messages.
        about: a sentence for the help.
        classes: dataclasses of options with distinct field names.
        positional: a field that may also be given without its flag, or an empty string.
        argv: the words after the command.
        note: called with a sentence for each option that is accepted without effect.

    Raises:
        ConfigError: an option is unknown, malformed, refused, out of its bounds or contradicts another.
    """
    command = _Command(prog, about, classes, positional)
    given = command.read(argv, note)
    content = options_of_file(given[_CONFIG]) if _CONFIG in given else {}
    if "models" in content:
        raise ConfigError(f"--config {given[_CONFIG]}: only rootgraft serve accepts a file with several models.")
    return command.options(command.with_file(given, content, note), argv)


def parse_models(
    prog: str,
    about: str,
    classes: Sequence[type[Any]],
    positional: str,
    argv: Sequence[str],
    note: Callable[[str], None] = lambda sentence: None,
) -> list[tuple[ModelEntry, list[Any]]]:
    """Parse ``argv`` into the instances of one model, or of each model in a models file. Arguments as in ``parse``.

    The command line takes precedence over a model's own options, and those over the options above ``models``.

    Raises:
        ConfigError: as for ``parse``, or a model has an option that applies to the whole server.
    """
    command = _Command(prog, about, classes, positional)
    given = command.read(argv, note)
    content = options_of_file(given[_CONFIG]) if _CONFIG in given else {}
    fleet = models_file_of(given.get(_CONFIG, ""), content)
    if fleet is None:
        return [(ModelEntry(), command.options(command.with_file(given, content, note), argv))]
    return command.models(given, fleet, note)


def command_parser(prog: str, about: str, classes: Sequence[type[Any]], positional: str) -> argparse.ArgumentParser:
    """Return the argparse parser of a command, for shell completion; the arguments are those of ``parse``."""
    return _Command(prog, about, classes, positional).parser


def short_help(prog: str, about: str, classes: Sequence[type[Any]], positional: str, common: Collection[str]) -> str:
    """Return a help text with the options in ``common``, by field name; the other arguments are those of ``parse``."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=_usage(prog, positional),
        description=about,
        epilog=f"'{prog} --help-all' lists all options. {_EPILOG}",
        add_help=False,
    )
    options = parser.add_argument_group("common options")
    for spec, kind in _specs(classes):
        if spec.name in common:
            _add(options, spec, kind, PeerOption(spec.name.replace("_", "-"), ""), _help(spec, _SHORT_HELP))
    return parser.format_help().rstrip()


def _usage(prog: str, positional: str) -> str:
    return " ".join(filter(None, (prog, f"[{positional.upper()}]" if positional else "", "[options]")))


class _Command:
    """The argument parser of one command.

    Attributes:
        specs: fields and their types, by flag without dashes.
        peers: options of vLLM and SGLang by name, if the command accepts them.
        parser: argparse's parser of all of them.
    """

    def __init__(self, prog: str, about: str, classes: Sequence[type[Any]], positional: str) -> None:
        self._positional = positional
        self._classes = classes
        self.specs = {spec.name.replace("_", "-"): (spec, kind) for spec, kind in _specs(classes)}
        self.peers = peer_options() if EngineConfig in classes else {}
        self.parser = argparse.ArgumentParser(
            prog=prog,
            usage=_usage(prog, positional),
            description=about,
            epilog=_EPILOG if self.peers else None,
            allow_abbrev=False,
            exit_on_error=False,
            argument_default=argparse.SUPPRESS,
        )
        if positional:
            self.parser.add_argument(
                _bare(positional), nargs="?", metavar=positional.upper(), help=f"The same as {_flag(positional)}."
            )
        self._add_ours()
        self._add_peers()

    def _add_ours(self) -> None:
        groups: dict[str, argparse._ArgumentGroup] = {}
        for name, (spec, kind) in self.specs.items():
            title = spec.metadata["group"]
            if title not in groups:
                groups[title] = self.parser.add_argument_group(title)
            _add(groups[title], spec, kind, self.peers.get(name, PeerOption(name, "", ours=name)), _help(spec))

    def _add_peers(self) -> None:
        if self.peers:
            self.parser.add_argument("--config", dest=_CONFIG, metavar="FILE", help="YAML file of options.")
        for name, option in self.peers.items():
            if name in self.specs or "." in name:
                continue
            if option.ours in self.specs:
                _add(self.parser, *self.specs[option.ours], option, argparse.SUPPRESS)
            elif not option.ours or option.same:
                _add_peer(self.parser, option)

    def read(self, argv: Sequence[str], note: Callable[[str], None]) -> dict[str, Any]:
        """Return the options given by ``argv``, by field name."""
        given = self._parsed(plain_words(argv, *self._spellings()))
        for name in [name for name in given if name.startswith(_PEER)]:
            value = given.pop(name)
            value = " ".join(value) if isinstance(value, tuple) else value
            for sentence in take(self.peers[name.removeprefix(_PEER)], value):
                note(sentence)
        if self._positional and (bare := given.pop(_bare(self._positional), None)) is not None:
            if given.get(self._positional, bare) != bare:
                flag = f"{_flag(self._positional)} {given[self._positional]}"
                raise ConfigError(f"{bare} and {flag} contradict each other.")
            given[self._positional] = bare
        return given

    def with_file(
        self, given: dict[str, Any], content: Mapping[str, Any], note: Callable[[str], None]
    ) -> dict[str, Any]:
        """Return options supplemented by those of a file, which have lower precedence."""
        if (file := given.pop(_CONFIG, None)) is None:
            return given
        with _named(f"--config {file}"):
            given = self.read(words_of(content), note) | given
        if _CONFIG in given:
            raise ConfigError(f"--config {file}: the file must not contain the option 'config'.")
        return given

    def options(self, given: dict[str, Any], argv: Sequence[str] | None) -> list[Any]:
        """Return an instance of each class.

        ``argv`` is searched for a model's name that an option may have consumed.
        """
        if argv is not None and self._positional and self._positional not in given:
            self.check_words(argv)
        if self.peers:
            given = complete(self.environment() | given)
        return [
            cls(**{spec.name: given[spec.name] for spec in fields(cls) if spec.name in given}) for cls in self._classes
        ]

    def models(
        self, given: dict[str, Any], fleet: ModelsFile, note: Callable[[str], None]
    ) -> list[tuple[ModelEntry, list[Any]]]:
        """Return each model of a models file with its instances of the options' classes."""
        file = given[_CONFIG]
        common = self.with_file({_CONFIG: file}, fleet.common, note)
        for source, options in (("", given), (f"--config {file}: ", common)):
            if own := sorted(OWN_OPTIONS & options.keys()):
                raise ConfigError(
                    f"{source}{_flag(own[0])} belongs to a single model: move it into an entry of 'models'."
                )
        del given[_CONFIG]
        engine = {spec.name for spec in fields(EngineConfig)}
        made = []
        for entry in fleet.models:
            with _named(entry.place):
                options = self.read(words_of(entry.options or {}), note)
                if _CONFIG in options:
                    raise ConfigError("--config belongs to the whole server: remove it from the entry of 'models'.")
                if foreign := sorted(options.keys() - engine - MODEL_OPTIONS):
                    raise ConfigError(
                        f"{_flag(foreign[0])} belongs to the whole server: move it out of 'models' to the top level."
                    )
                made.append((entry, self.options(common | options | given, None)))
        return made

    def environment(self) -> dict[str, Any]:
        """Return the options given by environment variables, by field name."""
        given: dict[str, Any] = {}
        for name, option in environment().items():
            if value := os.environ.get(name):
                with _named(f"{name}={value}"):
                    if option.ours in self.specs:
                        given |= self._parsed([self._word(option, value)])
                    elif not option.ours:
                        option.note(value)
        return given

    def _word(self, option: PeerOption, value: str) -> str:
        """Return the command-line word that is equivalent to an environment variable."""
        if self.specs[option.ours][1] is not bool:
            return f"--{option.ours}={option.translate(value)}"
        is_on = option.translate(value, ("true", "false")) == "true"
        return f"--{'' if is_on else 'no-'}{option.ours}"

    def _parsed(self, words: Sequence[str]) -> dict[str, Any]:
        try:
            namespace, rest = self.parser.parse_known_args(words)
        except argparse.ArgumentError as error:
            raise ConfigError(f"{error.argument_name}: {error.message.rstrip('.')}.") from error
        if rest:
            raise ConfigError(self._unknown(rest[0]))
        return {name: tuple(value) if isinstance(value, list) else value for name, value in vars(namespace).items()}

    def _spellings(self) -> tuple[Mapping[str, str], frozenset[str]]:
        """Return the long forms of options by their short forms, and the names of options without a value."""
        shorts = {short: f"--{option.name}" for option in self.peers.values() for short in option.short}
        flags = [name for name, (_, kind) in self.specs.items() if kind is bool]
        flags += [name for name, option in self.peers.items() if option.takes == "flag"]
        return shorts, frozenset(f"--{name}" for name in flags)

    def check_words(self, argv: Sequence[str]) -> None:
        """Refuse a command line without a model if an option of several words may have consumed its name."""
        several = [name for name, (spec, _) in self.specs.items() if spec.metadata["words"] and name not in _NO_MODELS]
        words = plain_words(argv, *self._spellings())
        ends = [at for at, word in enumerate(words) if word.startswith("-")] + [len(words)]
        for at, end in pairwise(ends):
            if words[at][2:] in several and end - at > 2:
                raise ConfigError(
                    f"{words[at]} takes {', '.join(words[at + 1 : end])} as its values: if one of them is the "
                    f"{self._positional}, put it first or give it with {_flag(self._positional)}."
                )

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"unexpected argument {word!r}."
        name = word.partition("=")[0]
        ours = [f"--{flag}" for flag in self.specs]
        return f"unknown option {name}.{nearest(name, ours) or nearest(name, (f'--{peer}' for peer in self.peers))}"


class _Gather(argparse.Action):
    """Append values to the values given before. A JSON list counts as its items."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest, None) or []
        flat = [item for value in values for item in (value if isinstance(value, list) else [value])]
        setattr(namespace, self.dest, [*before, *flat])
        if self.const is not None:
            setattr(namespace, self.const, True)


def _add(group: argparse._ActionsContainer, spec: Field[Any], kind: Any, option: PeerOption, text: str) -> None:
    """Add an option of this server, or another spelling of the option."""
    flag = f"--{option.name}"
    if kind is bool:
        _add_switch(group, flag, spec.name, text, option.values.get("true", "true") == "false")
        return
    many = typing.get_origin(kind) is tuple
    optional = isinstance(kind, UnionType)
    if optional or many:
        kind = next(arg for arg in typing.get_args(kind) if arg not in (type(None), ...))
    choices = spec.metadata["choices"]
    metavar = f"{{{','.join(map(str, choices))}}}" if choices else {int: "N", float: "X"}.get(kind, "TEXT")
    several: dict[str, Any] = {"nargs": "+" if spec.metadata["words"] else 1, "action": _Gather}
    several["const"] = option.also.replace("-", "_") or None
    group.add_argument(
        *filter(None, (spec.metadata["short"] if text != argparse.SUPPRESS else "", flag)),
        dest=spec.name,
        type=_converter(kind, option, choices, many=many, optional=optional),
        metavar=metavar,
        help=text,
        **(several if many else {}),
    )


def _add_switch(group: argparse._ActionsContainer, flag: str, dest: str, text: str, is_inverted: bool) -> None:
    if not is_inverted:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, dest=dest, help=text)
        return
    group.add_argument(flag, action="store_false", dest=dest, help=text)
    group.add_argument(flag.replace("--", "--no-", 1), action="store_true", dest=dest, help=text)


def _add_peer(parser: argparse.ArgumentParser, option: PeerOption) -> None:
    """Add an option of vLLM or SGLang that has no equivalent here."""
    dest = _PEER + option.name
    if option.takes == "flag":
        parser.add_argument(
            f"--{option.name}", action=argparse.BooleanOptionalAction, dest=dest, help=argparse.SUPPRESS
        )
    else:
        parser.add_argument(
            f"--{option.name}", nargs="+" if option.takes == "words" else None, dest=dest, help=argparse.SUPPRESS
        )


def _converter(
    kind: Callable[[Any], Any], option: PeerOption, choices: tuple[Any, ...], *, many: bool, optional: bool
) -> Callable[[str], Any]:
    """Return the function that converts a word to a value of the field."""

    def convert(text: str) -> Any:
        try:
            if many and text.startswith("["):
                return [kind(each) for each in json.loads(text)]
            value = option.translate(text, choices)
            if value == "None" and optional:
                return None
            return whole_number(value) if kind is int else kind(value)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be a number, not {text}") from error

    return convert


@contextmanager
def _named(source: str) -> Iterator[None]:
    """Context manager: put the source of an option before the message of an error raised in the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _bare(positional: str) -> str:
    """Return the positional argument's name in the namespace.

    It differs from the flag's, to detect that both are given.
    """
    return positional + " without flag"


def _specs(classes: Sequence[type[Any]]) -> Iterator[tuple[Field[Any], Any]]:
    for cls in classes:
        hints = typing.get_type_hints(cls)
        for spec in fields(cls):
            yield spec, hints[spec.name]


def _help(spec: Field[Any], most: int | None = None) -> str:
    """Return an option's help with its default. Help of more than ``most`` characters is cut after a sentence."""
    text: str = spec.metadata["help"]
    if most is not None and len(text) > most and (end := text.rfind(". ", 0, most)) > 0:
        text = text[: end + 1]
    if spec.default is not MISSING and spec.default not in (None, "", ()):
        default = {True: "on", False: "off"}[spec.default] if isinstance(spec.default, bool) else spec.default
        text += f" (default: {' '.join(default) if isinstance(default, tuple) else default})"
    return text.replace("%", "%%")
