"""Field probabilities equal those of all answers that a schema permits, enumerated, under a model of random numbers."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

from rootgraft.engine.text.field_probabilities import FieldProbability, FieldReader
from rootgraft.engine.types import AllowedLogprobs
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.match.matcher import Matcher
from rootgraft.grammar.schema.answer_fields import AnswerFields
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

BYTES = [bytes((byte,)) for byte in range(32, 127)]
JOINED = [b'"}', b'",', b'":', b'{"', b'e"', b"e}", b"re", b"1,", b"true,"]
END = b"<end>"
COLOURS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "c": {"enum": ["red", "rose", "b"]},
        "free": {"type": "string", "maxLength": 0},
        "o": {"type": "boolean"},
        "n": {"type": "integer", "minimum": 9, "maximum": 11},
        "x": {"$ref": "#/$defs/one"},
        "y/z": {"type": ["boolean", "null"]},
    },
    "required": ["c", "free", "n"],
    "additionalProperties": False,
    "$defs": {"one": {"const": 1}},
}
KINDS = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": name}, "of": {"enum": values}},
            "required": ["kind"],
            "additionalProperties": False,
        }
        for name, values in (("a", [1, 12, 1.5]), ("ab", ["1", None]))
    ]
}
SCHEMAS: list[dict[str, Any]] = [
    COLOURS,
    KINDS,
    {"enum": [1, 12, "a", True, 123]},
    {"type": "integer", "minimum": -2, "maximum": 30},
    {"type": "array", "items": {"anyOf": [{"enum": ["a", "ab"]}, {"type": "boolean"}]}, "minItems": 1, "maxItems": 2},
    {"type": "object", "properties": {"in": {"allOf": [{"enum": ["p", "q"]}]}}, "additionalProperties": False},
]


@cache
def vocabulary(joined: bool) -> Vocabulary:
    tokens = (*BYTES, *(JOINED if joined else ()), END)
    last = len(tokens) - 1
    return Vocabulary(tokens, frozenset((last,)), (last,), len(tokens))


class Model:
    """Random logits of each text, alike for all ways to spell it, behind a schema's masks."""

    def __init__(self, schema: dict[str, Any], seed: int, joined: bool = False, blanks: bool = False) -> None:
        self.vocabulary = vocabulary(joined)
        self.compiled = compile(GrammarSpec.json_schema(schema), self.vocabulary)
        self.schema, self.seed, self.blanks = schema, seed, blanks

    def logits(self, text: bytes) -> np.ndarray:
        """Those of the next bytes, and of the end."""
        return np.random.default_rng([self.seed, *text]).normal(0, 2, len(BYTES) + 1)

    def drawn(self, matcher: Matcher, text: bytes) -> dict[int, float]:
        """The probabilities of the allowed tokens; blanks are never likely unless they are wanted."""
        row = np.zeros(self.vocabulary.num_words, dtype=np.int32)
        matcher.fill_mask(row, None)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        values = {}
        for token in allowed:
            data = self.vocabulary.tokens[token]
            if data.isspace() and not self.blanks:
                continue
            at, value = text, 0.0
            for byte in (len(BYTES),) if data == END else [each - 32 for each in data]:
                value += float(self.logits(at)[byte])
                at += data[:1]
            values[token] = float(np.exp(value))
        total = sum(values.values())
        return {token: value / total for token, value in values.items()}

    def answers(self) -> Iterator[tuple[str, float]]:
        """Yield all answers with their probabilities."""
        stack = [((), 1.0)]
        while stack:
            tokens, probability = stack.pop()
            matcher = self.compiled.matcher()
            assert all(map(matcher.accept, tokens))
            text = b"".join(self.vocabulary.tokens[token] for token in tokens)
            for token, share in self.drawn(matcher, text).items():
                if self.vocabulary.tokens[token] == END:
                    yield text.decode(), probability * share
                else:
                    stack.append(((*tokens, token), probability * share))  # type: ignore[arg-type]

    def answer(self, rng: random.Random) -> tuple[str, list[FieldProbability]]:
        """Draw an answer and read it."""
        matcher, text = self.compiled.matcher(), b""
        ends = frozenset((len(self.vocabulary.tokens) - 1,))
        reader = FieldReader(AnswerFields(self.schema), lambda token: self.vocabulary.tokens[token], ends)
        found: list[FieldProbability] = []
        while True:
            shares = self.drawn(matcher, text)
            token = rng.choices(list(shares), list(shares.values()))[0]
            ids, logprobs = np.array(list(shares), np.int32), np.log(np.array(list(shares.values()), np.float32))
            found += reader.push(AllowedLogprobs(token, ids.tobytes(), logprobs.astype(np.float32).tobytes()))
            if self.vocabulary.tokens[token] == END:
                return text.decode(), found
            assert matcher.accept(token)
            text += self.vocabulary.tokens[token]


def places(text: str) -> dict[tuple[str, str], int]:
    """Where each scalar begins, and each choice of a next key, by path and kind, in a text without blanks."""
    found: dict[tuple[str, str], int] = {}
    decode = json.JSONDecoder().raw_decode

    def walk(at: int, path: str) -> int:
        if text[at] not in "{[":
            found[path, "value"] = at
            return int(decode(text, at)[1])
        index, is_object = 0, text[at] == "{"
        at += 1
        while True:
            if is_object:
                found[f"{path} next {index}", "presence"] = at
            if text[at] in "}]":
                return at + 1
            at += text[at] == ","
            name: Any = index
            if is_object:
                name, at = decode(text, at)
                name = name.replace("/", "~1")
                found[f"{path}/{name}", "presence"] = found[f"{path} next {index}", "presence"]
                at += 1
            at, index = walk(at, f"{path}/{name}"), index + 1

    walk(0, "")
    return found


