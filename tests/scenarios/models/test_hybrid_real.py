"""Hybrid models in the whole engine against transformers and PEFT: prefix hits, chunks, batches, preemption, adapters.

Every drawn token's logprob is compared in fp32, so a state that is a token off, or another sequence's, shows at once.
"""

from __future__ import annotations

import json
import random
import warnings
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.core_hooks import preempt, scheduler_of, tree_of, worker_of
from support.engine.draft_engine import drafting_despite_others
from support.models.tiny_models import VOCAB, adaptable, save, tiny_model
from torch import Tensor

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.messages import Done, Failed, LoadAdapter, Submit, TokenOut
from rootgraft.engine.types import Logprob, SamplingParams
from rootgraft.kernels import ops
from rootgraft.radix.namespace import Path as TreePath

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from peft import LoraConfig, get_peft_model

MODELS = (
    "lfm2",
    "lfm3",
    "granite_hybrid",
    "granite_hybrid_mixture",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "bamba",
    "nemotron_h_mixture",
    "mamba2",
    "falcon_h1",
    "jamba",
    "kimi_linear",
    "zamba2",
    "bailing_hybrid",
    "olmo_hybrid",
    "olmo_hybrid_rotated",
)
RANDOM = random.Random(3)
SYSTEM = [RANDOM.randrange(3, VOCAB) for _ in range(18)]


