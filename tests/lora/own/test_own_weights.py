"""Adapters with weights in place of the base model's are PEFT's, in mixed batches and chunks, with any vocabulary.

Each option alone: ``test_peft_matrix.py``. Tokens, prefix hits and drafts: ``test_own_weights_engine.py``.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.lora_driver import AdaptedRun
from support.models.lora_folders import (
    EMBEDDING,
    HIDDEN,
    file_of,
    good_config,
    good_tensors,
    key,
    small_reader,
    write_folder,
)
from support.models.lora_folders import VOCAB as SMALL
from support.models.lora_models import LINEARS, VOCAB, decoder, make_adapter
from support.models.peft_matrix import bank_of, off, prompt, reader
from support.models.resized_base import ADDED, KINDS, ResizedOracle, make_resized_adapter

from rootgraft.kernels import ops
from rootgraft.lora.adapter_weights import sort_tensors
from rootgraft.lora.config import read_config
from rootgraft.lora.errors import AdapterError
from rootgraft.lora.host_cache import HostCache
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.own.own_weights_maker import OwnWeightsMaker
from rootgraft.lora.prepare_factors import PreparedAdapter, prepare
from rootgraft.lora.safetensors_file import read_tensors

TIED = ("qwen2", "gemma2", "gemma3")
FAMILIES = ("llama", *TIED, "qwen3")
UNTIED_ONLY = ("trl", "lora of both", "dora of both")  # PEFT ties them, or cannot compute them, where the base does


def kinds_of(family: str) -> list[str]:
    return [
        kind for kind in KINDS if not (family in TIED and kind in UNTIED_ONLY) and (family in TIED or kind != "tied")
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_mixed_batches(family: str, bases: Path, tmp_path: Path) -> None:
    """Rows of the base, of LoRA and of adapters with vocabularies of all sizes share steps that cut them anywhere."""
    rng = random.Random(family)
    folders: list[Path | None] = [
        None,
        make_adapter(family, bases, tmp_path / "lora", target_modules=[*LINEARS, "lm_head"][:7]),
    ]
    folders.append(make_adapter(family, bases, tmp_path / "rows", 5, trainable_token_indices=[7, 30, 31]))
    norms: dict[str, Any] = {"modules_to_save": ["norm"], "bias": "all"}
    folders.append(make_adapter(family, bases, tmp_path / "norms", 6, **norms))
    for seed, kind in enumerate(kinds_of(family)):
        added = (ADDED, -3)[kind == "saved both"]
        folders.append(make_resized_adapter(family, bases, tmp_path / kind, seed, added, **KINDS[kind]))
    adapters = [reader(family, bases).read(str(folder)) for folder in folders if folder]
    slots = [*range(-1, len(adapters)), len(adapters) - 1, -1]
    sizes = [VOCAB, *((adapter.own and adapter.own.vocab_size) or VOCAB for adapter in adapters)]
    assert set(sizes) == {VOCAB - 3, VOCAB, VOCAB + ADDED}
    rows = [[rng.randrange(sizes[slot + 1]) for _ in range(rng.randint(3, 20))] for slot in slots]
    for row, slot in zip(rows, slots, strict=True):
        row[1:3] = [sizes[slot + 1] - 1, 7]
    run = AdaptedRun(decoder(family, bases), bank_of(family, bases, adapters), slots)
    parts: list[list[torch.Tensor]] = [[] for _ in rows]
    left = list(rows)
    while any(left):
        cut = [rng.randint(1, 9) for _ in left]
        for part, logits in zip(parts, run.extend([t[:n] for t, n in zip(left, cut, strict=True)]), strict=True):
            part.append(logits)
        left = [tokens[n:] for tokens, n in zip(left, cut, strict=True)]
    oracle = ResizedOracle(family, bases)
    widest = max(sizes)
    for tokens, slot, part in zip(rows, slots, parts, strict=True):
        expected = oracle.logits(folders[slot + 1], tokens)
        size = sizes[slot + 1]
        assert expected.shape[1] == size
        padded = [torch.nn.functional.pad(each, (0, widest - each.shape[1]), value=-torch.inf) for each in part]
        actual = torch.cat(padded)
        assert (actual[:, size:] == -torch.inf).all()
        assert off(actual[:, :size], expected) < 1e-4


def test_a_row_of_the_base_has_the_same_bits_beside_any(bases: Path, tmp_path: Path) -> None:
    kinds = ("saved both", "trl")
    folders = [make_resized_adapter("llama", bases, tmp_path / kind, 1, **KINDS[kind]) for kind in kinds]
    adapters = [reader("llama", bases).read(str(folder)) for folder in folders]
    bank, prompts = bank_of("llama", bases, adapters), [prompt(index, 9) for index in range(3)]
    together = AdaptedRun(decoder("llama", bases), bank, [0, -1, 1]).extend(prompts)
    for index, slot in enumerate((0, -1, 1)):
        alone = AdaptedRun(decoder("llama", bases), bank, [slot]).extend([prompts[index]])[0]
        assert torch.equal(together[index][:, : alone.shape[1]], alone)


def test_the_best_token_of_one_adapter_is_found_without_all_logits(bases: Path, tmp_path: Path) -> None:
    folder = make_resized_adapter("llama", bases, tmp_path / "both", 1, **KINDS["saved both"])
    bank, model = bank_of("llama", bases, [reader("llama", bases).read(str(folder))]), decoder("llama", bases)
    hidden = torch.randn(4, model.config.hidden_size)
    for slots in ([0] * 4, [0, -1, 0, -1]):
        own = bank.own_step(torch.tensor(slots, dtype=torch.int32).numpy())
        assert own is not None and (own.best(hidden) is None) == (-1 in slots)
        assert model.best(hidden, None, own).column.tolist() == model.logits(hidden, None, own).argmax(1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 2), (16, 8), (101, 40), (37, 6)])
def test_packing_apart_is_packing(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(dtype)
    apart, packed = ops.pack_linear_apart(weight), ops.pack_linear(weight)
    assert torch.equal(apart.weight, packed.weight) and apart.kernels is packed.kernels
    x = torch.randn(3, shape[1]).to(dtype)
    assert torch.equal(ops.linear(x, apart, torch.float32), ops.linear(x, packed, torch.float32))


def written(folder: Path, seed: int, rows: int = SMALL, matrix: int = 0) -> PreparedAdapter:
    """An adapter of the small base with an embedding and a head of ``rows`` tokens, the same for each ``matrix``."""
    g = torch.Generator().manual_seed(matrix)
    own = {key(name, "weight"): torch.randn(rows, HIDDEN, generator=g) for name in (EMBEDDING, "lm_head")}
    config = good_config(modules_to_save=["embed_tokens", "lm_head"])
    return small_reader().read(str(write_folder(folder, config, file_of({**good_tensors(seed), **own}))))


def test_as_many_tokens_as_may_be_added(tmp_path: Path) -> None:
    adapter = written(tmp_path / "most", 0, SMALL + 4096)
    assert adapter.own is not None and adapter.own.vocab_size == SMALL + 4096
    with pytest.raises(AdapterError, match="at most 4,096"):
        written(tmp_path / "more", 0, SMALL + 4097)


def test_equal_matrices_are_stored_and_counted_once(tmp_path: Path) -> None:
    small = small_reader()

    def read(name: str, seed: int, matrix: int) -> PreparedAdapter:
        written(tmp_path / name, seed, matrix=matrix)
        return small.read(str(tmp_path / name))

    first, second, other = read("a", 1, 0), read("b", 2, 0), read("c", 3, 1)
    assert first.digest != second.digest and first.own is not None and second.own is not None
    assert first.own.matrices == second.own.matrices != (other.own and other.own.matrices)
    cache = HostCache(1 << 20)
    matrices = sum(each.num_bytes for each in first.own.matrices)
    for adapter in (first, second, other):
        cache.put(adapter)
    assert cache.num_bytes == first.num_bytes + second.num_bytes + other.num_bytes - matrices
    cache.drop(first.digest)
    assert cache.num_bytes == second.num_bytes + other.num_bytes
    cache.drop(second.digest)
    cache.drop(other.digest)
    assert cache.num_bytes == 0
    bank = AdapterBank(small.layout, 2)
    bank.install(0, first)
    bank.install(1, second)
    step = bank.own_step(torch.tensor([0, 1], dtype=torch.int32).numpy())
    assert step is not None
    assert step.parts[0][1].matrices == step.parts[1][1].matrices
    bank.clear(0)
    assert bank.own_step(torch.tensor([0, 0], dtype=torch.int32).numpy()) is None


def test_the_digest_knows_every_own_weight(tmp_path: Path) -> None:
    """Whatever of them differs, its KV is another's."""
    config: dict[str, Any] = {"modules_to_save": ["layernorm"], "trainable_token_indices": [3], "bias": "all"}
    tensors = {
        key("model.layers.0.input_layernorm", "weight"): torch.ones(HIDDEN),
        key(EMBEDDING, "token_adapter.trainable_tokens_delta"): torch.ones(1, HIDDEN),
        key("model.layers.0.self_attn.k_proj", "bias"): torch.ones(4),
    }
    digests = set()
    for at, changed in enumerate([None, *tensors]):
        own = {name: tensor * (2 if name == changed else 1) for name, tensor in tensors.items()}
        folder = write_folder(tmp_path / str(at), good_config(**config), file_of({**good_tensors(), **own}))
        digests.add(small_reader().read(str(folder)).digest)
    other = write_folder(tmp_path / "other", good_config(**config | {"trainable_token_indices": [4]}),
                         file_of({**good_tensors(), **tensors}))  # fmt: skip
    digests.add(small_reader().read(str(other)).digest)
    assert len(digests) == len(tensors) + 2


