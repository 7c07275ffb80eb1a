"""Follow schemas whose strings count words and characters: bounded repeats x lengths x alternatives x many properties.

    python -m benchmarks.grammar.counted_strings --model model.gguf [--schemas 500] [--texts 20] [--json out.json]

Each schema gets valid texts, texts that are wrong in one string, and random answers under the mask with a token
budget; all with odd characters. A text that is accepted must validate (`jsonschema_rs`, whose patterns take linear
time), a valid one must be accepted, no answer may fail, and a random answer must end within its budget. Times are of
one thread's processor time.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np

from benchmarks.grammar.evaluate import read_vocabulary
from benchmarks.grammar.times import percentiles
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.match.matcher import GrammarFailure
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

WORDS = (
    "a",
    "the",
    "word",
    "Antidisestablishmentarianism",
    "naïve",
    "東京",
    "x1",
    'quote"d',
    "back\\slash",
    "🙂",
    "...",
)
BLANKS = (" ", " ", " ", "  ", "\n", "\t", "\u00a0")
BUDGET = 400
MAX_MASKS = 250  # of one text


@dataclass(frozen=True)
class Kind:
    """A family of strings: a schema, and a function that draws a string that probably satisfies it."""

    schema: dict[str, Any]
    draw: Callable[[random.Random], str]


def kinds(rng: random.Random) -> Kind:
    """Draw the schema of one string."""
    most = rng.choice((5, 9, 19, 29, 49, 49, 49, 80))
    length = rng.randrange(100, 501)
    drawn = rng.randrange(9)
    if drawn < 4:
        least = rng.choice((0, 0, 0, 2))
        pattern = rng.choice((rf"^(?:\S+\s+){{{least},{most}}}\S+$", rf"^\S+(?:\s+\S+){{{least},{most}}}$"))
        return Kind({"pattern": pattern, "maxLength": length}, lambda r: _words(r, least + 1, most + 1, length))
    if drawn == 4:
        schema = {"pattern": rf"^(?:[a-z]+\s?){{1,{most}}}$", "minLength": 3, "maxLength": length}
        return Kind(schema, lambda r: _joined(r, ("ab", "c", "defgh"), (" ", ""), 3, most)[:length])
    if drawn == 5:
        schema = {"pattern": rf"^(?:[^.!?]+[.!?]\s?){{1,{min(most, 9)}}}$", "maxLength": length}
        return Kind(
            schema, lambda r: "".join(f"{_words(r, 1, 4, 40).replace('.', '')}x. " for _ in range(r.randint(1, 2)))
        )
    if drawn == 6:
        schema = {"pattern": rf"^[a-z]{{1,20}}(?:,[a-z]{{1,20}}){{0,{most}}}$", "maxLength": length}
        return Kind(schema, lambda r: _joined(r, ("tag", "b", "longertag"), (",",), 1, min(most, 9)))
    if drawn == 7:
        schema = {"pattern": rf"^(?:red|green|blue)(?:\s(?:red|green|blue)){{0,{most}}}$", "maxLength": length}
        return Kind(schema, lambda r: _joined(r, ("red", "green", "blue"), (" ", "\n"), 1, min(most, 12)))
    schema = {"pattern": rf"^(?!.*secret)(?:\S+\s+){{0,{most}}}\S+$", "minLength": 2, "maxLength": length}
    return Kind(schema, lambda r: _words(r, 2, most + 1, length).replace("\n", " "))


def _words(rng: random.Random, least: int, most: int, length: int) -> str:
    """Draw words, sometimes as many or as long as may be."""
    count = rng.choice((least, most, rng.randint(least, most)))
    words = [rng.choice(WORDS) for _ in range(count)]
    text = "".join(word + rng.choice(BLANKS) for word in words[:-1]) + words[-1]
    if len(text) > length:
        text = text[:length].rstrip()
    elif rng.random() < 0.3:
        text += "z" * (length - len(text))
    return text


def _joined(rng: random.Random, words: tuple[str, ...], between: tuple[str, ...], least: int, most: int) -> str:
    words_ = [rng.choice(words) for _ in range(rng.randint(least, max(least, most)))]
    return "".join(word + rng.choice(between) for word in words_[:-1]) + words_[-1]


@dataclass
class Case:
    """A schema and how to draw its instances."""

    schema: dict[str, Any]
    draws: dict[str, Callable[[random.Random], Any]] = field(default_factory=dict)

    def instance(self, rng: random.Random) -> dict[str, Any]:
        required = self.schema["required"]
        return {name: draw(rng) for name, draw in self.draws.items() if name in required or rng.random() < 0.6}


def case(rng: random.Random) -> Case:
    """Draw a schema of 4 to 15 such strings: plain, in arrays, optional, in alternatives, in objects."""
    made = Case({"type": "object", "properties": {}, "required": [], "additionalProperties": rng.random() < 0.2})
    for number in range(rng.randint(4, 15)):
        name = f"field_{number}"
        schema, draw = _field(rng, kinds(rng))
        made.schema["properties"][name] = schema
        made.draws[name] = draw
        if rng.random() < 0.6:
            made.schema["required"].append(name)
    return made


def _field(rng: random.Random, kind: Kind) -> tuple[dict[str, Any], Callable[[random.Random], Any]]:
    text = {"type": "string", **kind.schema}
    shape = rng.randrange(8)
    if shape < 3:
        return text, kind.draw
    if shape == 3:
        most = rng.randint(1, 4)
        schema = {"type": "array", "items": text, "minItems": 1, "maxItems": most}
        return schema, lambda r: [kind.draw(r) for _ in range(r.randint(1, most))]
    if shape == 4:
        return {"anyOf": [text, {"type": "null"}]}, lambda r: r.choice((None, kind.draw(r)))
    if shape == 5:
        other = kinds(rng)
        options = [text, {"type": "string", **other.schema}, {"enum": ["none", "n/a"]}]
        return {"anyOf": options}, lambda r: r.choice((kind.draw(r), other.draw(r), "n/a"))
    if shape == 6:
        other = kinds(rng)
        first = {"properties": {"text": text, "kind": {"const": 1}}}
        second = {"properties": {"text": {"type": "string", **other.schema}, "kind": {"const": 2}}}
        common = {"type": "object", "required": ["text", "kind"], "additionalProperties": False}
        schema = {"anyOf": [{**first, **common}, {**second, **common}]}
        return schema, lambda r: r.choice(({"text": kind.draw(r), "kind": 1}, {"text": other.draw(r), "kind": 2}))
    inner = {"type": "object", "properties": {"note": text}, "additionalProperties": False}
    return inner, lambda r: r.choice(({}, {"note": kind.draw(r)}))


@dataclass
class Outcome:
    """What became of the schemas and their texts, and the seconds of masks and compiles."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)
    compiles: list[float] = field(default_factory=list)


