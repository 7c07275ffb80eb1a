"""A real model says the same whether steps are planned ahead or not: tokens, logprobs, masks, penalties, adapters.

The forward pass of a step then begins with tokens that are on the device alone, and is launched before the draw of its
own tokens may begin. A CPU computes at once what it is given, in the order of the calls that a GPU gets.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.core_hooks import worker_of
from support.models.lora_models import VOCAB

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.executor.input_builder import DrawnTokens, fill_in
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.messages import Abort, Done, LoadAdapter, Message, Submit, TokenOut, TokenTexts
from rootgraft.engine.types import Logprob, SamplingParams
from rootgraft.grammar.spec import GrammarSpec

METHODS = ("off", "auto")
NUM_SEEDS = 4
MODES = [(method, overlaps) for method in METHODS for overlaps in (False, True)]


class Said:
    """What became of each sequence."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Logprob]] = {}
        self.scores: dict[int, list[Logprob]] = {}
        self.ends: dict[int, tuple[Any, ...]] = {}

    def take(self, messages: list[Message]) -> None:
        for message in messages:
            assert isinstance(message, (TokenOut, Done)), message
            if isinstance(message, TokenOut):
                self.tokens.setdefault(message.id, []).extend(message.tokens)
                self.logprobs.setdefault(message.id, []).extend(message.logprobs)
                self.scores.setdefault(message.id, []).extend(message.prompt_logprobs)
            else:
                self.ends[message.id] = message.reason, message.stop_token, message.usage.completion


def make_core(folder: Path, method: str, overlaps: bool, **options: Any) -> EngineCore:
    config = EngineConfig(
        **{
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "max_num_seqs": 6,
            "block_size": 4,
            "max_num_batched_tokens": 24,
            "speculative_config": f'{{"method": "{method}"}}',
            **options,
        }
    )
    worker = Worker(config, folder)
    worker.overlaps = overlaps
    return EngineCore(config, worker)


@pytest.fixture(scope="module", params=[False, True], ids=["recorded", "eager"])
def cores(adapted_llama: Path, request: pytest.FixtureRequest) -> Iterator[dict[tuple[str, bool], EngineCore]]:
    """Engines of all modes, with few pages and fewer slots than adapters."""
    made = {}
    for mode in MODES:
        core = made[mode] = make_core(
            adapted_llama / "llama", *mode, num_gpu_blocks_override=18, enable_lora=True, max_loras=1,
            enforce_eager=request.param,
        )  # fmt: skip
        [end] = worker_of(core).eos_ids
        texts = [b"<end>" if token == end else bytes([32 + token % 95]) for token in range(VOCAB)]
        core.handle([TokenTexts(array("i", map(len, texts)), b"".join(texts), (end,))])
        core.handle(
            [LoadAdapter(1000 + i, name, str(adapted_llama / name)) for i, name in enumerate(("small", "large"))]
        )
        while core.has_work:
            core.step()
    yield made
    for core in made.values():
        core.close()


