"""Grammar spec: the grammar that a request asks for, parsed strictly and kept as canonical bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import isinf
from typing import Any

from .annotations import tag_without_annotations, without_annotations
from .errors import GrammarError

# Without a location, as the parser fails on it; `static_limits` locates what is too deep but can be parsed.
_TOO_DEEP = "is nested too deeply; the limit is 64 arrays and objects inside each other"


class GrammarKind(StrEnum):
    """The language of a grammar."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    EBNF = "ebnf"
    LARK = "lark"
    STRUCTURAL_TAG = "structural_tag"

    @property
    def is_json(self) -> bool:
        return self in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)


@dataclass(frozen=True)
class GrammarSpec:
    """A grammar as text, which is hashable and can be sent to other processes. Only JSON syntax has been checked.

    Schemas that differ only in white space or annotations are equal. The order of keys matters, because answers have
    the same order.

    Attributes:
        kind: the language of `content`.
        content: UTF-8; schemas, tags and choices are JSON without white space and annotations.
    """

    kind: GrammarKind
    content: bytes

    @classmethod
    def json_schema(cls, schema: Any) -> GrammarSpec:
        """Return the spec of a JSON Schema, given as JSON text or as parsed JSON.

        Raises:
            GrammarError: the schema is not JSON, repeats a key, or is neither object nor boolean.
        """
        value = parse_json(schema) if isinstance(schema, str | bytes) else schema
        if not isinstance(value, dict | bool):
            raise GrammarError("schema", "", f"must be an object or a boolean, not {type(value).__name__}")
        return cls(GrammarKind.JSON_SCHEMA, _canonical(value, without_annotations))

    @classmethod
    def json_object(cls) -> GrammarSpec:
        return cls(GrammarKind.JSON_OBJECT, b"{}")

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        return cls(GrammarKind.REGEX, _text(pattern, "regex"))

    @classmethod
    def choice(cls, options: Iterable[str]) -> GrammarSpec:
        """Return the spec of a choice: the answer is one of several strings."""
        listed = list(options)
        if not listed or not all(isinstance(option, str) and option for option in listed):
            raise GrammarError("choice", "", "must be a list of at least one string, none of them empty")
        return cls(GrammarKind.CHOICE, _canonical(list(dict.fromkeys(listed))))

    @classmethod
    def ebnf(cls, grammar: str) -> GrammarSpec:
        """Return the spec of a context-free grammar in GBNF, with a rule ``root``."""
        return cls(GrammarKind.EBNF, _text(grammar, "ebnf"))

    @classmethod
    def lark(cls, grammar: str) -> GrammarSpec:
        """Return the spec of a context-free grammar in Lark, with a rule ``start``."""
        return cls(GrammarKind.LARK, _text(grammar, "lark"))

    @classmethod
    def structural_tag(cls, tag: Any) -> GrammarSpec:
        """Return the spec of a structural tag in XGrammar's format: free text with structured parts."""
        value = parse_json(tag) if isinstance(tag, str | bytes) else tag
        if not isinstance(value, dict):
            raise GrammarError("structural_tag", "", f"must be an object, not {type(value).__name__}")
        return cls(GrammarKind.STRUCTURAL_TAG, _canonical(value, tag_without_annotations))

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(self.kind.value.encode() + b"\0" + self.content).hexdigest()

    @property
    def text(self) -> str:
        return self.content.decode()

    def value(self) -> Any:
        return json.loads(self.content)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly.

    Raises:
        GrammarError: also for repeated keys, NaN, lone surrogates and numbers beyond a double.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=_short
        )
    except GrammarError:
        raise
    except RecursionError:
        raise GrammarError("schema", "", _TOO_DEEP) from None
    except (ValueError, UnicodeDecodeError) as error:
        raise GrammarError("schema", "", f"is not JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise GrammarError("schema", "", f"repeats the key {name[:100]!r}")
        found[name] = value
    return found


def _no_constant(name: str) -> Any:
    raise GrammarError("schema", "", f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if isinf(value):
        raise GrammarError("schema", "", f"the number {digits[:40]} is out of range")
    return value


def _short(digits: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise GrammarError("schema", "", f"has an integer of {len(digits)} digits, which is too many") from None


def _canonical(value: Any, cut: Callable[[Any], Any] | None = None) -> bytes:
    try:
        value = value if cut is None else cut(value)
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
