"""What a request asks of its answer's form, parsed strictly and kept as canonical bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import isinf
from typing import Any

from .errors import GrammarError

# Of what the parser cannot read no place can be told; `limits` names the place in what is a little less deep.
_TOO_DEEP = "is nested too deeply; 64 arrays and objects inside each other are the limit"


class GrammarKind(StrEnum):
    """The language that a grammar is written in."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"
    LARK = "lark"
    STRUCTURAL_TAG = "structural_tag"

    @property
    def is_json(self) -> bool:
        """Whether answers are JSON texts."""
        return self in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar by its text: hashable, safe on the wire, not yet checked beyond its syntax as JSON.

    Two schemas that differ in white space are one spec; the order of keys is part of it, since answers follow it.

    Attributes:
        kind: the language of `content`.
        content: UTF-8; for a schema, a tag or choices their JSON without white space.
    """

    kind: GrammarKind
    content: bytes

    @classmethod
    def json_schema(cls, schema: Any) -> GrammarSpec:
        """A JSON Schema, given as JSON text or as parsed JSON.

        Raises:
            GrammarError: if it is not JSON, repeats a key, or is neither object nor boolean.
        """
        value = parse_json(schema) if isinstance(schema, str | bytes) else schema
        if not isinstance(value, dict | bool):
            raise GrammarError("schema", "", f"must be an object or a boolean, not {type(value).__name__}")
        return cls(GrammarKind.JSON_SCHEMA, _canonical(value))

    @classmethod
    def json_object(cls) -> GrammarSpec:
        """Any JSON object."""
        return cls(GrammarKind.JSON_OBJECT, b"{}")

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """A regular expression for the whole answer."""
        return cls(GrammarKind.REGEX, _text(pattern, "regex"))

    @classmethod
    def choice(cls, options: Iterable[str]) -> GrammarSpec:
        """One of several strings."""
        listed = list(options)
        if not listed or not all(isinstance(option, str) and option for option in listed):
            raise GrammarError("choice", "", "must be a list of at least one string, none of them empty")
        return cls(GrammarKind.CHOICE, _canonical(list(dict.fromkeys(listed))))

    @classmethod
    def ebnf(cls, grammar: str) -> GrammarSpec:
        """A context-free grammar in GBNF, with a rule ``root``."""
        return cls(GrammarKind.EBNF, _text(grammar, "ebnf"))

    @classmethod
    def lark(cls, grammar: str) -> GrammarSpec:
        """A context-free grammar in Lark, with a rule ``start``."""
        return cls(GrammarKind.LARK, _text(grammar, "lark"))

    @classmethod
    def structural_tag(cls, tag: Any) -> GrammarSpec:
        """Free text in which some tags open a structured part, as XGrammar's structural tags."""
        value = parse_json(tag) if isinstance(tag, str | bytes) else tag
        if not isinstance(value, dict):
            raise GrammarError("structural_tag", "", f"must be an object, not {type(value).__name__}")
        return cls(GrammarKind.STRUCTURAL_TAG, _canonical(value))

    @cached_property
    def key(self) -> str:
        """A digest of kind and content."""
        return hashlib.sha256(self.kind.value.encode() + b"\0" + self.content).hexdigest()

    @property
    def text(self) -> str:
        """The content as text."""
        return self.content.decode()

    def value(self) -> Any:
        """The content of a JSON kind, parsed."""
        return json.loads(self.content)


def parse_json(text: str | bytes) -> Any:
    """JSON, strictly: no repeated keys, no NaN, no lone surrogates, no numbers beyond a double.

    Raises:
        GrammarError: naming what is wrong.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
    except GrammarError:
        raise
    except RecursionError:
        raise GrammarError("schema", "", _TOO_DEEP) from None
    except (ValueError, UnicodeDecodeError) as error:
        raise GrammarError("schema", "", f"is not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise GrammarError("schema", "", f"repeats the key {twice[:100]!r}")
    return found


def _no_constant(name: str) -> Any:
    raise GrammarError("schema", "", f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if isinf(value):
        raise GrammarError("schema", "", f"the number {digits[:40]} is out of range")
    return value


def _canonical(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError:
        raise GrammarError("schema", "", _TOO_DEEP) from None
    except UnicodeEncodeError:
        raise GrammarError("schema", "", "holds half of a surrogate pair") from None
    except (TypeError, ValueError) as error:
        raise GrammarError("schema", "", f"is not JSON: {error}") from None


def _text(text: str, name: str) -> bytes:
    if not isinstance(text, str) or not text:
        raise GrammarError(name, "", "must be a string that is not empty")
    if "\0" in text:
        raise GrammarError(name, "", "holds a NUL character")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise GrammarError(name, "", "holds half of a surrogate pair") from None