def submits(seed: int) -> list[Submit]:
    """Prompts that repeat themselves or begin as others do, and parameters of all kinds."""
    rng = random.Random(seed)
    asked = []
    for number in range(14):
        phrase = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 7))]
        prompt = [*[rng.choice((3, 5))] * rng.randrange(10), *phrase * rng.randint(1, 3)]
        fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": rng.randint(1, 25)}
        fields |= rng.choice(
            [
                {},
                {"temperature": 1.0, "seed": rng.randrange(9), "top_k": rng.choice((0, 5)), "top_p": 0.9},
                {"temperature": 0.8, "seed": rng.randrange(9), "min_p": 0.05},
                {"presence_penalty": 1.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
                {"logit_bias": ((rng.randrange(VOCAB), 100.0), (0, -100.0))},
                {"stop_token_ids": tuple(rng.sample(range(VOCAB), 30)), "min_tokens": rng.choice([0, 4])},
                {"prompt_logprobs": 2, "logprobs": 2},
                {"grammar": rng.choice(("[0-9]{4}", "(a|b)+", "yes, certainly|no"))},
            ]
        )
        pattern = fields.pop("grammar", None)
        spec = GrammarSpec.regex(pattern) if pattern else None
        fields.setdefault("logprobs", rng.choice((None, None, 3)))
        asked.append(
            Submit(
                number,
                array("i", prompt),
                SamplingParams(**fields),
                rng.choice((None, "small", "large")),
                grammar=spec and (spec.kind.value, spec.content),
            )
        )
    return asked


def run(core: EngineCore, asked: list[Submit], seed: int) -> tuple[Said, set[int]]:
    rng, said = random.Random(seed), Said()
    aborted: set[int] = set()
    for submit in asked:
        core.handle([submit])
        for _ in range(rng.randrange(4)):
            said.take(core.step())
            core.check()
        if rng.random() < 0.15:
            aborted.add(rng.randint(0, submit.id))
            core.handle([Abort(tuple(aborted))])
    while core.has_work:
        said.take(core.step())
        core.check()
    return said, aborted


@pytest.fixture(scope="module")
def runs(cores: dict[tuple[str, bool], EngineCore]) -> list[tuple[dict[tuple[str, bool], Said], set[int]]]:
    """By seed, what all engines said to the same, and what was aborted."""
    made = []
    for seed in range(NUM_SEEDS):
        ran = {mode: run(core, submits(seed), seed) for mode, core in cores.items()}
        made.append(({mode: said for mode, (said, _) in ran.items()}, ran["off", False][1]))
    return made


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_answers_are_the_same_ahead_or_not(
    runs: list[tuple[dict[tuple[str, bool], Said], set[int]]], seed: int
) -> None:
    """Where torch computes, the last bits of a logprob may depend on the batch."""
    asked = submits(seed)
    results, aborted = runs[seed]
    plain = results["off", False]
    for mode, said in results.items():
        assert said.ends.keys() == plain.ends.keys(), mode
        for submit in asked:
            i = submit.id
            if i in aborted:
                short = min(len(said.tokens.get(i, [])), len(plain.tokens.get(i, [])))
                assert said.tokens.get(i, [])[:short] == plain.tokens.get(i, [])[:short], (mode, submit)
                continue
            assert said.tokens.get(i) == plain.tokens.get(i), (mode, submit)
            assert said.ends[i] == plain.ends[i]
            for ours, theirs in ((said.logprobs, plain.logprobs), (said.scores, plain.scores)):
                assert [each.token for each in ours.get(i, [])] == [each.token for each in theirs.get(i, [])]
                for mine, other in zip(ours.get(i, []), theirs.get(i, []), strict=True):
                    assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)


@pytest.mark.usefixtures("runs")
def test_all_that_could_go_wrong_was_there(cores: dict[tuple[str, bool], EngineCore]) -> None:
    """Otherwise the tests above have shown less than they say."""
    for (method, _), core in cores.items():
        stats = core.stats()
        names = ["preemptions", "prompt_tokens_cached", "grammar_compiled", "finished_abort", "finished_stop"]
        if method == "auto":
            names += ["draft_tokens_accepted", "forced_tokens"]
        assert min(stats[name] for name in names) > 0, {name: stats[name] for name in names}


def test_with_our_kernels_not_a_bit_differs(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=112, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    params: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 4},
        {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"temperature": 1.0, "seed": 1, "top_p": 0.8},
    ]
    answers = []
    for overlaps in (False, True):
        core = make_core(tmp_path, "off", overlaps, num_gpu_blocks_override=60, max_num_seqs=3)
        for number, fields in enumerate(params):
            prompt = array("i", [5, 9, 2, 40, number])
            core.handle([Submit(number, prompt, SamplingParams(max_tokens=30, logprobs=5, **fields))])
        said = Said()
        while core.has_work:
            said.take(core.step())
        answers.append(said)
    assert answers[0].logprobs == answers[1].logprobs
    assert answers[0].tokens == answers[1].tokens and len(answers[0].tokens[0]) == 30


def test_ids_on_the_device_come_in_place_of_their_rows() -> None:
    drawn = DrawnTokens(np.array([4, 1]), torch.tensor([17, 40]), {2: 9}, vocab_size=30)
    ids = np.array([3, ~1, ~2, 0, ~4])
    there = drawn.enter(ids)
    assert there is not None
    assert fill_in(torch.from_numpy(ids), there).tolist() == [3, 29, 9, 0, 17]  # 40 is of a row that failed
    assert drawn.enter(np.array([3, 0])) is None
    known = np.array([~2])
    assert DrawnTokens(np.zeros(0, np.int64), None, {2: 9}, 30).enter(known) is None and known.tolist() == [9]