def outcome(text: str, at: int, kind: str) -> str:
    """What comes at a place: a value, the next key, or the end."""
    if kind == "presence" and text[at] == "}":
        return "end"
    at += text[at] == ","
    return text[at : json.JSONDecoder().raw_decode(text, at)[1]]


def right(text: str, each: FieldProbability, answers: list[tuple[str, float]]) -> float:
    at = places(text).get((each.path, each.kind))
    if at is None:  # a property that is left out: at the key that came in its place
        parent, _, name = each.path.rpartition("/")
        names = list(COLOURS["properties"] if "c" in text else ["kind", "of", "in"])
        later = {f"{parent}/{key.replace('/', '~1')}" for key in names[names.index(name.replace("~1", "/")) :]}
        nexts = {path: at for (path, kind), at in places(text).items() if kind == "presence"}
        at = min([nexts[path] for path in later if path in nexts] or [max(nexts.values())])
    masses: defaultdict[str, float] = defaultdict(float)
    for other, probability in answers:
        if other[:at] == text[:at]:
            masses[outcome(other, at, each.kind)] += probability
    return masses[outcome(text, at, each.kind)] / sum(masses.values())


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_fields_are_those_of_enumeration(schema: dict[str, Any]):
    rng, num_read = random.Random(3), 0
    model = Model(schema, 1)
    answers = list(model.answers())
    assert sum(probability for _, probability in answers) == pytest.approx(1)
    for _ in range(12):
        text, found = model.answer(rng)
        for each in found:
            assert each.probability == pytest.approx(right(text, each, answers), abs=1e-6), (text, each)
        num_read += len(found)
    assert num_read >= 12


def test_which_fields_are_told():
    """Values with a choice and optional properties, in the answer's order; neither lone constants nor free text."""
    wanted = {
        '{"c":"b","free":"","n":9}': ["/c=b", "/o?0", "/n=9", "/x?0", "/y~1z?0"],
        '{"c":"red","free":"","o":false,"n":10,"x":1,"y/z":null}': [
            *("/c=red", "/o?1", "/o=False", "/n=10", "/x?1", "/y~1z?1", "/y~1z=None")
        ],
    }
    for text, fields in wanted.items():
        tokens = [BYTES.index(bytes((byte,))) for byte in text.encode()]
        reader = FieldReader(AnswerFields(COLOURS), BYTES.__getitem__, frozenset())
        one = np.zeros(1, np.float32).tobytes()
        found = [
            each
            for token in tokens
            for each in reader.push(AllowedLogprobs(token, np.array([token], np.int32).tobytes(), one))
        ]
        signs = {"presence": "?{:d}", "value": "={}"}
        told = [each.path + signs[each.kind].format(each.value) for each in found]
        assert told == fields
        assert {each.probability for each in found} == {1.0}


def test_blanks_are_no_choice():
    """The same probabilities as of a model that never writes any."""
    plain, spaced = (Model(COLOURS, 5, blanks=blanks) for blanks in (False, True))
    answers = list(plain.answers())
    rng, num_spaced = random.Random(1), 0
    for _ in range(30):
        text, found = spaced.answer(rng)
        num_spaced += " " in text
        for each in found:
            assert 0 <= each.probability <= 1
            assert each.path.rsplit("/", 1)[0] == ""
    assert num_spaced > 5 and answers


def test_joined_tokens_are_divided_between_fields():
    """A token that closes a value and begins the next counts for each by its bytes: the sum over outcomes is 1."""
    model = Model(SCHEMAS[5], 2, joined=True)
    seen: dict[str, float] = {}
    rng = random.Random(4)
    for _ in range(60):
        text, found = model.answer(rng)
        [first, *rest] = found
        assert (first.path, first.kind, first.value) == ("/in", "presence", "in" in text)
        assert [each.path for each in rest] == (["/in"] if first.value else [])
        if rest:
            seen[text] = rest[0].probability
    assert set(seen) == {'{"in":"p"}', '{"in":"q"}'}


def test_a_token_of_two_fields_by_hand():
    """Of `"}` and `",` after `"red`, neither tells of the colour; both tell whether another property comes."""
    schema = {"properties": {"c": {"enum": ["red", "reds"]}, "d": {"type": "boolean"}}, "required": ["c"]}
    tokens = [b'{"c":', b'"red', b'"}', b'",', b'"', b"s", b"x"]
    reader = FieldReader(AnswerFields(schema), tokens.__getitem__, frozenset())

    def push(token: int, **shares: float) -> list[FieldProbability]:
        ids = np.array([int(name[1:]) for name in shares], np.int32)
        return reader.push(
            AllowedLogprobs(token, ids.tobytes(), np.log(np.array(list(shares.values()), np.float32)).tobytes())
        )

    assert push(0, t0=1.0) == [] and push(1, t1=1.0) == []
    value, presence = push(2, t2=0.3, t3=0.1, t4=0.2, t5=0.4)
    assert (value.path, value.value, presence.path, presence.value) == ("/c", "red", "/d", False)
    assert value.probability == pytest.approx(0.6)
    assert presence.probability == pytest.approx(0.75)


def test_a_number_that_is_too_long_to_be_read_is_no_choice():
    """Python parses integers of 4,300 digits at most; the others are free text, as far as a schema leaves a choice."""
    fields = AnswerFields({"type": ["integer", "null"]})
    reader = FieldReader(fields, lambda token: b"1" * 1000 if token else b"", frozenset((0,)))
    tokens = [AllowedLogprobs(token, b"", b"") for token in (1, 1, 1, 1, 1, 0)]
    assert [found for each in tokens for found in reader.push(each)] == []
