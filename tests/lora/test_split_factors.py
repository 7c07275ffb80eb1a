"""Adapters over tensor-parallel ranks: the logits of one rank, for the kinds of PEFT's adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.lockstep_ranks import run_ranks
from support.models.lora_driver import AdaptedRun
from support.models.lora_models import CPU, LINEARS, base, make_adapter
from support.models.peft_matrix import EVERYTHING, OPTIONS, options_of
from support.models.tiny_models import save
from torch import Tensor

from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.loading.base_layout import base_layout, planned_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.rank_splits import module_splits
from rootgraft.engine.loading.shards import Shard
from rootgraft.kernels.collectives import ALONE, Ranks
from rootgraft.kernels.lora_ops import Factors, pack_expansion
from rootgraft.lora.base_projections import EMBEDDING, BaseLayout
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.prepare_factors import PreparedAdapter, join_factors
from rootgraft.lora.read_adapter import AdapterReader
from rootgraft.lora.split_factors import ModuleSplit, split_adapter

PROMPTS = [[3, 9, 27, 81, 41, 22, 66], [5, 25, 24, 19], [11, 20, 18]]
KINDS = (
    "rank 23",
    "patterns and rslora",
    "dora",
    "lora_bias",
    "bias all and lora_bias",
    "everything by patterns",
    "dora head",
)


@pytest.mark.parametrize("family", ["llama", "llama_biased", "qwen2", "gemma3", "phi3"])
def test_ranks_have_the_logits_of_one(family: str, tmp_path: Path) -> None:
    """Steps of three rows: two adapters and none, with two ranks, and with four over two KV heads."""
    base(family, tmp_path)
    folder = tmp_path / family
    kinds = KINDS if family in ("llama_biased", "phi3") else KINDS[::3]
    options = [options_of(family, {"r": 5, "target_modules": ["q_proj"]} | OPTIONS[kind]) for kind in kinds]
    adapters = [
        make_adapter(family, tmp_path, tmp_path / str(seed), seed=seed, **each) for seed, each in enumerate(options)
    ]
    whole = planned_layout(folder, torch.float32, CPU, dummy=False)
    read = [AdapterReader(whole, 64).read(str(path), trusted=True) for path in adapters]

    def compute(ranks: Ranks) -> list[Tensor]:
        shard = None if ranks is ALONE else Shard.of(whole_config, ranks)
        model = load_model(folder, dtype=torch.float32, device=CPU, shard=shard)
        splits = dict(module_splits(whole_config, ranks.rank, ranks.size)) if ranks.size > 1 else {}
        bank = AdapterBank(base_layout(model, folder, dummy=False), len(read))
        for slot, adapter in enumerate(read):
            bank.install(slot, split_adapter(adapter, whole, splits, ranks.rank))
        return [
            torch.cat(AdaptedRun(model, bank, [slot, -1, (slot + 1) % len(read)]).extend(PROMPTS))
            for slot in range(len(read))
        ]

    whole_config = load_model(folder, dtype=torch.float32, device=torch.device("meta"), dummy=True).config
    expected = compute(ALONE)
    for size in (2, 4):
        for found, wanted in zip(run_ranks(size, compute)[0], expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss", "bamba", "qwen3_next", "kimi_linear"])
def test_ranks_have_the_logits_of_one_with_every_module_adapted(family: str, tmp_path: Path) -> None:
    """Experts, heads of latent attention and recurrent mixers too; DoRA scales what ranks add up."""
    save(family, tmp_path)
    whole = planned_layout(tmp_path, torch.float32, CPU, dummy=False)
    adapter = adapter_of_all(whole)

    def compute(ranks: Ranks) -> Tensor:
        shard = None if ranks is ALONE else Shard.of(config, ranks)
        model = load_model(tmp_path, dtype=torch.float32, device=CPU, shard=shard)
        splits = dict(module_splits(config, ranks.rank, ranks.size)) if ranks.size > 1 else {}
        bank = AdapterBank(base_layout(model, tmp_path, dummy=False), 1)
        bank.install(0, split_adapter(adapter, whole, splits, ranks.rank))
        return torch.cat(AdaptedRun(model, bank, [0, -1, 0]).extend(PROMPTS))

    config = read_model_config(tmp_path)
    expected = compute(ALONE)
    found = run_ranks(2, compute)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def adapter_of_all(layout: BaseLayout) -> PreparedAdapter:
    """A random adapter of every product of a base, with gains and addends of those that all tokens pass."""
    generator = torch.Generator().manual_seed(1)
    factors = {}
    for shape in layout.products:
        if shape.name == EMBEDDING:
            continue
        rank, size = 3, sum(shape.sizes)
        of_all = shape.place is None
        factors[shape.name] = Factors(
            a=torch.randn(rank * len(shape.sizes), shape.width, generator=generator) * 0.2,
            scale=torch.full((rank * len(shape.sizes),), 0.5),
            ranks=(rank,) * len(shape.sizes),
            b=torch.cat([pack_expansion(torch.randn(each, rank, generator=generator) * 0.2) for each in shape.sizes]),
            gain=0.8 + 0.4 * torch.rand(size, generator=generator) if of_all else None,
            add=0.1 * torch.randn(size, generator=generator) if of_all else None,
        )
    block, factors = join_factors(factors, pinned=False)
    return PreparedAdapter(factors, "all", (), 3, block.nbytes, block)


def test_a_shard_takes_its_share_of_memory(tmp_path: Path) -> None:
    """B of column products and A of row products are split; what each rank has whole is theirs' other factor."""
    adapter, whole = prepared(tmp_path)
    config = load_model(tmp_path / "llama", dtype=torch.float32, device=torch.device("meta"), dummy=True).config
    parts = [split_adapter(adapter, whole, dict(module_splits(config, rank, 2)), rank) for rank in range(2)]
    for name, factors in adapter.factors.items():
        split = [part.factors[name] for part in parts]
        by_inputs = name.endswith(("o_proj", "down_proj"))
        cells = [each.a.numel() if by_inputs else each.b.numel() for each in split]
        assert sum(cells) == (factors.a.numel() if by_inputs else factors.b.numel())
        assert all(
            torch.equal(each.b if by_inputs else each.a, factors.b if by_inputs else factors.a) for each in split
        )
    assert all(part.num_bytes < adapter.num_bytes for part in parts)


def prepared(folder: Path) -> tuple[PreparedAdapter, object]:
    base("llama", folder)
    path = make_adapter("llama", folder, folder / "a", r=4, target_modules=LINEARS)
    whole = planned_layout(folder / "llama", torch.float32, CPU, dummy=False)
    return AdapterReader(whole, 64).read(str(path), trusted=True), whole


def test_runs_are_taken_in_their_order() -> None:
    split = ModuleSplit("outputs", ((1, 3), (5, 6)))
    assert split.size == 3
    assert split.take(torch.arange(7), 0).tolist() == [1, 2, 5]
    assert split.take(torch.arange(14).view(2, 7), 1).tolist() == [[1, 2, 5], [8, 9, 12]]


assert set(KINDS) <= OPTIONS.keys() and set(LINEARS) < set(EVERYTHING)
