"""Cuts of quantised matrices: each form of a part is that part of the whole one, and ranks have the logits of one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

import gguf
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.models.lockstep_ranks import run_ranks
from support.models.paged_run import CPU, run_whole
from support.models.quantised_parts import (
    COMPRESSED,
    MATRICES,
    ROWS,
    WIDTH,
    StoredMatrix,
    compressed,
    compressed_config,
)
from support.models.small_gguf import HALVES, SHAPES, random_blocks, tensors, write
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rootgraft.engine.checkpoint.gguf import GgufFile
from rootgraft.engine.checkpoint.model_config import ModelConfig
from rootgraft.engine.checkpoint.quantization_config import read_quantization
from rootgraft.engine.checkpoint.read_config import open_checkpoint, read_model_config
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.matrix_cuts import Run
from rootgraft.engine.loading.shards import Shard, ShardSource
from rootgraft.engine.loading.weight_forms import WeightForm
from rootgraft.engine.loading.weight_readers import GgufWeights, SafetensorsFolder, WeightSource
from rootgraft.kernels import quantised_weights
from rootgraft.kernels.collectives import Alone, Ranks
from rootgraft.kernels.grouped_weights import NumberForm, dequantise, pack_grouped
from rootgraft.kernels.layouts.packed_weights import Format
from rootgraft.kernels.ops import GroupedLinear, QuantisedLinear
from rootgraft.lora.split_factors import ModuleSplit

pytestmark = pytest.mark.skipif(not quantised_weights.available(), reason="no compiler")

Side = Literal["inputs", "outputs"]
KINDS = gguf.GGMLQuantizationType
FOLDERS = ("w4a16", "w4a16 asymmetric", "w8a8", "fp8 blocks")
FILES = {"Q4_0": 128, "Q8_0": 64, "Q4_K": 512, "Q6_K": 512}
"""Types of blocks, and the width of a model whose halves are whole blocks."""
OUT_OF_ORDER = ("gptq by activations",)
MATRIX, MODULE = "blk.0.attn_output.weight", "model.layers.0.self_attn.o_proj"
SUPER_WIDTH = 1024


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return replace(read_model_config(save_llama(tmp_path_factory.mktemp("llama"))), tied_head=False)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, WeightSource]]:
    """A matrix in each stored form, by the module's name in its source."""
    found: dict[str, tuple[str, WeightSource]] = {}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for kind, make in (MATRICES | dict.fromkeys(OUT_OF_ORDER, by_activations)).items():
            matrix, folder = make(), tmp_path_factory.mktemp("matrix")
            parts = {f"m.{name}": part.contiguous() for name, part in matrix.parts.items()}
            save_file(parts, folder / "model.safetensors")
            quantization = read_quantization({"quantization_config": matrix.config})
            found[kind] = "m", SafetensorsFolder(folder, (), quantization)
    folder = tmp_path_factory.mktemp("files")
    for name in HALVES:
        kind = KINDS[name]
        content = tensors() | {MATRIX: random_blocks(kind, ROWS, SUPER_WIDTH, bits=0x23)}
        file = open_checkpoint(write(folder / f"{name}.gguf", content, types={MATRIX: kind}))
        assert isinstance(file, GgufFile)
        found[name] = MODULE, GgufWeights(file, read_model_config(file))
    return found


def by_activations() -> StoredMatrix:
    """GPTQ whose inputs are not in the order of their groups."""
    matrix = MATRICES["gptq 4 bits"]()
    return replace(matrix, parts=matrix.parts | {"g_idx": matrix.parts["g_idx"][torch.randperm(WIDTH)]})


def in_every_form(source: WeightSource, name: str) -> dict[str, Tensor]:
    """A matrix as each kind of kernel would read it, dequantised."""
    widened = torch.empty(source.shapes[name])
    source.read(name, widened)
    found, all_rows = {"widened": widened}, torch.arange(len(widened))
    numbers = source.numbers(name)
    if numbers is not None and (grouped := pack_grouped([numbers], CPU, torch.bfloat16)) is not None:
        found["numbers"] = dequantise(grouped)
    if (stored := source.byte_rows(name)) is not None:
        assert stored.scales is not None
        form = Format.FLOAT8 if stored.numbers is NumberForm.E4M3 else Format.WIDENED
        packed = quantised_weights.pack_bytes(stored.pieces, stored.shape, stored.scales, form=form)
        found["bytes"] = quantised_weights.rows(packed, all_rows)
    if (blocks := source.blocks(name)) is not None and blocks[0] in quantised_weights.BLOCK_SIZES:
        rows = torch.cat(list(blocks[1]))
        block_type = cast(quantised_weights.BlockType, blocks[0])
        found["blocks"] = quantised_weights.rows(
            quantised_weights.pack_blocks(rows, block_type, widened=True), all_rows
        )
    return found


def part_of(source: WeightSource, module: str, config: ModelConfig, side: Side, runs: tuple[Run, ...]) -> ShardSource:
    return ShardSource(source, Shard(config, Alone(), config, {module: ModuleSplit(side, runs)}))


