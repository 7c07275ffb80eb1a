"""Rules of a context-free grammar that derive no finite text: an answer that reaches one could never end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from .errors import GrammarError


@dataclass(frozen=True, slots=True)
class RuleRef:
    """A rule, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class AllOf:
    """Parts one after the other; without parts any text that ends, whichever."""

    parts: tuple[RulePart, ...] = ()


@dataclass(frozen=True, slots=True)
class OneOf:
    """Alternatives; without any no text at all."""

    parts: tuple[RulePart, ...] = ()


@dataclass(frozen=True, slots=True)
class Terminal:
    """A terminal as the grammar has it, which derives some text."""

    text: str


RulePart: TypeAlias = RuleRef | AllOf | OneOf | Terminal
TEXT = AllOf()


def optional(part: RulePart) -> RulePart:
    """Return the part, or no text in its place."""
    return OneOf((TEXT, part))


def check_ends(kind: str, rules: Mapping[str, RulePart], root: str, own: frozenset[str]) -> None:
    """Raise GrammarError for a rule that the root reaches and that derives no finite text.

    Args:
        kind: kind of the grammar, as in errors.
        rules: all rules by name.
        own: names that the grammar's author wrote, which errors prefer.
    """
    if names := _endless(rules, root):
        name = next((each for each in reversed(names) if each in own), names[-1])
        raise GrammarError(
            kind,
            "",
            f"the rule {name!r} derives no finite text, so an answer that reaches it could never end: give it an "
            "alternative that can end without the rule",
        )


def _endless(rules: Mapping[str, RulePart], root: str) -> list[str]:
    """Return rules without a finite text that the root comes to, each going on with the next; [] for none."""
    used = {name: list(dict.fromkeys(_refs(part))) for name, part in rules.items()}
    reached = {root: None}
    waiting = [root]
    for name in waiting:
        new = [each for each in used[name] if each not in reached]
        reached |= dict.fromkeys(new)
        waiting += new
    finite = _finite(rules, used)
    path: dict[str, None] = {}
    at = next((name for name in reached if name not in finite), None)
    while at is not None:
        path[at] = None
        at = next((name for name in used[at] if name not in finite and name not in path), None)
    return list(path)


def _finite(rules: Mapping[str, RulePart], used: Mapping[str, list[str]]) -> set[str]:
    """Return the rules that derive a finite text."""
    users: dict[str, list[str]] = defaultdict(list)
    for name, refs in used.items():
        for ref in refs:
            users[ref].append(name)
    finite: set[str] = set()
    waiting = list(rules)
    while waiting:
        name = waiting.pop()
        if name not in finite and _derives(rules[name], finite):
            finite.add(name)
            waiting += users[name]
    return finite


def _derives(part: RulePart, finite: set[str]) -> bool:
    """Return whether a part derives a text in which no rule but the finite ones is used."""
    if isinstance(part, RuleRef | Terminal):
        return isinstance(part, Terminal) or part.name in finite
    derived = (_derives(each, finite) for each in part.parts)
    return all(derived) if isinstance(part, AllOf) else any(derived)


def _refs(part: RulePart) -> Iterator[str]:
    if isinstance(part, RuleRef):
        yield part.name
    elif not isinstance(part, Terminal):
        for each in part.parts:
            yield from _refs(each)
