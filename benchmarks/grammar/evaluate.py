"""Measure the promise on a file of schemas with labelled instances.

    python -m benchmarks.grammar.evaluate --data schemas.jsonl --model model.gguf [--sample 60] [--outputs 20]

Each line of the data is an object with ``id``, ``draft``, ``schema``, ``valid``, ``invalid`` and ``invalid_format``.
For every schema: compile; walk its instances token by token (mask, bit, accept; at the end the matcher must be able
to end); draw random outputs from the masks, half of them against a budget that closes them, and judge each by
python-jsonschema with ``format`` asserted. Times are of one thread's CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from numpy.typing import NDArray

from benchmarks.grammar.limited_walk import Tokens, allowed_tokens, draw_within
from benchmarks.grammar.spelling import MISSING, spell
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.match.matcher import GrammarFailure, Matcher
from rootgraft.grammar.schema.analysis import Analysis
from rootgraft.grammar.schema.document import Document
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

VALIDATORS = {
    "Draft4": jsonschema.Draft4Validator,
    "Draft6": jsonschema.Draft6Validator,
    "Draft7": jsonschema.Draft7Validator,
    "Draft202012": jsonschema.Draft202012Validator,
}
BUDGET = 160


@dataclass
class Report:
    """Results: counts, times in seconds, and a line for each surprise."""

    counts: Counter[str] = field(default_factory=Counter)
    compile_times: list[float] = field(default_factory=list)
    mask_times: list[float] = field(default_factory=list)
    surprises: list[str] = field(default_factory=list)
    verdicts: dict[str, str] = field(default_factory=dict)

    def note(self, kind: str, row: dict[str, Any], detail: object) -> None:
        self.counts[kind] += 1
        self.surprises.append(f"{kind}: {row['id']}: {str(detail)[:160]}")


class Walker:
    """Masks and tokens of one vocabulary, with the time that masks take."""

    def __init__(self, vocabulary: Vocabulary, report: Report, seed: int) -> None:
        self.vocabulary = vocabulary
        self.report = report
        self.rng = random.Random(seed)
        self.row: NDArray[np.int32] = np.zeros(vocabulary.num_words, dtype=np.int32)
        text = enumerate(vocabulary.tokens)
        self.closing = {i for i, t in text if t and i not in vocabulary.special and set(t) <= set(b'"}], \n')}

    def mask(self, matcher: Matcher) -> None:
        before = time.thread_time()
        matcher.fill_mask(self.row)
        self.report.mask_times.append(time.thread_time() - before)

    def admits(self, compiled: CompiledGrammar, instance: Any) -> bool:
        """Whether an instance, as ``json.dumps`` spells it, can be produced token by token."""
        matcher = compiled.matcher()
        for token in self.vocabulary.tokenize(json.dumps(instance, ensure_ascii=False).encode()):
            self.mask(matcher)
            allowed = bool(self.row[token >> 5] >> (token & 31) & 1)
            if matcher.accept(token) != allowed:
                raise AssertionError("mask and accept disagree")
            if not allowed:
                return False
        return matcher.can_end

    def output(self, compiled: CompiledGrammar, *, closes: bool) -> str | None:
        """One random output; None if it was cut off."""
        matcher = compiled.matcher()
        tokens: list[int] = []
        for step in range(BUDGET):
            if closes:
                token = draw_within(matcher, self.row, BUDGET - step, self._choose)
            else:
                self.mask(matcher)
                token = self._choose(allowed_tokens(self.row))
            if not matcher.accept(token):
                raise AssertionError("mask and accept disagree")
            if matcher.is_done:
                break
            tokens.append(token)
        text = b"".join(self.vocabulary.tokens[token] for token in tokens)
        return text.decode() if matcher.can_end else None

    def _choose(self, tokens: Tokens) -> int:
        near = list(self.closing.intersection(tokens.tolist())) if self.rng.random() < 0.4 else []
        return int(self.rng.choice(near or tokens))


def read_vocabulary(model: Path) -> Vocabulary:
    """The vocabulary of a GGUF file or a model's folder."""
    tokenizer = Tokenizer.load(model)
    tokens = tuple(tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
    return Vocabulary(tokens, frozenset(tokenizer.special_ids), tokenizer.eos_ids)


def evaluate(rows: Iterable[dict[str, Any]], vocabulary: Vocabulary, outputs: int, seed: int = 0) -> Report:
    """Go through all schemas."""
    report = Report()
    for row in rows:
        report.counts["schemas"] += 1
        walker = Walker(vocabulary, report, seed)
        before = time.thread_time()
        try:
            compiled = compile(GrammarSpec.json_schema(row["schema"]), vocabulary)
        except GrammarError as error:
            report.verdicts[row["id"]] = "refused"
            report.note("refused", row, error)
            if not _names(row["schema"], error.keyword):
                report.note("refusal names no keyword of the schema", row, error)
            continue
        report.compile_times.append(time.thread_time() - before)
        report.counts["accepted"] += 1
        report.verdicts[row["id"]] = _verdict(row, compiled, walker, outputs)
    return report


def _verdict(row: dict[str, Any], compiled: CompiledGrammar, walker: Walker, outputs: int) -> str:
    report, verdict = walker.report, "sound and complete"
    for instance in row["valid"]:
        report.counts["valid"] += 1
        if not walker.admits(compiled, instance) and not walker.admits(compiled, _ordered(row["schema"], instance)):
            report.note("valid not reached", row, json.dumps(instance))
            verdict = "sound"
    for instance in (*row["invalid"], *row["invalid_format"]):
        report.counts["invalid"] += 1
        if walker.admits(compiled, instance) or _spelled(walker, compiled, row["schema"], instance):
            report.note("invalid admitted", row, json.dumps(instance))
            verdict = "unsound"
    for problem in _random_outputs(row, compiled, walker, outputs):
        report.note("random output wrong", row, problem)
        verdict = "unsound"
    return verdict


def _random_outputs(row: dict[str, Any], compiled: CompiledGrammar, walker: Walker, outputs: int) -> Iterator[str]:
    validator = VALIDATORS[row["draft"]](row["schema"], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    for index in range(outputs):
        try:
            text = walker.output(compiled, closes=index % 2 == 0)
        except GrammarFailure as failure:
            yield f"stuck: {failure}"
            continue
        if text is None:
            if (compiled.matcher().num_shortest or 0) > BUDGET:
                walker.report.counts["cut off as the shortest answer does not fit"] += 1
            elif index % 2 == 0:
                walker.report.note("cut off in spite of closing", row, index)
            else:
                walker.report.counts["cut off without closing"] += 1
            continue
        walker.report.counts["finished"] += 1
        error = next(validator.iter_errors(json.loads(text)), None)
        if error is not None:
            yield f"{error.validator}: {text}"


def _ordered(schema: Any, instance: Any) -> Any:
    """The instance with keys and numbers as the grammar spells them, if it is admitted at all."""
    found = spell(Analysis(Document(schema)), frozenset((0,)), instance) if isinstance(schema, dict) else MISSING
    return instance if found is MISSING else found


def _spelled(walker: Walker, compiled: CompiledGrammar, schema: Any, instance: Any) -> bool:
    ordered = _ordered(schema, instance)
    same = json.dumps(ordered) == json.dumps(instance)
    # Besides the order of keys a number's spelling changes, and so does the instance (draft 4: 1.0 is not an integer).
    return not same and ordered == instance and "." not in json.dumps(instance) and walker.admits(compiled, ordered)


def _names(schema: Any, keyword: str) -> bool:
    if isinstance(schema, dict):
        return keyword in schema or any(_names(value, keyword) for value in schema.values())
    if isinstance(schema, list):
        return any(_names(value, keyword) for value in schema)
    return keyword == str(schema).lower()


def percentiles(times: list[float]) -> str:
    """p50, p90, p99 and the largest, in milliseconds."""
    ordered = sorted(times) or [0.0]
    picks = (ordered[min(len(ordered) - 1, int(len(ordered) * q))] for q in (0.5, 0.9, 0.99, 1))
    return " / ".join(f"{1e3 * pick:.3f}" for pick in picks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sample", type=int, default=0, help="number of random schemas; 0 for all")
    parser.add_argument("--outputs", type=int, default=20, help="random outputs for each schema")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the counts here")
    parser.add_argument("--ratchet", type=Path, help="write each schema's verdict here")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.data.read_text("utf-8").split("\n") if line]
    if options.sample:
        rows = random.Random(options.seed).sample(rows, options.sample)
    report = evaluate(rows, read_vocabulary(options.model), options.outputs, options.seed)
    print("\n".join(report.surprises))
    for kind, count in sorted(report.counts.items()):
        print(f"{count:7d}  {kind}")
    print(f"compile, analysis and dry run: {percentiles(report.compile_times)} ms (p50 / p90 / p99 / max)")
    print(f"mask:                          {percentiles(report.mask_times)} ms")
    if options.json:
        result = {
            "command": f"python -m benchmarks.grammar.evaluate --data {options.data.name} --model {options.model.name}"
            f" --outputs {options.outputs} --seed {options.seed}",
            "counts": dict(sorted(report.counts.items())),
            "surprises": report.surprises,
            "versions": {name: version(name) for name in ("llguidance", "jsonschema", "numpy")},
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.ratchet:
        options.ratchet.write_text(json.dumps(report.verdicts, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
