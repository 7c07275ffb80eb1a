"""Measure compiles and masks on a file of schemas: analysis, library, dry run, and each mask on the way to an instance.

    python -m benchmarks.grammar.times --data schemas.jsonl --model model.gguf [--tokens 131072] [--json out.json]

``--tokens`` makes a larger vocabulary out of the model's: merges of two neighbouring tokens, the most frequent ones in
the texts of the data first, then pairs of the model's words in order of their ids, until there are so many. Times are
of one thread's processor time, the least of the repeats for compiles.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grammar.evaluate import read_vocabulary
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import lower
from rootgraft.grammar.errors import GrammarError
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary


def enlarged(vocabulary: Vocabulary, rows: list[dict[str, Any]], size: int) -> Vocabulary:
    """The vocabulary with pairs of its tokens added."""
    known = set(vocabulary.tokens)
    added: dict[bytes, None] = {}
    for pair in _pairs(vocabulary, rows):
        if len(known) + len(added) >= size:
            break
        if pair not in known:
            added[pair] = None
    return Vocabulary((*vocabulary.tokens, *added), vocabulary.special, vocabulary.eos)


def _pairs(vocabulary: Vocabulary, rows: list[dict[str, Any]]) -> Iterator[bytes]:
    counts: Counter[tuple[int, int]] = Counter()
    for row in rows:
        counts.update(pairwise(vocabulary.tokenize(json.dumps(row, ensure_ascii=False).encode())))
    for (first, second), _ in counts.most_common():
        yield vocabulary.tokens[first] + vocabulary.tokens[second]
    words = [token for token in vocabulary.tokens if token[:1] == b" " and token[1:].isalpha()]
    for step in range(1, len(words)):
        for word, next_word in zip(words, words[step:], strict=False):
            yield word + next_word


def measure(rows: list[dict[str, Any]], vocabulary: Vocabulary, repeats: int) -> dict[str, Any]:
    """Times of all that is accepted, in seconds."""
    compiles, loads, masks = [], [], []
    for row in rows:
        spec = GrammarSpec.json_schema(row["schema"])
        try:
            artifact = lower(spec, vocabulary)
        except GrammarError:
            continue
        compiles.append(min(_seconds(lambda spec=spec: lower(spec, vocabulary)) for _ in range(repeats)))
        load = partial(CompiledGrammar, artifact, vocabulary)
        loads.append(min(_seconds(load) for _ in range(repeats)))
        masks += _masks(row, load(), vocabulary)
    return {
        "tokens": len(vocabulary.tokens),
        "schemas": len(rows),
        "accepted": len(compiles),
        "compile_ms": percentiles(compiles, 1e3),
        "load_ms": percentiles(loads, 1e3),
        "masks": len(masks),
        "mask_us": percentiles(masks, 1e6),
    }


def _masks(row: dict[str, Any], compiled: CompiledGrammar, vocabulary: Vocabulary) -> list[float]:
    times: list[float] = []
    words = np.zeros(vocabulary.num_words, dtype=np.int32)
    for instance in row["valid"]:
        matcher = compiled.matcher()
        for token in vocabulary.tokenize(json.dumps(instance, ensure_ascii=False).encode()):
            times.append(_seconds(lambda matcher=matcher: matcher.fill_mask(words)))
            if not matcher.accept(token):
                break
    return times


def _seconds(call: Any) -> float:
    before = time.thread_time()
    call()
    return time.thread_time() - before


def percentiles(times: list[float], scale: float) -> dict[str, float]:
    """p50, p90, p99 and the largest."""
    ordered = sorted(times) or [0.0]
    picks = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: round(scale * ordered[min(len(ordered) - 1, int(len(ordered) * q))], 3) for name, q in picks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=0, help="size of an enlarged vocabulary; 0 is the model's own")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.data.read_text("utf-8").split("\n") if line]
    vocabulary = read_vocabulary(options.model)
    if options.tokens:
        vocabulary = enlarged(vocabulary, rows, options.tokens)
    _ = vocabulary.llguidance
    gc.disable()  # a collection is nobody's mask
    result = measure(rows, vocabulary, options.repeats)
    result["versions"] = {name: version(name) for name in ("llguidance", "numpy")}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
