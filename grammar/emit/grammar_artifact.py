"""A grammar made ready: what a compile hands from the process that did it to the one that uses it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from ..schema.analysis import Narrowing


class Backend(StrEnum):
    """The library that follows a grammar."""

    LLGUIDANCE = "llguidance"
    XGRAMMAR = "xgrammar"


@dataclass(frozen=True, slots=True)
class GrammarArtifact:
    """A compiled grammar as text, safe on a pipe.

    Attributes:
        backend: the library that reads `source`.
        source: llguidance's grammar text, or XGrammar's serialised automaton.
        whole: tokens of the shortest answer, its end token left out; none if it is not known.
        is_hopeless: a search for one has found none.
        is_slow: some masks take long.
        properties: short properties to end an object with.
        values: short values to end anything with; of an answer that is not JSON, short whole answers.
        is_json: whether answers are JSON, or have JSON parts.
        detour: the longest property or tag that one may begin without need.
        texts: texts beside JSON of which any rest may be needed: begins of tags, examples of expressions.
        ends: what ends a tag and all tags around it.
        narrowings: where less is offered than the schema permits.
        num_bytes: what it takes in memory, about.
        open_ended: answers are free text that may end anywhere, with structured parts in it: never cut short in favour
            of an end, and not complete merely because they could end.
    """

    backend: Backend
    source: str
    whole: tuple[int, ...] = ()
    properties: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    detour: str = ""
    is_json: bool = False
    texts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    narrowings: tuple[Narrowing, ...] = ()
    num_bytes: int = 0
    open_ended: bool = False
    is_hopeless: bool = False
    is_slow: bool = False

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> GrammarArtifact:
        """From JSON."""
        fields = json.loads(data)
        fields["backend"] = Backend(fields["backend"])
        for name in ("whole", "properties", "values", "texts", "ends"):
            fields[name] = tuple(fields[name])
        fields["narrowings"] = tuple(Narrowing(**narrowing) for narrowing in fields["narrowings"])
        return cls(**fields)
