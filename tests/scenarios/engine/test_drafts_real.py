"""With drafts a real model says what it says without: tokens, logprobs, adapters, penalties, seeds."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engine.draft_engine import compute_all_drafts
from support.speculation.draft_pair import DraftPair, requests

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Submit, TokenOut
from rootgraft.engine.types import Logprob, SamplingParams

pytestmark = pytest.mark.usefixtures("native_kernels_again")


@pytest.fixture(scope="module", autouse=True)
def drafting() -> Iterator[None]:
    """Drafts are computed whatever they cost here."""
    with pytest.MonkeyPatch.context() as patch:
        compute_all_drafts(patch)
        yield


@pytest.fixture(scope="module", params=[True, False], ids=["native", "torch"])
def pair(adapted_llama: Path, request: pytest.FixtureRequest) -> DraftPair:
    return DraftPair(adapted_llama, native=request.param, drafts={})


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_the_same_with_drafts_and_without(pair, seed):
    """Where torch computes (plain, or for shapes this odd), the last bits may depend on the batch."""
    asked = requests(seed)
    for (tokens, logprobs, end), (drafted, drafted_logprobs, drafted_end) in zip(
        pair.run("off", asked), pair.run("on", asked), strict=True
    ):
        assert drafted == tokens and drafted_end == end
        assert [entry.token for entry in drafted_logprobs] == [entry.token for entry in logprobs]
        for ours, theirs in zip(drafted_logprobs, logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_drafts_were_computed_and_some_stood(pair):
    """The property above says something only if there were any."""
    pair.run("on", requests(0))
    stats = pair.cores["on"].stats()
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