@pytest.mark.parametrize("kind", [*MATRICES, *OUT_OF_ORDER, *HALVES])
@settings(max_examples=4, deadline=None)
@example(edges={32, 64, 96}, step=1, side="inputs")
@example(edges={0, 1}, step=1, side="outputs")
@given(
    edges=st.sets(st.integers(0, ROWS), min_size=2, max_size=4),
    step=st.sampled_from((1, 8, 16, 32, 64)),
    side=st.sampled_from(("inputs", "outputs")),
)
def test_a_part_in_any_form_is_that_part_of_the_whole(
    kind: str, edges: set[int], step: int, side: Side, config: ModelConfig, sources: dict[str, tuple[str, WeightSource]]
) -> None:
    """Of random runs of rows and columns, cut within groups too."""
    module, source = sources[kind]
    name = f"{module}.weight"
    whole = torch.empty(source.shapes[name])
    source.read(name, whole)
    width = whole.shape[1] if side == "inputs" else ROWS
    ends = sorted({min(width, edge * width // ROWS // step * step) for edge in edges} | {width})
    runs = tuple(zip(ends[::2], ends[1::2], strict=False))
    if not runs:
        return
    dim = 0 if side == "outputs" else 1
    expected = torch.cat([whole.narrow(dim, first, end - first) for first, end in runs], dim)
    for form, found in in_every_form(part_of(source, module, config, side, runs), name).items():
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=lambda text, form=form: f"{form}: {text}")


@pytest.mark.parametrize("kind", [*MATRICES, *OUT_OF_ORDER, *HALVES])
def test_halves_stay_as_they_are_stored(
    kind: str, config: ModelConfig, sources: dict[str, tuple[str, WeightSource]]
) -> None:
    """A half has each form that the whole has, of widths that blocks and groups divide; sizes are known ahead."""
    module, source = sources[kind]
    name = f"{module}.weight"
    rows, width = source.shapes[name]
    for side, size in (("outputs", rows), ("inputs", width)):
        part = part_of(source, module, config, cast(Side, side), ((size // 2, size),))
        lost = set(in_every_form(source, name)) - set(in_every_form(part, name))
        assert lost == LOST.get((kind, side), set())
        if (known := part.stored(name)) is not None and (blocks := part.blocks(name)) is not None:
            assert known == (blocks[0], sum(piece.numel() for piece in blocks[1]))


LOST = {
    ("gptq by activations", "inputs"): {"numbers"},
    ("compressed-tensors nvfp4", "inputs"): {"blocks"},
    ("modelopt nvfp4", "inputs"): {"blocks"},
}
"""Forms that half of a matrix has not: inputs of all groups are in either half, or half a row is less than a block."""


def save_llama(folder: Path) -> Path:
    fields = {"vocab_size": 258, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    torch.manual_seed(4)
    LlamaForCausalLM(LlamaConfig(**fields, **heads)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of which matrices are quantised: folders, and files of blocks and of super-blocks."""
    folder = tmp_path_factory.mktemp("models")
    found = {
        kind: quantised_folder(folder / kind, kind) for kind in ("w4a16", "w4a16 asymmetric", "w8a8", "fp8 blocks")
    }
    for name, width in FILES.items():
        found[name] = quantised_file(folder / f"{name}.gguf", KINDS[name], width)
    return found


def quantised_folder(folder: Path, kind: str) -> Path:
    """A Llama whose projections compressed-tensors has quantised, with scales in half precision."""
    save_llama(folder)
    form, args = COMPRESSED[kind]
    stored: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            stored[name] = weight
            continue
        parts, _ = compressed(form, args, weight.float())
        parts = {part: tensor.half() if part == "weight_scale" else tensor for part, tensor in parts.items()}
        stored |= {
            f"{name.removesuffix('weight')}{part}": each.contiguous() for part, each in parts.items() if each.numel()
        }
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": compressed_config(form, args)}))
    return folder


def quantised_file(path: Path, kind: gguf.GGMLQuantizationType, hidden: int) -> Path:
    """A GGUF file of one layer, all of whose matrices are blocks of a type; its head is the embedding."""
    heads, inner = {"q": 4, "k": 2, "v": 2}, 2 * hidden
    shapes = {name: (*shape[:-1], hidden) for name, shape in SHAPES.items()}
    shapes |= {"blk.0.ffn_gate.weight": (inner, hidden), "blk.0.ffn_up.weight": (inner, hidden)}
    shapes |= {"blk.0.ffn_down.weight": (hidden, inner), "blk.0.attn_output.weight": (hidden, hidden)}
    shapes |= {f"blk.0.attn_{name}.weight": (hidden // 4 * count, hidden) for name, count in heads.items()}
    kinds = {name: kind for name, shape in shapes.items() if len(shape) == 2}
    content = tensors(shapes)
    for name in kinds:
        content[name] = (
            gguf.quants.quantize(content[name] / hidden**0.5, kind)
            if kind in CODED
            else (random_blocks(kind, *shapes[name], bits=0x13))
        )
    return write(path, content, types=kinds, embedding_length=hidden, feed_forward_length=inner)


CODED = (KINDS.Q4_0, KINDS.Q8_0)


@pytest.mark.parametrize("form", ["stored", "stored_widened", "stored_dynamic", "grouped"])
@pytest.mark.parametrize("kind", [*FOLDERS, *FILES])
def test_ranks_have_the_logits_of_one(kind: str, form: WeightForm, models: dict[str, Path]) -> None:
    """And each keeps its part of as many matrices as they are stored as one rank does."""
    config = read_model_config(models[kind])

    def compute(ranks: Ranks) -> tuple[Tensor, int]:
        shard = None if ranks.size == 1 else Shard.of(config, ranks)
        model = load_model(models[kind], dtype=torch.float32, device=CPU, weights=form, shard=shard)
        kept = [isinstance(each.packed, QuantisedLinear | GroupedLinear) for each in model.projections]
        return run_whole(model, [3, 0, 31, 7, 9, 12]), sum(kept)

    expected, kept = compute(Alone())
    (found, kept_there), _ = run_ranks(2, compute)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert kept == kept_there
