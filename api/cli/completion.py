"""``rootgraft completion``: prints a shell's completion script, which shtab generates from the commands' parsers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import shtab

from .commands import COMMANDS
from .flag_parser import command_parser
from .machine.machine_options import CompletionOptions

PROG = "rootgraft"
# Suffix of the destination of an option that is given without its flag.
WITHOUT_FLAG = " without flag"
_GROUPS = {
    "bench": "Benchmark a server or an engine step.",
    "models": "Manage the versions of a server's models.",
    "fleet": "Show the replicas of a server.",
    "key": "Manage the API keys in a key file.",
    "cache": "List, remove, export or import cached KV.",
}
# Options whose values are files, and options whose values are folders.
_FILES = {
    *("config", "chat-template", "api-key-file", "ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "usage-ledger", "uds"),
    *("data", "question", "dataset", "output-json", "input-file", "output-file", "prices"),
}
_FOLDERS = {"calibration-dir", "tokenizer", "lora-dir", "batch-dir"}


def print_completion(options: CompletionOptions) -> int:
    """Print the script for a shell. Returns 0."""
    parsers = {
        name: (command.about, command_parser(f"{PROG} {name}", command.about, command.classes, command.positional))
        for name, command in COMMANDS.items()
    }
    print(shtab.complete(_whole_parser(parsers), shell=options.shell))
    return 0


def _whole_parser(commands: Mapping[str, tuple[str, argparse.ArgumentParser]]) -> argparse.ArgumentParser:
    """Return one parser with all commands as subcommands."""
    whole = argparse.ArgumentParser(prog=PROG, description="LLM server.", add_help=False)
    whole.add_argument("--help", action="help", help="Show the commands.")
    whole.add_argument("--version", action="version", version=PROG, help="Show the version.")
    below = {"": whole.add_subparsers()}
    for name, (about, parser) in commands.items():
        group, _, own = name.rpartition(" ")
        if group not in below:
            below[group] = below[""].add_parser(group, help=_GROUPS[group], add_help=False).add_subparsers()
        _add_completers(parser)
        below[group].add_parser(own, help=about, add_help=False, parents=[parser])
    return whole


def _add_completers(parser: argparse.ArgumentParser) -> None:
    """Mark the options for files and folders for completion, and list the values of options with choices."""
    choices = {
        action.dest: action.metavar.strip("{}").split(",")
        for action in parser._actions
        if isinstance(action.metavar, str) and action.metavar.startswith("{")
    }
    for action in parser._actions:
        flags = {flag.lstrip("-") for flag in action.option_strings}
        if flags & _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif flags & _FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif found := choices.get(action.dest.removesuffix(WITHOUT_FLAG)):
            action.choices, action.type = found, None
