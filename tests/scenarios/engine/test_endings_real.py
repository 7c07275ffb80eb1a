"""Endings read by the engine on a tiny Llama: their logprobs are the sums of transformers' and peft's."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.lora_models import VOCAB, PeftOracle

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.offline.offline_engine import CoreLink
from rootgraft.engine.serving.adapter_tokenizers import ServedTokenizer
from rootgraft.engine.serving.ending_tree import EndingTree
from rootgraft.engine.serving.output_processor import OutputProcessor, SequenceOutput, TextDelta
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.serving.sequence_table import SequenceTable
from rootgraft.engine.types import SamplingParams

Question = tuple[str | None, list[int], list[list[int]]]
"""An adapter, a prompt and its endings."""


class Tokens:
    """Token ids are all that endings need."""

    special_ids: frozenset[int] = frozenset()
    eos_ids: tuple[int, ...] = ()

    def token_bytes(self, token: int) -> bytes:
        return b"<%d>" % token

    def join_bytes(self, tokens: Any, skip_special_tokens: bool) -> bytes:
        return b"".join(map(self.token_bytes, tokens))


class Receiver:
    def __init__(self) -> None:
        self.running: dict[int, OutputProcessor] = {}
        self.outputs: dict[int, SequenceOutput] = {}

    def add(self, delta: TextDelta) -> None:
        self.outputs.setdefault(delta.prompt, SequenceOutput()).add(delta)

    def fail(self, error: Exception) -> None:
        raise error


class Engine:
    def __init__(self, folder: Path, **options: Any) -> None:
        fields: dict[str, Any] = {"num_gpu_blocks_override": 200, "max_loras": 4, "max_num_seqs": 8, **options}
        config = EngineConfig(
            dtype="float32", device="cpu", threads=1, enable_lora=True, lora_dir=str(folder), **fields
        )
        self.core = EngineCore.load(config, folder / "llama")
        self.table = SequenceTable(CoreLink(self.core))

    def read(self, asked: list[Question]) -> tuple[list[list[float]], int]:
        """The logprobs of endings of several prompts that are read together, and the tokens that were computed."""
        trees = [EndingTree(array("i", prompt), endings) for _, prompt, endings in asked]
        requests, receiver = [], Receiver()
        for (adapter, prompt, _), tree in zip(asked, trees, strict=True):
            whole = TextRequest(array("i", prompt), SamplingParams(), adapter=adapter)
            requests += [read.request(whole) for read in tree.reads]
        self.table.start(requests, receiver, ServedTokenizer(Tokens(), VOCAB))  # type: ignore[arg-type]
        while self.core.has_work:
            self.table.take(self.core.step())
            self.core.check()
        outputs = iter([receiver.outputs[number] for number in range(len(requests))])
        sums = [tree.sums([read.logprobs(next(outputs)) for read in tree.reads]) for tree in trees]
        used = [output.finish.usage for output in receiver.outputs.values() if output.finish]
        return sums, sum(each.prompt - each.cached for each in used)


@pytest.fixture
def engine(adapted_llama: Path) -> Iterator[Any]:
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(adapted_llama, **options))
        return engines[-1]

    yield make
    for each in engines:
        each.core.close()


def wanted(oracle: PeftOracle, adapter: Path | None, prompt: list[int], ending: list[int]) -> float:
    logprobs = oracle.logits(adapter, [*prompt, *ending]).log_softmax(-1)
    return sum(float(logprobs[len(prompt) + at - 1, token]) for at, token in enumerate(ending))


def questions(names: list[str | None], seed: int, length: int = 37) -> list[Question]:
    """Prompts that begin with one text, each with endings of one to five tokens that share beginnings."""
    chance = random.Random(seed)
    text = [chance.randrange(VOCAB) for _ in range(length)]
    asked = []
    for name in names:
        prompt = text + [chance.randrange(VOCAB) for _ in range(chance.randrange(1, 6))]
        first = [chance.randrange(VOCAB) for _ in range(2)]
        endings = [
            [*first[: chance.randrange(3)], *(chance.randrange(VOCAB) for _ in range(chance.randrange(1, 4)))]
            for _ in range(6)
        ]
        asked.append((name, prompt, [*endings, endings[0][:1], endings[1]]))
    return asked


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 9, "block_size": 1, "num_gpu_blocks_override": 3000},
        {"block_size": 4, "num_gpu_blocks_override": 40},
        {"enable_prefix_caching": False},
    ],
    ids=["plain", "chunked", "few_pages", "no_cache"],
)
def test_sums_are_those_of_peft(engine, adapted_llama: Path, options: dict[str, Any]):
    """Base and adapters in one batch; then once more, from the cache."""
    ours, oracle = engine(**options), PeftOracle("llama", adapted_llama)
    asked = questions([None, "small", "dora", None], 1)
    right = [
        [wanted(oracle, name and adapted_llama / name, prompt, ending) for ending in endings]
        for name, prompt, endings in asked
    ]
    for _ in range(2):
        sums, _ = ours.read(asked)
        for got, expected in zip(sums, right, strict=True):
            assert got == pytest.approx(expected, abs=1e-4)


def test_a_text_is_computed_once_for_all_questions_and_endings(engine):
    """What begins in one step may compute few tokens twice, where that is quicker than to wait; the text never."""
    ours = engine(num_gpu_blocks_override=300, max_num_batched_tokens=512)
    asked = questions([None] * 6, 2, length=100)
    _, computed = ours.read(asked)
    trees = [EndingTree(array("i", prompt), endings) for _, prompt, endings in asked]
    reads = [read for tree in trees for read in tree.reads]
    behind = sum(len(read.tokens) - 100 for read in reads)
    assert 100 < computed <= 100 + behind + 16 * len(reads)
    _, again = ours.read(asked)
    assert again <= sum(len(read.tokens) - read.scored_from + 16 for read in reads)


def test_the_probabilities_of_all_endings_of_a_length_sum_to_one(engine):
    ours = engine()
    [sums], _ = ours.read([(None, [3, 4, 5], [[token] for token in range(VOCAB)])])
    assert torch.tensor(sums, dtype=torch.float64).exp().sum() == pytest.approx(1, abs=1e-5)