class Follower:
    """Follows texts of one schema and draws random ones, under a clock."""

    def __init__(self, compiled: CompiledGrammar, vocabulary: Vocabulary, outcome: Outcome) -> None:
        self.compiled = compiled
        self.vocabulary = vocabulary
        self.outcome = outcome
        self.row = np.zeros(vocabulary.num_words, dtype=np.int32)

    def admits(self, text: str) -> bool:
        """Whether the grammar admits a text; mask and `accept` must agree all along."""
        matcher = self.compiled.matcher()
        for at, token in enumerate(self.vocabulary.tokenize_bpe(text.encode())):
            allowed = None
            if at < MAX_MASKS:
                self.fill(matcher, None)
                allowed = bool(self.row.view(np.uint32)[token >> 5] >> (token & 31) & 1)
            taken = matcher.accept(token)
            if allowed is not None and taken != allowed:
                raise AssertionError(f"mask {allowed}, accept {taken}: {text[:60]!r} at {at}")
            if not taken:
                if matcher.failure:
                    raise GrammarFailure(matcher.failure)
                return False
        return matcher.can_end

    def draw(self, rng: random.Random, budget: int) -> str | None:
        """A random answer within a token budget; None if it did not end."""
        matcher, data = self.compiled.matcher(), b""
        for step in range(budget):
            self.fill(matcher, budget - step)
            allowed = np.flatnonzero(np.unpackbits(self.row.view(np.uint8), bitorder="little"))
            token = int(allowed[rng.randrange(len(allowed))])
            if not matcher.accept(token):
                raise AssertionError(f"token {token} is allowed by the mask and then refused")
            if matcher.is_done:
                break
            data += self.vocabulary.tokens[token]
        return data.decode() if matcher.can_end else None

    def fill(self, matcher: Any, remaining: int | None) -> None:
        before = time.thread_time()
        matcher.fill_mask(self.row, remaining)
        self.outcome.masks.append(time.thread_time() - before)


