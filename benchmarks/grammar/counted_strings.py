"""Follow schemas whose strings count words and characters: bounded repeats x lengths x alternatives x many properties.

    python -m benchmarks.grammar.counted_strings --model model.gguf [--schemas 500] [--texts 20] [--tools]
        [--tokens 150000] [--json out.json]

Each schema gets valid texts, texts that are wrong in one string, and random answers under the mask with a token
budget; all with odd characters. A text that is accepted must validate (`jsonschema_rs`, whose patterns take linear
time), a valid one must be accepted, no answer may fail, and a random answer must end within its budget. With
``--tools`` the schemas are those of one to four tools, and the texts have calls of them. Times are of one thread's
processor time.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grammar.counted_cases import Case, case, tool_case
from benchmarks.grammar.evaluate import read_vocabulary
from benchmarks.grammar.limited_walk import draw_within
from benchmarks.grammar.times import enlarged, percentiles
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.match.matcher import GrammarFailure
from rootgraft.grammar.vocabulary import Vocabulary

BUDGET = 400
MAX_MASKS = 250  # Largest number of masks of one text.


@dataclass
class Outcome:
    """Results of the schemas and their texts, and the seconds of masks and compiles."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)
    slow: list[float] = field(default_factory=list)  # The p99 of the masks of each schema.
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
        for at, token in enumerate(self.vocabulary.tokenize_named(text, bpe=True)):
            allowed = None
            if at < MAX_MASKS:
                self.fill(matcher)
                allowed = bool(self.row.view(np.uint32)[token >> 5] >> (token & 31) & 1)
            taken = matcher.accept(token)
            if allowed is not None and taken != allowed:
                raise AssertionError(f"mask {allowed}, accept {taken}: {text[:60]!r} at {at}")
            if not taken:
                if matcher.failure:
                    raise GrammarFailure(matcher.failure)
                return False
        return matcher.can_end

    def draw(self, rng: random.Random, budget: int, opening: str) -> str | None:
        """The rest of a random answer within a token budget, after its opening; None if it did not end."""
        matcher, data = self.compiled.matcher(), b""
        for token in self.vocabulary.tokenize_named(opening, bpe=True):
            if not matcher.accept(token):
                raise AssertionError(f"the opening {opening!r} is refused")
        for step in range(budget):
            before = time.thread_time()
            token = draw_within(matcher, self.row, budget - step, lambda left: int(left[rng.randrange(len(left))]))
            self.outcome.masks.append(time.thread_time() - before)
            if not matcher.accept(token):
                raise AssertionError(f"token {token} is allowed by the mask and then refused")
            if matcher.is_done:
                break
            data += self.vocabulary.tokens[token]
        return data.decode(errors="replace") if matcher.can_end else None

    def fill(self, matcher: Any) -> None:
        before = time.thread_time()
        matcher.fill_mask(self.row)
        self.outcome.masks.append(time.thread_time() - before)


def run(
    vocabulary: Vocabulary,
    num_schemas: int,
    num_texts: int,
    seed: int = 0,
    start: int = 0,
    draw_case: Callable[[random.Random], Case] = case,
) -> Outcome:
    """Follow some texts of some schemas."""
    outcome = Outcome()
    for number in range(start, start + num_schemas):
        rng = random.Random(f"{seed}:{number}")
        made = draw_case(rng)
        gc.collect()
        before = time.thread_time()
        try:
            compiled = compile(made.spec(), vocabulary)
        except GrammarError as error:
            outcome.counts["refused"] += 1
            outcome.faults.append(f"{number}: refused: {error}")
            continue
        outcome.compiles.append(time.thread_time() - before)
        outcome.counts["accepted"] += 1
        follower = Follower(compiled, vocabulary, outcome)
        first = len(outcome.masks)
        for text in range(num_texts):
            try:
                for fault in _one_text(follower, made, rng, text % 3):
                    outcome.faults.append(f"{number}.{text}: {fault}")
            except (GrammarFailure, AssertionError) as error:
                outcome.counts["failed"] += 1
                outcome.faults.append(f"{number}.{text}: failed: {error}")
        times = sorted(outcome.masks[first:])
        outcome.slow.append(times[len(times) * 99 // 100])
    return outcome


def _one_text(follower: Follower, made: Case, rng: random.Random, kind: int) -> Iterator[str]:
    counts = follower.outcome.counts
    if kind == 2:
        shortest = follower.compiled.matcher().num_shortest or BUDGET
        opening = made.opening(rng)
        text = follower.draw(rng, max(BUDGET, shortest), opening)
        counts["random"] += 1
        if text is None:
            yield "a random answer did not end within its budget"
        elif not made.holds(opening, text):
            yield f"a random answer is invalid: {text[:200]!r}"
        return
    text, is_valid, is_odd = made.drawn(rng, spoiled=kind == 1)
    admitted = follower.admits(text)
    counts[f"{'valid' if is_valid else 'invalid'} {'admitted' if admitted else 'rejected'}"] += 1
    if admitted and not is_valid:
        yield f"an invalid text is admitted: {text!r}"
    if is_valid and not admitted and not is_odd:
        yield f"a valid text is rejected: {text!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--texts", type=int, default=20)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--tools", action="store_true", help="calls of tools amid free text")
    parser.add_argument("--tokens", type=int, default=0, help="size of an enlarged vocabulary; 0 is the model's own")
    options = parser.parse_args()
    vocabulary = read_vocabulary(options.model)
    if options.tokens:
        vocabulary = enlarged(vocabulary, [], options.tokens)
    draw = tool_case if options.tools else case
    gc.disable()  # Garbage is collected only between schemas, so that no mask is charged for it.
    outcome = run(vocabulary, options.schemas, options.texts, options.seed, options.start, draw)
    result = {
        "tokens": len(vocabulary.tokens),
        **dict(sorted(outcome.counts.items())),
        "compile_ms": percentiles(outcome.compiles, 1e3),
        "masks": len(outcome.masks),
        "mask_ms": percentiles(outcome.masks, 1e3),
        "mask_ms_p99_of_schemas": percentiles(outcome.slow, 1e3),
        "masks_over_5_ms": sum(seconds > 0.005 for seconds in outcome.masks),
        "faults": outcome.faults,
    }
    text = json.dumps(result, indent=1, ensure_ascii=False)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
