"""Collect how models are served in public documentation, and measure how many of the command lines start here.

python tests/support/cli/command_lines.py REPOSITORY... > tests/scenarios/cli/option_use.tsv

A repository is a git folder; of its newest commit the commands ``vllm serve`` and ``sglang.launch_server`` are read.
What is printed are counts: peer, option, value, in how many different commands, where it was seen. Names of models,
folders and keys are left out. The share of whole commands that start goes to standard error.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rootgraft.api.cli.flag_parser import parse
from rootgraft.api.config import ServerConfig
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError

LAUNCHERS = (
    ("vllm", re.compile(r"\bvllm serve(?=\s)")),
    ("vllm", re.compile(r"\bpython3? -m vllm\.entrypoints\.openai\.api_server(?=\s)")),
    ("sglang", re.compile(r"\b(?:python3? -m )?sglang(?:\.launch_server| serve)(?=\s)")),
)
SUFFIXES = ("*.md", "*.mdx", "*.rst", "*.sh", "*.yaml", "*.yml")
# Patterns of commands, commands that a shell completes, those of servers of images and speech, and of load tests.
LEFT_OUT = re.compile(
    r"\.\.\.|[<>\[$…]|MODEL_NAME|--(?:omni|num-gpus|ring-degree|lora-path|dllm-algorithm|dataset-name) "
)
# Options whose values name something of the writer's own.
NAMES = {
    "--model": "m",
    "--model-path": "m",
    "--tokenizer": "m",
    "--tokenizer-path": "m",
    "--served-model-name": "a",
    "--api-key": "a",
    "--chat-template": "a",
    "--download-dir": "a",
    "--lora-modules": "a=b",
    "--lora-paths": "a=b",
    "--speculative-draft-model-path": "m",
}


@dataclass(frozen=True)
class Line:
    """A command: the peer, its options as (name, values), and where it was found."""

    peer: str
    options: tuple[tuple[str, tuple[str, ...]], ...]
    place: str

    @property
    def words(self) -> list[str]:
        named = any(name in ("--model", "--model-path") for name, _ in self.options)
        return [*([] if named else ["m"]), *(word for name, values in self.options for word in (name, *values))]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a page: the peer, and the words after the launcher."""
    for line in re.sub(r"\\\s*\n\s*", " ", text).splitlines():
        for peer, launcher in LAUNCHERS:
            found = launcher.search(line)
            if found is None:
                continue
            words = re.split(r"\s(?:&&|\||2?>|#|&)|[;`]|\\n", line[found.end() :])[0]
            if words.count("'") % 2 == words.count('"') % 2 == 0 and not LEFT_OUT.search(words):
                yield peer, shlex.split(words)
            break


def options_of(words: list[str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The options among the words of a command, by name, each with its values."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("-") and not re.fullmatch(r"-\d+", word):
            name, equals, value = word.partition("=")
            groups.append([name.replace("_", "-") if "." not in name else name, *([value] if equals else [])])
        elif groups:
            groups[-1].append(word)
    return tuple(sorted((name, (NAMES[name],) if name in NAMES else tuple(values)) for name, *values in groups))


def collect(repository: Path) -> Iterator[Line]:
    """Each command of a repository's newest commit."""

    def git(*words: str) -> str:
        run = ["git", "-C", str(repository), *words]
        return subprocess.run(run, capture_output=True, text=True, errors="replace", check=False).stdout

    commit = git("log", "-1", "--format=%h").strip()
    name = (repository.parent.name if repository.name == "repo" else repository.name).replace("+", "/")
    launchers = "vllm serve|openai.api_server|sglang.launch_server|sglang serve"
    for path in git("grep", "-lIE", launchers, "HEAD", "--", *SUFFIXES).splitlines():
        for peer, words in commands(git("show", path)):
            yield Line(peer, options_of(words), f"{name}@{commit} {path.removeprefix('HEAD:')}")


def outcome(words: list[str]) -> str:
    """What becomes of a command: starts, refused or unknown."""
    try:
        parse("serve", "", (EngineConfig, ServerConfig), "model", words)
    except ConfigError as error:
        return "unknown" if str(error).startswith("un") else "refused"
    return "starts"


def main(repositories: list[str]) -> None:
    """Print how often each option is used, and the outcomes of whole commands."""
    lines = {(line.peer, line.options): line for folder in repositories for line in collect(Path(folder))}.values()
    uses = Counter((line.peer, name, " ".join(values)) for line in lines for name, values in line.options)
    places = {(line.peer, name, " ".join(values)): line.place for line in lines for name, values in line.options}
    for use, count in sorted(uses.items()):
        print("\t".join((*use, str(count), places[use])))
    for peer in ("vllm", "sglang"):
        outcomes = Counter(outcome(line.words) for line in lines if line.peer == peer)
        print(peer, sum(outcomes.values()), "commands:", dict(outcomes), file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