def run(vocabulary: Vocabulary, num_schemas: int, num_texts: int, seed: int = 0, start: int = 0) -> Outcome:
    """Follow some texts of some schemas."""
    outcome = Outcome()
    for number in range(start, start + num_schemas):
        rng = random.Random(f"{seed}:{number}")
        made = case(rng)
        before = time.thread_time()
        try:
            compiled = compile(GrammarSpec.json_schema(made.schema), vocabulary)
        except GrammarError as error:
            outcome.counts["refused"] += 1
            outcome.faults.append(f"{number}: refused: {error}")
            continue
        outcome.compiles.append(time.thread_time() - before)
        outcome.counts["accepted"] += 1
        follower = Follower(compiled, vocabulary, outcome)
        validator = jsonschema_rs.Draft202012Validator(made.schema)
        for text in range(num_texts):
            try:
                for fault in _one_text(follower, made, validator, rng, text % 3):
                    outcome.faults.append(f"{number}.{text}: {fault}")
            except (GrammarFailure, AssertionError) as error:
                outcome.counts["failed"] += 1
                outcome.faults.append(f"{number}.{text}: failed: {error}")
    return outcome


def _one_text(follower: Follower, made: Case, validator: Any, rng: random.Random, kind: int) -> Iterator[str]:
    counts = follower.outcome.counts
    if kind == 2:
        shortest = follower.compiled.matcher().num_shortest or BUDGET
        text = follower.draw(rng, max(BUDGET, shortest))
        counts["random"] += 1
        if text is None:
            yield "a random answer did not end within its budget"
        elif not validator.is_valid(json.loads(text)):
            yield f"a random answer is invalid: {text[:200]!r}"
        return
    instance = made.instance(rng)
    if kind == 1:
        instance = _spoiled(instance, rng)
    valid = validator.is_valid(instance)
    admitted = follower.admits(json.dumps(instance, ensure_ascii=False))
    counts[f"{'valid' if valid else 'invalid'} {'admitted' if admitted else 'rejected'}"] += 1
    if admitted and not valid:
        yield f"an invalid text is admitted: {instance!r}"
    if valid and not admitted and not _is_odd(instance):
        yield f"a valid text is rejected: {instance!r}"


def _spoiled(instance: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Change one string: longer, with a blank at its end, empty, or cut."""
    strings = [name for name, value in instance.items() if isinstance(value, str)]
    if not strings:
        return {**instance, "field_0": 5}
    name = rng.choice(strings)
    text = instance[name]
    change = rng.randrange(5)
    new = (text + "y" * 500, text + " ", "", text + " w" * 60, text[: len(text) // 2])[change]
    return {**instance, name: new}


def _is_odd(instance: Any) -> bool:
    """Whether readers of patterns differ on a text: a newline at its end, or a blank of one reading only."""
    return bool(re.search(r'\\n"|[\x1c-\x1f\x85\ufeff]', json.dumps(instance, ensure_ascii=False)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    vocabulary = read_vocabulary(options.model)
    outcome = run(vocabulary, options.schemas, options.texts, options.seed, options.start)
    result = {
        "tokens": len(vocabulary.tokens),
        **dict(sorted(outcome.counts.items())),
        "compile_ms": percentiles(outcome.compiles, 1e3),
        "masks": len(outcome.masks),
        "mask_ms": percentiles(outcome.masks, 1e3),
        "faults": outcome.faults,
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
