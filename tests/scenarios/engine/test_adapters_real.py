"""The whole engine with adapters on a tiny Llama: its greedy tokens are those of transformers and peft."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.adapted_llama import INVOCATION
from support.models.lora_models import VOCAB, PeftOracle, base, greedy_by_peft

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.loading.base_layout import adapter_bytes, base_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.messages import Failed, LoadAdapter, Reply, Submit, TokenOut
from rootgraft.engine.types import SamplingParams
from rootgraft.kernels import ops


@pytest.fixture(scope="module")
def oracle(adapted_llama: Path):
    return greedy_by_peft("llama", adapted_llama)


class Engine:
    """A core on the tiny model with the adapters that are asked for."""

    def __init__(self, folder: Path, **options: Any) -> None:
        fields: dict[str, Any] = {"num_gpu_blocks_override": 60, "max_loras": 4, **options}
        config = EngineConfig(
            dtype="float32", device="cpu", threads=1, max_num_seqs=8, enable_lora=True, lora_dir=str(folder), **fields
        )
        self.core = EngineCore.load(config, folder / "llama")
        self.cached: dict[int, int] = {}

    def run(self, asked: list[tuple[str | None, list[int], int]]) -> list[list[int]]:
        """Tokens of prompts that are submitted together."""
        tokens: dict[int, list[int]] = {}
        for number, (name, prompt, count) in enumerate(asked):
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            self.core.handle([Submit(number, array("i", prompt), params, name)])
            tokens[number] = []
        while self.core.has_work:
            for message in self.core.step():
                assert not isinstance(message, Failed), message
                if isinstance(message, TokenOut):
                    tokens[message.id] += message.tokens
                elif hasattr(message, "usage"):
                    self.cached[message.id] = message.usage.cached
            self.core.check()
        return list(tokens.values())


@pytest.fixture
def engine(adapted_llama: Path):
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(adapted_llama, **options))
        return engines[-1]

    yield make
    for each in engines:
        each.core.close()
    ops.use_native(True)


NAMES = [None, "small", "large", "dora", "words"]
ASKED = [(name, [(3 * i + j * (i + 2)) % VOCAB for j in range(20 + i)], 16) for i, name in enumerate([*NAMES, *NAMES])]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 9, "block_size": 1, "num_gpu_blocks_override": 600},
        {"max_loras": 2, "max_cpu_loras": 2},
        {"native_kernels": False},
        {"block_size": 4, "num_gpu_blocks_override": 26},
    ],
    ids=["plain", "chunked", "two_slots", "torch", "few_pages"],
)
def test_greedy_tokens_are_pefts(engine, oracle, options):
    """Base and adapters of different ranks in one batch; then once more, from the cache."""
    ours = engine(**options)
    wanted = [oracle(*each) for each in ASKED]
    assert ours.run(ASKED) == wanted
    assert ours.run(ASKED) == wanted
    if "num_gpu_blocks_override" not in options:
        assert all(ours.cached[number] >= 16 for number in range(len(ASKED)))
    assert (ours.core.stats()["preemptions"] > 0) == (options.get("num_gpu_blocks_override") == 26)


def test_an_activated_adapter_goes_on_from_the_base_models_kv_and_back(engine, oracle):
    ours = engine()
    context = [(5 * i) % 90 + 9 for i in range(37)]
    turn = [*context, *INVOCATION, 30]
    assert ours.run([(None, context, 4)]) == [oracle(None, context, 4)]
    assert ours.run([("activated", turn, 8)]) == [oracle("activated", turn, 8)]
    assert ours.cached[0] == len(context)
    assert ours.run([(None, turn, 8), ("activated", context, 4), ("activated", turn, 8)]) == [
        oracle(None, turn, 8),
        oracle(None, context, 4),
        oracle("activated", turn, 8),
    ]


def test_a_new_version_under_an_old_name(engine, oracle, adapted_llama):
    ours = engine()
    prompt = ASKED[0][1]
    for path in ("small", "large", "small"):
        ours.core.handle([LoadAdapter(1, "name", path, replace=True)])
        replies = [m for _ in range(2) if ours.core.has_work for m in drain(ours.core) if isinstance(m, Reply)]
        assert [reply.failure for reply in replies] == [None]
        assert ours.run([("name", prompt, 6)]) == [oracle(path, prompt, 6)]


def drain(core: EngineCore) -> list[Any]:
    messages = []
    while core.has_work:
        messages += core.step()
    return messages


def test_prompt_logprobs_are_the_adapters(engine, oracle, adapted_llama):
    """The head's adapter works on the prompt's positions as well, each row with its own."""
    ours = engine()
    prompt = ASKED[3][1]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    for number, name in enumerate((None, "dora")):
        ours.core.handle([Submit(number, array("i", prompt), params, name)])
    scores: dict[int, list[float]] = {0: [], 1: []}
    for message in drain(ours.core):
        if isinstance(message, TokenOut):
            scores[message.id] += [each.logprob for each in message.prompt_logprobs]
    for number, name in enumerate((None, "dora")):
        logits = (
            PeftOracle("llama", adapted_llama).logits(adapted_llama / name if name else None, prompt).log_softmax(-1)
        )
        wanted = logits[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
        assert scores[number] == pytest.approx(wanted, abs=1e-4)


def test_the_layout_gives_the_checkpoints_weights(adapted_llama):
    model = load_model(adapted_llama / "llama", dtype=torch.float32, device=torch.device("cpu"))
    layout = base_layout(model, adapted_llama / "llama", dummy=False)
    theirs = base("llama", adapted_llama)
    for module in ("model.layers.1.self_attn.k_proj", "model.embed_tokens", "lm_head"):
        assert torch.equal(layout.read_weight(module), theirs.get_submodule(module).weight)
        assert layout.read_bias(module) is None
    assert adapter_bytes(layout, 2) == 2 * adapter_bytes(layout, 1) > 0
