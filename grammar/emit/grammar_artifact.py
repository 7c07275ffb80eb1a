"""Grammar artifact: the result of a compile, passed from the compile worker to the engine's process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from enum import StrEnum

from ..regex.string_automaton import StringAutomaton
from ..schema.subschemas import Narrowing
from .entry_languages import EntryLanguage


class Backend(StrEnum):
    """The grammar library."""

    LLGUIDANCE = "llguidance"
    XGRAMMAR = "xgrammar"


@dataclass(frozen=True, slots=True)
class GrammarArtifact:
    """A compiled grammar in a form that can be sent to another process.

    Attributes:
        backend: the library that reads `source`.
        source: llguidance's grammar text, or XGrammar's serialised automaton.
        shortest: tokens of the shortest answer without its end token; empty if unknown.
        properties: short properties to end an object with.
        optional: short properties that may be begun although none is needed.
        values: short values to end any container with; for an answer that is not JSON, short complete answers.
        detour: the longest property, value or tag that may be begun although a shorter one exists or none is needed.
        is_json: whether answers are JSON, or have JSON parts.
        texts: texts outside of JSON, such as beginnings of tags and examples of expressions. To complete an answer, any
            suffix of them may be needed.
        ends: texts that end a tag and all tags around it.
        narrowings: descriptions of the places where the grammar offers less than the schema permits.
        num_bytes: estimated size in memory.
        open_ended: whether answers are free text that may end anywhere, with structured parts in it. Such answers are
            never ended early to stay within the budget, and do not count as complete merely because they could end.
        search_failed: whether a search for the shortest answer found none.
        is_slow: whether some masks take long to compute.
        lead_ins: the last character of each text after which JSON may follow; empty if the whole answer is JSON.
        strings: automata of the string rules in `source`, by number.
        options: all possible answers, if the grammar is a list of texts.
        language: the automaton of all answers, if an expression defines the answers and it is not too large.
        entries: languages of the containers whose entries are remembered, by number, beginning with 1.
        has_memory: whether a memory of the written values keeps keys or items distinct.
        scalars: groups of short scalars; if one of a group is possible at a position, the others could be too.
        containers: groups of short arrays and objects; if one of a group is possible, the others could be too.
    """

    backend: Backend
    source: str
    shortest: tuple[int, ...] = ()
    properties: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    detour: str = ""
    is_json: bool = False
    texts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    narrowings: tuple[Narrowing, ...] = ()
    num_bytes: int = 0
    open_ended: bool = False
    search_failed: bool = False
    is_slow: bool = False
    lead_ins: str = ""
    strings: tuple[StringAutomaton, ...] = ()
    options: tuple[str, ...] = ()
    language: StringAutomaton | None = None
    entries: tuple[EntryLanguage, ...] = ()
    has_memory: bool = False
    scalars: tuple[tuple[str, ...], ...] = ()
    containers: tuple[tuple[str, ...], ...] = ()
    optional: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the artifact as JSON; `decode` reads it."""
        fields = asdict(replace(self, strings=(), language=None, entries=()))
        fields["strings"] = [automaton.encode() for automaton in self.strings]
        fields["language"] = self.language and self.language.encode()
        fields["entries"] = [language.encode() for language in self.entries]
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> GrammarArtifact:
        """Return the artifact of its JSON encoding."""
        fields = json.loads(data)
        fields["backend"] = Backend(fields["backend"])
        for name in ("shortest", "properties", "values", "optional", "texts", "ends", "options"):
            fields[name] = tuple(fields[name])
        fields["scalars"] = tuple(map(tuple, fields["scalars"]))
        fields["containers"] = tuple(map(tuple, fields["containers"]))
        fields["narrowings"] = tuple(Narrowing(**narrowing) for narrowing in fields["narrowings"])
        fields["strings"] = tuple(map(StringAutomaton.decode, fields["strings"]))
        fields["language"] = fields["language"] and StringAutomaton.decode(fields["language"])
        fields["entries"] = tuple(map(EntryLanguage.decode, fields["entries"]))
        return cls(**fields)
