"""Rules and terminals of a schema's Lark grammar while it is written, and errors located at its keywords."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal

from ..errors import GrammarError
from ..regex.charset import json_string
from ..regex.number_ranges import spelling
from ..schema.constraints import ALWAYS, NEVER, Conj, Strings
from ..schema.json_types import WORDS
from ..schema.satisfiability import Satisfiability
from ..schema.subschemas import Subschemas
from .entry_languages import EntryRules

MAX_WHITESPACE = 80
# ``no_forcing``: where the grammar admits a single text, the model may still choose any division of it into tokens.
FREE = '%llguidance {"no_forcing": true}\n'
WHITESPACE = rf"[ \t\r\n]{{1,{MAX_WHITESPACE}}}"
# White space between the parts of a JSON text is one expression for all parts. With several expressions, the lexer
# would have to distinguish them.
_OPTIONS = '%llguidance {"ignore_once": true, "no_forcing": true}\n'
_HEADER = f"{_OPTIONS}%ignore /{WHITESPACE}/\n"
_encoder = json.JSONEncoder(ensure_ascii=False)


def lark_string(text: str) -> str:
    """Write a text as a string of Lark, which unlike JSON takes no raw U+007F."""
    return _encoder.encode(text).replace("\x7f", "\\u007f")


def literal_string(value: str) -> str:
    return lark_string(json_string(value))


def literal_number(value: Decimal) -> str:
    return f'"{spelling(value)}"'


def token_literal(parts: Sequence[str | int]) -> str:
    """Write a text that consists of plain parts and ids of special tokens."""
    return " ".join(f"<[{part}]>" if isinstance(part, int) else lark_string(part) for part in parts)


class LarkRules:
    """Rules by name, shared terminals, and the conjunctions whose rules are not written yet.

    Attributes:
        bodies: rule bodies by name.
        current: the conjunction that is being written; errors name its location.
        string_rules: numbers of the strings that are matched by automata.
        entries: rules for entries that the matcher's memory enforces; None if the matcher has no memory.
        prefix: prefix of all names.
        literal_string: returns the expression of one given string.

    Args:
        analysis: analysis of the schema.
        prefix: a small letter before all names, for rules that are part of a larger grammar.
        words: spellings of the constants null, true and false that differ from JSON's.
        literal_string: as the attribute; JSON's spelling by default.
    """

    def __init__(
        self,
        analysis: Subschemas,
        prefix: str = "",
        words: Mapping[str, str] | None = None,
        literal_string: Callable[[str], str] = literal_string,
    ) -> None:
        self.analysis = analysis
        self.literal_string = literal_string
        self.prefix, self._words = prefix, words or {}
        self.satisfiability = Satisfiability(analysis)
        self.bodies: dict[str, str] = {}
        self.current: Conj = ALWAYS
        self.string_rules: dict[Strings, int] = {}
        self.entries: EntryRules | None = None
        self._terminals: dict[str, str] = {}
        self._names: dict[Conj, str] = {}
        self._pending: list[Conj] = []

    def text(self, *, blanks: bool = True) -> str:
        """Return the grammar's text, with or without white space between the parts of a value."""
        lines = "\n".join(f"{name}: {body}" for name, body in self.all_bodies().items())
        return f"{_HEADER if blanks else _OPTIONS}{lines}\n"

    def all_bodies(self) -> dict[str, str]:
        """Return the bodies of rules and terminals by name."""
        return self.bodies | {name: body for body, name in self._terminals.items()}

    def rule(self, conj: Conj) -> str:
        """Return the name of a conjunction's rule; its body is pending if it is new."""
        if conj not in self._names:
            self._names[conj] = f"{self.prefix}v{len(self._names)}"
            self._pending.append(conj)
        return self._names[conj]

    def next_pending(self) -> Conj | None:
        """Make the next conjunction without a body the current one; None if all have theirs."""
        if not self._pending:
            return None
        self.current = self._pending.pop()
        return self.current

    def define(self, name: str, body: str) -> str:
        """Add an auxiliary rule. Returns its name."""
        self.bodies[name] = body
        return name

    def terminal(self, body: str) -> str:
        """Return the name of the terminal with this body."""
        return self._terminals.setdefault(body, f"{self.prefix.upper()}T{len(self._terminals)}")

    def body_of(self, terminal: str) -> str:
        """Return the body of a terminal; a name of no terminal is returned as its own body."""
        return next((body for body, name in self._terminals.items() if name == terminal), terminal)

    def words(self, types: int) -> list[str]:
        """Return the spellings of the constants of the given types."""
        return [self._words.get(word, word) for bit, word in WORDS if types & bit]

    def unsatisfiable(self, conj: Conj) -> GrammarError:
        """Return the error for a conjunction that nothing satisfies."""
        for narrowing in self.analysis.narrowings_of(conj):
            return GrammarError(narrowing.keyword, narrowing.pointer, narrowing.reason)
        node = self.analysis.document.nodes[max(conj) // 2]
        likely = ("not", "enum", "oneOf", "allOf", "$ref", "required", *node.schema, "schema")
        keyword = next(key for key in likely if key in node.schema or key == "schema")
        return node.error(keyword, "no finite value satisfies the schema")

    def unsupported(self, keywords: tuple[str, ...], reason: str) -> GrammarError:
        """Return an error located at the first of some keywords, near the current conjunction if it has one."""
        nodes = self.analysis.document.nodes
        near = [nodes[literal // 2] for literal in sorted(self.current) if literal >= 0]
        for node in (*near, *nodes):
            for keyword in keywords:
                if keyword in node.schema:
                    return node.error(keyword, reason)
        return GrammarError(keywords[0], "", reason)

    def check_not_narrowed(self, conj: Conj) -> None:
        """Raise a GrammarError if a conjunction is unsatisfiable because of a narrowing: it must not be dropped."""
        narrowings = self.analysis.narrowings_of(conj)
        if narrowings and not conj >= NEVER:
            raise GrammarError(narrowings[0].keyword, narrowings[0].pointer, narrowings[0].reason)
