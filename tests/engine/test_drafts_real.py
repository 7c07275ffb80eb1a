"""With drafts a real model says what it says without: tokens, logprobs, adapters, penalties, seeds."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Done, LoadAdapter, Submit, TokenOut
from rootgraft.engine.types import Logprob, SamplingParams
from rootgraft.kernels import ops

Answer = tuple[list[int], list[Logprob], str]


@pytest.fixture(scope="module", autouse=True)
def native_kernels_again():
    """The choice is the process's: leave it to the tests that follow as it was."""
    yield
    ops.use_native(True)


class Pair:
    """An engine without drafts and one with, on the same model and kernels."""

    def __init__(self, folder: Path, *, native: bool, pages: int = 200) -> None:
        self.native = native
        self.cores: dict[str, EngineCore] = {}
        for method in ("off", "auto"):
            config = EngineConfig(
                dtype="float32", device="cpu", threads=1, max_num_seqs=4, max_num_batched_tokens=32,
                num_gpu_blocks_override=pages, native_kernels=native, enable_lora=True, max_loras=2,
                speculative_config=f'{{"method": "{method}"}}',
            )  # fmt: skip
            self.cores[method] = EngineCore.load(config, folder / "llama")
            self.cores[method].handle([LoadAdapter(1000, "large", str(folder / "large"))])
            while self.cores[method].has_work:
                self.cores[method].step()

    def run(self, method: str, asked: list[tuple[list[int], dict[str, Any], str | None]]) -> list[Answer]:
        """What each request got, all of them at once."""
        ops.use_native(self.native)
        core = self.cores[method]
        for number, (prompt, params, adapter) in enumerate(asked):
            core.handle([Submit(number, array("i", prompt), SamplingParams(**params), adapter=adapter)])
        got: dict[int, tuple[list[int], list[Logprob]]] = {i: ([], []) for i in range(len(asked))}
        ends: dict[int, str] = {}
        while core.has_work:
            for message in core.step():
                if isinstance(message, TokenOut):
                    got[message.id][0].extend(message.tokens)
                    got[message.id][1].extend(message.logprobs)
                elif isinstance(message, Done):
                    ends[message.id] = message.reason
            core.check()
        return [(*got[i], ends[i]) for i in range(len(asked))]


@pytest.fixture(scope="module", params=[True, False], ids=["native", "torch"])
def pair(adapted_llama: Path, request: pytest.FixtureRequest) -> Pair:
    return Pair(adapted_llama, native=request.param)


def requests(seed: int, vocab: int = 60) -> list[tuple[list[int], dict[str, Any], str | None]]:
    """Prompts that repeat themselves, so that there is something to guess, and parameters of all kinds."""
    rng = random.Random(seed)
    asked: list[tuple[list[int], dict[str, Any], str | None]] = []
    for _ in range(6):
        phrase = [rng.randrange(vocab) for _ in range(rng.randint(2, 9))]
        kinds: list[dict[str, Any]] = [
            {},
            {"temperature": 0.7, "seed": rng.randrange(1000)},
            {"temperature": 1.0, "seed": 3, "top_p": 0.5, "top_k": 5},
            {"repetition_penalty": 1.3},
            {"frequency_penalty": 0.4, "presence_penalty": -0.3},
            {"logit_bias": ((phrase[0], 4.0), (phrase[1], -3.0)), "temperature": 0.3, "seed": 1},
            {"stop_token_ids": (phrase[0], 5, 17), "min_tokens": rng.choice([0, 6])},
        ]
        params = {"temperature": 0.0, "max_tokens": rng.randint(1, 40), "logprobs": 3, **rng.choice(kinds)}
        if rng.random() < 0.5:
            params["logprobs"] = None
        asked.append((phrase * rng.randint(1, 6), params, rng.choice([None, "large"])))
    return asked


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_the_same_with_drafts_and_without(pair, seed):
    """Where torch computes (plain, or for shapes this odd), the last bits may depend on the batch."""
    asked = requests(seed)
    for (tokens, logprobs, end), (drafted, drafted_logprobs, drafted_end) in zip(
        pair.run("off", asked), pair.run("auto", asked), strict=True
    ):
        assert drafted == tokens and drafted_end == end
        assert [entry.token for entry in drafted_logprobs] == [entry.token for entry in logprobs]
        for ours, theirs in zip(drafted_logprobs, logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_drafts_were_computed_and_some_stood(pair):
    """The property above says something only if there were any."""
    pair.run("auto", requests(0))
    stats = pair.cores["auto"].stats()
    assert stats["draft_tokens"] > stats["draft_tokens_accepted"] > 0
    assert pair.cores["off"].stats()["draft_tokens"] == 0


def test_with_our_kernels_not_a_bit_differs(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=112, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    prompt, params = [5, 9, 2, 40] * 6, SamplingParams(temperature=0.8, seed=4, max_tokens=60, logprobs=5)
    answers = []
    for method in ("off", "auto"):
        engine = EngineConfig(
            dtype="float32", device="cpu", threads=1, num_gpu_blocks_override=40,
            speculative_config=f'{{"method": "{method}"}}',
        )  # fmt: skip
        core = EngineCore.load(engine, tmp_path)
        core.handle([Submit(0, array("i", prompt), params)])
        logprobs: list[Logprob] = []
        while core.has_work:
            for message in core.step():
                logprobs += message.logprobs if isinstance(message, TokenOut) else ()
        answers.append(logprobs)
    assert answers[0] == answers[1]
    assert core.stats()["draft_tokens"] > 0
