"""Random choices, expressions and schemas of a few letters, and vocabularies, for a comparison with brute force."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

Specs: TypeAlias = Callable[[int], Iterator[tuple[GrammarSpec, Vocabulary]]]
LETTERS = "abxyé"


def random_vocabulary(rng: random.Random) -> Vocabulary:
    """Every byte, and some pieces of JSON and of words."""
    pieces = ['{"', '":', '":"', '","', '"}', '"]', "],", '["', "},", "true", "null", ", ", ": ", '": "', "e,", ' "']
    pieces += ["".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 4))) for _ in range(12)]
    chosen = dict.fromkeys(rng.sample(pieces, rng.randint(4, len(pieces))))
    tokens = (*(bytes((byte,)) for byte in range(256)), *(piece.encode() for piece in chosen), b"<end>")
    return Vocabulary(tokens, frozenset((len(tokens) - 1,)), (len(tokens) - 1,))


def random_word(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(1, 5)))


def random_choice(rng: random.Random) -> GrammarSpec:
    return GrammarSpec.choice(sorted({random_word(rng) for _ in range(rng.randint(1, 6))}))


def random_pattern(rng: random.Random, depth: int = 2) -> str:
    kind = rng.randrange(5 if depth else 2)
    if kind == 0:
        return random_word(rng)
    if kind == 1:
        return f"[{''.join(sorted(set(random_word(rng))))}]"
    if kind == 2:
        return "".join(random_pattern(rng, depth - 1) for _ in range(2))
    if kind == 3:
        return f"({random_pattern(rng, depth - 1)}|{random_pattern(rng, depth - 1)})"
    return f"({random_pattern(rng, depth - 1)}){rng.choice(['?', '*', '+', '{2}', '{1,3}'])}"


def random_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
    """A schema whose strings are listed or of a few letters."""
    match rng.randrange(8 if depth else 5):
        case 0:
            return {"enum": [random_word(rng) for _ in range(rng.randint(1, 4))]}
        case 1:
            return {"type": "boolean"}
        case 2:
            return {"enum": [None, True, rng.randint(0, 200), random_word(rng)]}
        case 3:
            return {"type": "integer", "minimum": 8, "maximum": rng.choice([9, 12, 120])}
        case 4:
            if rng.random() < 0.5:
                return {"type": "string", "pattern": f"^({random_pattern(rng, 1)})$"}
            return {"type": "string", "pattern": "^[ab]+$", "minLength": rng.randint(0, 3), "maxLength": 4}
        case 5:
            return {
                "type": "array",
                "items": random_schema(rng, depth - 1),
                "minItems": rng.randint(0, 2),
                "maxItems": 3,
            }
        case 6:
            return {"anyOf": [random_schema(rng, depth - 1), random_schema(rng, depth - 1)]}
        case _:
            names = sorted({random_word(rng) for _ in range(rng.randint(1, 3))})
            required = [name for name in names if rng.random() < 0.7]
            properties = {name: random_schema(rng, depth - 1) for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = sorted({random_word(rng) for _ in range(rng.randint(1, 3))})
    properties = {name: random_schema(rng, depth) for name in names}
    required = [name for name in names if rng.random() < 0.8]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def random_kinds(rng: random.Random) -> dict[str, Any]:
    """A schema where a value may be one of several kinds of objects and arrays."""
    match rng.randrange(4):
        case 0:
            return {"anyOf": [random_object(rng, 1) for _ in range(rng.randint(2, 3))]}
        case 1:
            items, least = random_schema(rng, 1), rng.randint(0, 2)
            array = {"type": "array", "items": items, "minItems": least, "maxItems": 3}
            return {"anyOf": [random_object(rng, 1), array, random_schema(rng, 0)]}
        case 2:
            items = {"anyOf": [random_object(rng, 0) for _ in range(2)]}
            return {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
        case _:
            name, kinds = random_word(rng), {"anyOf": [random_object(rng, 0) for _ in range(2)]}
            return {"type": "object", "properties": {name: kinds}, "required": [name], "additionalProperties": False}


def kinds_specs(seed: int) -> Iterator[tuple[GrammarSpec, Vocabulary]]:
    rng = random.Random(seed)
    vocabulary = random_vocabulary(rng)
    yield GrammarSpec.json_schema(random_kinds(rng)), vocabulary


def random_long(rng: random.Random) -> dict[str, Any]:
    """A schema whose values take several tokens."""
    length = rng.randint(3, 7)
    match rng.randrange(6):
        case 0:
            return {"type": "string", "pattern": f"^[ab]{{{length},{length + 2}}}$"}
        case 1:
            return {"const": "".join(rng.choice(LETTERS) for _ in range(length + 3))}
        case 2:
            return {"enum": [random_word(rng) + random_word(rng) for _ in range(3)]}
        case 3:
            return {
                "type": "array",
                "items": {"enum": [random_word(rng)]},
                "minItems": rng.randint(1, 3),
                "maxItems": 3,
            }
        case 4:
            return {"type": "integer", "minimum": 10**length, "maximum": 10**length + 3}
        case _:
            properties = {random_word(rng): {"enum": [1, True]}}
            return {"type": "object", "properties": properties, "additionalProperties": False, "minProperties": 1}


def random_nullable(rng: random.Random) -> dict[str, Any]:
    """A value that is null, or another short one, or a long one."""
    long = random_long(rng)
    short = rng.choice([{"type": "null"}, {"type": "boolean"}, {"const": ""}, {"const": 1}, {"const": "a"}])
    if rng.random() < 0.3 and "type" in long:
        return {**long, "type": [long["type"], "null"]}
    return {"anyOf": rng.sample([long, short], 2)}


def nullable_specs(seed: int) -> Iterator[tuple[GrammarSpec, Vocabulary]]:
    """Values, items and members, some optional, of a short and a long kind."""
    rng = random.Random(seed)
    vocabulary = random_vocabulary(rng)
    names = sorted({random_word(rng) for _ in range(rng.randint(1, 3))})
    properties = {name: random_nullable(rng) if rng.random() < 0.8 else {"enum": [1, 2]} for name in names}
    required = [name for name in names if rng.random() < 0.5]
    members = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    items = {"type": "array", "items": random_nullable(rng), "minItems": rng.randint(0, 2), "maxItems": 2}
    yield GrammarSpec.json_schema(rng.choice([random_nullable(rng), items, members, members])), vocabulary


def specs(seed: int) -> Iterator[tuple[GrammarSpec, Vocabulary]]:
    rng = random.Random(seed)
    vocabulary = random_vocabulary(rng)
    yield random_choice(rng), vocabulary
    yield GrammarSpec.regex(random_pattern(rng)), vocabulary
    yield GrammarSpec.json_schema(random_schema(rng)), vocabulary


def mixed_spec(seed: int) -> tuple[GrammarSpec, Vocabulary]:
    """In turn a choice, an expression, and schemas: any, of several kinds of objects, of short and long values."""
    rng = random.Random(seed)
    vocabulary = random_vocabulary(rng)
    match seed % 5:
        case 0:
            return random_choice(rng), vocabulary
        case 1:
            return GrammarSpec.regex(random_pattern(rng)), vocabulary
        case 2:
            return GrammarSpec.json_schema(random_schema(rng)), vocabulary
        case 3:
            return next(kinds_specs(seed))
        case _:
            return next(nullable_specs(seed))
