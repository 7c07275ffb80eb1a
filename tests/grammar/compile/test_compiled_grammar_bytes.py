"""What compiled grammars and their parts take in memory is counted, whatever clients send and answer."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
from support.machine.waits import HANG_SECONDS

from rootgraft.grammar import vocabulary as vocabulary_module
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import lower
from rootgraft.grammar.emit import string_rules
from rootgraft.grammar.match.json_chars import json_chars
from rootgraft.grammar.regex import char_classes, charset, ecma_regex
from rootgraft.grammar.schema import string_language
from rootgraft.grammar.schema.constraints import Strings
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

CACHES: list[Any] = [
    json_chars,
    ecma_regex.read_pattern,
    charset._set_to_json,
    char_classes.code_ranges,
    string_language.admits_any,
    string_language.short_strings,
    string_language.automaton_of,
    string_rules.automaton,
    string_rules.is_too_large,
]
SLACK = 3 << 20  # what is made once: tables of the vocabulary, modules


def some_vocabulary(num_words: int) -> Vocabulary:
    rng = random.Random(3)
    words = {"".join(rng.choices(ascii_lowercase, k=rng.randint(2, 8))).encode() for _ in range(num_words)}
    tokens = (*(bytes((byte,)) for byte in range(256)), *sorted(words), b"<end>")
    return Vocabulary(tokens, frozenset((len(tokens) - 1,)), (len(tokens) - 1,))


def patterns(rng: random.Random) -> GrammarSpec:
    """A string of long repeats over scattered characters: a rule of an automaton, and classes of its own."""
    some = "".join(chr(code) for code in sorted(rng.sample(range(0x400, 0xA000), 200)))
    pattern = rf"^[{some}a-z]{{1,{rng.randint(40, 60)}}}[\p{{L}}0-9]{{0,50}}x$"
    return GrammarSpec.json_schema({"type": "string", "pattern": pattern, "minLength": rng.randint(50, 80)})


def texts(rng: random.Random) -> GrammarSpec:
    """A whole answer by an expression of many states."""
    return GrammarSpec.regex(f"[a-{rng.choice('mnopqrstuvw')}]{{{rng.randint(60, 90)}}}")


def objects(rng: random.Random) -> GrammarSpec:
    """An object of names that nobody has sent before."""
    names = ["".join(rng.choices(ascii_lowercase, k=rng.randint(3, 40))) for _ in range(12)]
    return GrammarSpec.json_schema({"properties": {name: {"enum": names} for name in names}, "required": names[:4]})


def counted(grammars: list[CompiledGrammar], vocabulary: Vocabulary) -> int:
    """Return the bytes that are counted for grammars and all caches."""
    shared = {id(part): size for grammar in grammars for part, size in grammar.shared}
    caches = vocabulary.cache.num_bytes + sum(each.cache.num_bytes for each in CACHES)
    return sum(grammar.artifact.num_bytes for grammar in grammars) + sum(shared.values()) + caches


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    def held() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    yield held
    tracemalloc.stop()


@pytest.mark.parametrize("make", [patterns, texts, objects])
def test_all_that_grammars_hold_is_counted(
    make: Callable[[random.Random], GrammarSpec], traced: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vocabulary_module, "CACHE_BYTES", 1 << 20)
    vocabulary, rng = some_vocabulary(3_000), random.Random(7)
    artifacts = [lower(make(rng), vocabulary) for _ in range(5)]
    tracemalloc.start()
    before = traced() - counted([], vocabulary)
    grammars: list[CompiledGrammar] = []
    for artifact in artifacts:
        grammars.append(CompiledGrammar(artifact, vocabulary))
        answer(grammars[-1], vocabulary, rng)
        assert vocabulary.cache.num_bytes <= 1 << 20
    assert traced() - before <= counted(grammars, vocabulary) + SLACK
    grammars = []
    assert traced() - before <= counted([], vocabulary) + SLACK, "and what is not held is given back"


# The library's memory is native, and only glibc's own allocator counts it.
NATIVE = """
import ctypes, gc, random, sys
from grammar_bytes import counted, objects, some_vocabulary
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import lower

names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
counts = type("Counts", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in names]})
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = counts

def held():
    gc.collect()
    found = mallinfo2()
    return found.uordblks + found.hblkhd

vocabulary, rng = some_vocabulary(3_000), random.Random(7)
artifacts = [lower(objects(rng), vocabulary) for _ in range(24)]
grammars = []
for artifact in artifacts:
    if len(grammars) == 4:  # what is made once is there
        before = held(), counted(grammars, vocabulary)
    grammars.append(CompiledGrammar(artifact, vocabulary))
print(held() - before[0], counted(grammars, vocabulary) - before[1])
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another allocator than glibc's")
def test_native_memory_is_counted() -> None:
    code = f"""
import runpy, sys, types
sys.modules["grammar_bytes"] = types.SimpleNamespace(**runpy.run_path({__file__!r}))
{NATIVE}"""
    environment = {
        **os.environ,
        "PYTHONMALLOC": "malloc",
        "MALLOC_ARENA_MAX": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", code]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_SECONDS)
    assert made.returncode == 0, made.stderr
    measured, estimated = map(int, made.stdout.split())
    assert 0.5 * estimated < measured < 1.25 * estimated


def test_all_that_is_kept_of_patterns_is_counted(traced: Callable[[], int]) -> None:
    rng = random.Random(5)
    tracemalloc.start()
    before = traced() - sum(each.cache.num_bytes for each in CACHES)
    for number in range(40):
        some = "".join(chr(code) for code in sorted(rng.sample(range(0x400, 0xA000), 100)))
        source = rf"^(?:[{some}]|{number:x}abc|\p{{L}}{{3,9}}){{1,{rng.randint(2, 6)}}}$"
        strings = Strings(patterns=frozenset((source,)), excluded=frozenset((f"{number}" * 200,)))
        pattern = ecma_regex.read_pattern(source)
        assert pattern.json_must and pattern.examples and not string_rules.is_too_large(source)
        assert string_language.admits_any(strings) and string_rules.automaton(strings)
        string_language.short_strings(strings)
    assert traced() - before <= sum(each.cache.num_bytes for each in CACHES) + SLACK


def answer(grammar: CompiledGrammar, vocabulary: Vocabulary, rng: random.Random) -> None:
    """Draw an answer of at most 100 tokens."""
    matcher, row = grammar.matcher(), np.zeros(vocabulary.num_words, dtype=np.int32)
    for left in range(100, 0, -1):
        matcher.fill_mask(row, left)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        assert matcher.accept(int(rng.choice(allowed.tolist())))
        if matcher.is_done:
            return