class Hybrid:
    """A tiny model with an adapter on every linear module, and its oracle."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.base = save(name, folder / "base")
        torch.manual_seed(4)
        options = LoraConfig(
            r=3,
            lora_alpha=9,
            target_modules="all-linear",
            exclude_modules=["dt_proj"] if name == "jamba" else None,  # whose weight its code reads itself
            init_lora_weights=False,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = get_peft_model(adaptable(name), options).eval()
            adapted.save_pretrained(folder / "adapter")
        self.adapter = folder / "adapter"
        self.oracles: dict[str | None, Any] = {None: tiny_model(name), "a": adapted}
        self.known: dict[tuple[str | None, tuple[int, ...]], Tensor] = {}

    def core(self, *, overlaps: bool = False, **options: Any) -> EngineCore:
        fields = {"num_gpu_blocks_override": 24, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}
        config = EngineConfig(dtype="float32", device="cpu", threads=1, enable_lora=True, **fields | options)
        worker = Worker(config, self.base)
        worker.overlaps = overlaps
        core = EngineCore(config, worker)
        core.handle([LoadAdapter(9999, "a", str(self.adapter))])
        while core.has_work:
            replies = core.step()
            assert not any(isinstance(message, Failed) for message in replies), replies
        return core

    @torch.no_grad()
    def check(self, submit: Submit, tokens: list[int], logprobs: list[Logprob]) -> None:
        """Compare the logprobs of an answer with those of the whole text in one pass."""
        logits = self.logits(submit.adapter, (*submit.tokens, *tokens))[len(submit.tokens) - 1 : -1]
        theirs = logits.log_softmax(-1)[range(len(tokens)), tokens]
        ours = torch.tensor([entry.logprob for entry in logprobs])
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * logits.abs().max().item())

    def logits(self, adapter: str | None, text: tuple[int, ...]) -> Tensor:
        """What the oracle gives for a text, which several tests and answers have in common."""
        key = adapter, text
        if key not in self.known:
            self.known[key] = self.oracles[adapter](input_ids=torch.tensor([text])).logits[0]
        return self.known[key]


@pytest.fixture(scope="module", params=MODELS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    return Hybrid(request.param, tmp_path_factory.mktemp(request.param))


class Talk:
    """Requests to a core; each answer is checked against the oracle when it is done."""

    def __init__(self, hybrid: Hybrid, core: EngineCore) -> None:
        self.hybrid, self.core = hybrid, core
        self.answers: dict[int, tuple[Submit, list[int], list[Logprob]]] = {}
        self.cached: dict[int, int] = {}

    def ask(self, prompt: list[int], count: int, adapter: str | None = None, *, seed: int | None = None) -> int:
        number = len(self.answers)
        seed = number if seed is None else seed
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=count, ignore_eos=True, logprobs=1)
        submit = Submit(number, array("i", prompt), params, adapter)
        self.answers[number] = submit, [], []
        self.core.handle([submit])
        return number

    def run(self, preempt_every: int = 0) -> None:
        steps = 0
        while self.core.has_work:
            for message in self.core.step():
                if isinstance(message, TokenOut):
                    _, tokens, logprobs = self.answers[message.id]
                    tokens += message.tokens
                    logprobs += message.logprobs
                else:
                    assert isinstance(message, Done), message
                    self.cached[message.id] = message.usage.cached
                    self.hybrid.check(*self.answers[message.id])
            self.core.check()
            steps += 1
            running = scheduler_of(self.core).running
            if preempt_every and steps % preempt_every == 0 and running:
                preempt(self.core, running[0])

    def text(self, number: int) -> list[int]:
        submit, tokens, _ = self.answers[number]
        return [*submit.tokens, *tokens]


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_logprob_is_that_of_transformers(hybrid: Hybrid, overlaps: bool) -> None:
    """Each model with recorded passes and without, and each of these with steps ahead in half of the models."""
    eager = overlaps ^ bool(MODELS.index(hybrid.name) % 2)
    core = hybrid.core(overlaps=overlaps, enforce_eager=eager)
    talk, rng = Talk(hybrid, core), random.Random(1)
    for _ in range(3):  # turns of conversations, answers to one prompt, and adapters beside none
        asked = []
        for adapter in (None, "a"):
            start = [*SYSTEM, *(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 12)))]
            asked += [talk.ask(start, rng.randint(3, 12), adapter) for _ in range(2)]
        talk.run()
        for number in asked:
            talk.ask([*talk.text(number), 5, 7, 9], rng.randint(2, 9), talk.answers[number][0].adapter)
        talk.run(preempt_every=3)
    assert sum(cached > 0 for cached in talk.cached.values()) > len(talk.cached) // 2
    assert core.stats()["preemptions"] > 0
    core.close()


def test_a_hit_gives_the_same_bits(hybrid: Hybrid) -> None:
    """What is computed from a checkpoint is what is computed from the beginning."""
    core = hybrid.core()
    talk = Talk(hybrid, core)
    prompt = [*SYSTEM, 11, 12, 13]
    for _ in range(2):
        talk.ask(prompt, 4, seed=1)
        talk.run()
    assert talk.cached == {0: 0, 1: 20}
    (_, tokens, logprobs), (_, again, others) = talk.answers.values()
    assert tokens == again
    tolerance = 0 if ops.native_kernels() else 1e-6
    assert [entry.logprob for entry in logprobs] == pytest.approx([entry.logprob for entry in others], rel=tolerance)
    core.close()


def test_a_restart_gives_the_same_bits_from_disk_and_from_a_file(hybrid: Hybrid, tmp_path: Path) -> None:
    """States come back with the pages before them, those of the adapter for the adapter alone."""
    prompt, file, said = [*SYSTEM, 11, 12, 13], tmp_path / "prefix", []
    for options, cached in (
        ({"kv_disk": str(tmp_path)}, (0, 0)),
        ({"kv_disk": str(tmp_path)}, (20, 20)),
        ({}, (20, 0)),
    ):
        core = hybrid.core(**options)
        if not options:
            assert core.prefix_transfer().load(file) == 20
        talk = Talk(hybrid, core)
        for number, adapter in enumerate((None, "a", None)):
            talk.ask(prompt, 4, adapter, seed=number)
            talk.run()
        assert talk.cached == {0: cached[0], 1: cached[1], 2: 20}
        said.append([entry for _, _, logprobs in talk.answers.values() for entry in logprobs])
        base = TreePath(next(each for each in tree_of(core).tops if each.adapter is None))
        assert core.prefix_transfer().save(base, array("i", prompt), file) == 20
        core.close()
    tolerance = 0 if ops.native_kernels() else 1e-6
    for again in said[1:]:
        assert [entry.token for entry in again] == [entry.token for entry in said[0]]
        assert [each.logprob for each in again] == pytest.approx([each.logprob for each in said[0]], rel=tolerance)


def test_the_start_says_what_states_take(hybrid: Hybrid) -> None:
    core = hybrid.core()
    [line] = [line for line in core.ready.summary if line.startswith("Recurrent states")]
    assert "At most 6 drafts in a step" in line and "checkpoints of prefixes" in line
    slots = worker_of(core).states
    assert slots is not None and (slots.num_rows, slots.num_drafts) == (6, 6)
    core.close()


@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_that_are_accepted_and_rejected(hybrid: Hybrid, overlaps: bool) -> None:
    """Answers with the seeds of others, which the tree proposes, and with seeds of their own, which leave these."""
    core = hybrid.core(overlaps=overlaps, num_gpu_blocks_override=64)
    talk = Talk(hybrid, core)
    for turn in range(4):
        for adapter in (None, "a"):
            for seed in (1, 1, 10 + turn):
                talk.ask(SYSTEM, 16, adapter, seed=seed)
        talk.run(preempt_every=7 if turn == 2 else 0)
    stats = core.stats()
    assert 0 < stats["draft_tokens_accepted"] < stats["draft_tokens"]
    first = {adapter: talk.answers[number][1] for number, adapter in ((0, None), (3, "a"))}
    for submit, tokens, _ in talk.answers.values():
        assert submit.params.seed != 1 or tokens == first[submit.adapter]
    core.close()


def test_a_draft_model_beside_recurrent_states(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A draft model without states, whose draws share the seeds of the answers and so are right now and then."""
    drafting_despite_others(monkeypatch, 3)
    draft = save("llama", tmp_path / "draft")
    core = hybrid.core(speculative_config=json.dumps({"model": str(draft)}), num_gpu_blocks_override=40)
    talk = Talk(hybrid, core)
    for turn in range(2):
        for adapter in (None, "a"):
            for length in (18, 11):
                talk.ask(SYSTEM[:length], 16, adapter)
        talk.run(preempt_every=7 if turn else 0)
    stats = core.stats()
    assert 0 < stats["drafts_accepted_model"] < stats["drafted_model"] and stats["preemptions"]
    core.close()


def test_without_a_prefix_cache(hybrid: Hybrid) -> None:
    core = hybrid.core(enable_prefix_caching=False)
    talk = Talk(hybrid, core)
    for _ in range(3):
        talk.ask(SYSTEM, 6)
    talk.run(preempt_every=4)
    assert set(talk.cached.values()) == {0}
    core.close()


def test_states_that_leave_nothing_for_kv_are_refused_with_what_fits(hybrid: Hybrid) -> None:
    def start(rows: int) -> None:
        limits = {"max_num_seqs": rows, "max_num_batched_tokens": 2048, "kv_cache_memory": 0.001}
        Worker(EngineConfig(dtype="float32", device="cpu", **limits), hybrid.base)

    with pytest.raises(ConfigError, match="Try: rootgraft serve --max-num-seqs") as caught:
        start(2048)
    start(int(str(caught.value).split()[-1]))