@pytest.mark.parametrize("kind", ["saved both", "tied"])
def test_where_weights_are_not_packed_a_tied_matrix_is_stored_once(kind: str, bases: Path, tmp_path: Path) -> None:
    """As on a GPU: head and embedding have one layout there, and the logits are those of packed weights."""
    family = "qwen2"
    folder = make_resized_adapter(family, bases, tmp_path / "adapter", 1, **KINDS[kind])
    inner = reader(family, bases)
    packed = inner.read(str(folder))
    tensors = read_tensors(folder / "adapter_model.safetensors", 1 << 30)
    config = read_config((folder / "adapter_config.json").read_bytes())
    weights = sort_tensors(tensors, config, inner.layout, 64)
    elsewhere = replace(inner.layout, device=torch.device("meta"))
    own = OwnWeightsMaker(elsewhere).make(weights.saved, weights.modules)
    plain = prepare(weights, inner.layout, own)
    assert own is not None and len(own.matrices) == (1 if kind == "tied" else 2)
    assert packed.own is not None and len(packed.own.matrices) == 2
    rows = [[VOCAB + 1, 5, 7, 9], [5, 6, 7]]
    results = [
        AdaptedRun(decoder(family, bases), bank_of(family, bases, [adapter]), [0, -1]).extend(rows)
        for adapter in (packed, plain)
    ]
    for first, second in zip(*results, strict=True):
        seen = first > -torch.inf
        assert torch.equal(seen, second > -torch.inf) and off(first[seen], second[seen]) < 1e-5
