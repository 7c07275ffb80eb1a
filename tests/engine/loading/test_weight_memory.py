"""Memory of weights, known before they are read, against what they then take; and its refusal."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from support.models.quantised_llama import held_bytes, write_blocks
from support.models.small_gguf import HIDDEN, SHAPES, VOCAB, tensors, write

from rootgraft.engine.checkpoint.read_config import open_checkpoint, read_model_config
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.loading import weight_forms
from rootgraft.engine.loading.load_model import load_model, open_source
from rootgraft.engine.loading.weight_forms import WeightForm
from rootgraft.engine.loading.weight_memory import weight_bytes
from rootgraft.engine.machine import resources
from rootgraft.kernels import ops, quantised_weights
from rootgraft.kernels.layouts.packed_weights import Format

CPU, KINDS = torch.device("cpu"), gguf.GGMLQuantizationType
MATRICES = [name for name, shape in SHAPES.items() if len(shape) == 2]
COUNT = sum(map(math.prod, SHAPES.values()))
IN_MATRICES = sum(math.prod(SHAPES[name]) for name in MATRICES)

pytestmark = pytest.mark.skipif(not quantised_weights.available(), reason="no compiler")


def file(folder: Path, kind: gguf.GGMLQuantizationType, *, tied: bool = True) -> Path:
    shapes = SHAPES if tied else SHAPES | {"output.weight": (VOCAB, HIDDEN)}
    names = MATRICES if tied else [*MATRICES, "output.weight"]
    return write(folder / f"{kind.name}.gguf", tensors(shapes), types=dict.fromkeys(names, kind))


def size(path: Path, form: WeightForm, dtype: torch.dtype = torch.bfloat16) -> int:
    checkpoint = open_checkpoint(path)
    config = read_model_config(checkpoint)
    return weight_bytes(open_source(checkpoint, config, dummy=False), config, dtype, form)


def test_bytes_by_form(tmp_path: Path) -> None:
    q4 = file(tmp_path, KINDS.Q4_0)
    vectors = COUNT - IN_MATRICES
    assert size(q4, "plain") == 2 * (COUNT + VOCAB * HIDDEN)  # rows of the tied head are looked up in a second copy
    assert size(q4, "plain", torch.float32) == 4 * (COUNT + VOCAB * HIDDEN)
    assert size(q4, "stored") == size(q4, "stored_dynamic") == IN_MATRICES * 18 // 32 + 2 * vectors
    assert size(q4, "stored_both") == IN_MATRICES * 18 // 32 + 2 * COUNT  # without that copy
    assert size(q4, "int8_dynamic") == size(q4, "int8_weight_only") == IN_MATRICES + 2 * vectors
    untied = file(tmp_path, KINDS.Q8_0, tied=False)
    assert size(untied, "plain") == 2 * (COUNT + VOCAB * HIDDEN)
    assert size(untied, "stored_both") == size(untied, "stored") + 2 * IN_MATRICES
    assert size(untied, "int8_dynamic") == IN_MATRICES + 2 * (vectors + VOCAB * HIDDEN)


def test_types_without_a_kernel_count_as_plain(tmp_path: Path) -> None:
    path = file(tmp_path, KINDS.BF16)
    assert size(path, "stored") == size(path, "plain")


@pytest.mark.parametrize("form", ["plain", "stored", "stored_both", "int8_dynamic"])
def test_weights_load_where_they_just_fit(tmp_path: Path, form: WeightForm) -> None:
    path = file(tmp_path, KINDS.Q4_0)
    needed = size(path, form)
    load_model(path, dtype=torch.bfloat16, device=CPU, weights=form, available=needed)
    if form in ("plain", "stored_both"):  # then blocks are kept as stored
        needed = size(path, "stored_widened")
    with pytest.raises(ConfigError, match=r"^The weights need .* GiB .*; .* of memory are available\."):
        load_model(path, dtype=torch.bfloat16, device=CPU, weights=form, available=needed - 1)


def test_blocks_stay_as_stored_where_widened_ones_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same bits, so that nobody need be asked."""
    path = file(tmp_path, KINDS.Q4_0)
    enough, least = size(path, "plain"), size(path, "stored_widened")
    models = [load_model(path, dtype=torch.bfloat16, device=CPU, available=count) for count in (enough, enough - 1)]
    assert "kept as stored" in capsys.readouterr().err
    plain, kept = (model.layers[0].mlp.down.packed for model in models)
    assert isinstance(kept, ops.QuantisedLinear) and not isinstance(plain, ops.QuantisedLinear)
    x = torch.randn(3, plain.in_features).bfloat16()
    assert torch.equal(ops.linear(x, plain), ops.linear(x, kept))
    load_model(path, dtype=torch.bfloat16, device=CPU, available=least)
    with pytest.raises(ConfigError, match=r"in bfloat16; .* Free some memory, or use a smaller model\.$"):
        load_model(path, dtype=torch.bfloat16, device=CPU, available=least - 1)


def test_a_refusal_names_the_form_that_fits(tmp_path: Path) -> None:
    path = file(tmp_path, KINDS.BF16)
    with pytest.raises(ConfigError, match=r"in bfloat16; .* Try: rootgraft serve --quantization int8_dynamic \(0\.0 G"):
        load_model(path, dtype=torch.bfloat16, device=CPU, available=size(path, "plain") - 1)
    path = file(tmp_path, KINDS.Q4_0)
    with pytest.raises(ConfigError, match=r"with --quantization gguf; .* Free some memory, or use a smaller model\.$"):
        load_model(path, dtype=torch.bfloat16, device=CPU, weights="stored", available=100)


def test_a_gpu_is_advised_no_form_that_it_lacks(tmp_path: Path) -> None:
    path = file(tmp_path, KINDS.BF16)
    with pytest.raises(ConfigError, match=r"on the GPU beside the smallest KV pool\. Free some") as caught:
        load_model(path, dtype=torch.bfloat16, device=torch.device("cuda"), available=size(path, "plain") - 1)
    assert "--quantization" not in str(caught.value)


def test_the_engine_asks_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path, KINDS.Q4_0)
    found = replace(resources.memory(), available=1000)
    monkeypatch.setattr(resources, "memory", lambda: found)
    with pytest.raises(ConfigError, match="The weights need"):
        Worker(EngineConfig(model=str(path), device="cpu", dtype="bfloat16", kv_cache_memory=0.01), path)


def test_the_start_says_which_form_is_for_how_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_forms, "measure_few_rows", lambda form, _: 1 if form is Format.BYTES else 64)
    monkeypatch.setattr(weight_forms, "_takes_dynamic", lambda *_: False)  # as on CPUs with products of bfloat16
    types = dict.fromkeys(MATRICES, KINDS.Q4_1) | {"token_embd.weight": KINDS.Q8_0}
    path = write(tmp_path / "model.gguf", tensors(), types=types)
    both = Worker(EngineConfig(model=str(path), device="cpu", dtype="bfloat16", kv_cache_memory=0.01), path)
    assert (
        "; bfloat16 on cpu, weights in 4-bit blocks for steps of up to 64 rows and 8-bit blocks for steps of 1 row, "
        "else widened; "
    ) in both.summary[0]
    config = EngineConfig(model=str(path), device="cpu", dtype="bfloat16", quantization="gguf", kv_cache_memory=0.01)
    assert "; bfloat16 on cpu, weights in 4-bit blocks and 8-bit blocks; " in Worker(config, path).summary[0]


def test_values_of_another_type_than_queries_and_keys_stay_in_it(tmp_path: Path) -> None:
    """As in files of Q4_K_M; q, k and v are one product nevertheless."""
    path = write_blocks(tmp_path / "model.gguf", KINDS.Q4_K, others={"blk.0.attn_v.weight": KINDS.Q6_K})
    model = load_model(path, dtype=torch.bfloat16, device=CPU, max_positions=1, weights="stored_widened")
    parts = ops.parts_of(model.layers[0].projections[0].packed)
    assert [each.format.unarranged for each in parts if isinstance(each, ops.QuantisedLinear)] == [
        Format.SUPER_NIBBLES, Format.SUPER_6_BITS,
    ]  # fmt: skip
    assert abs(size(path, "stored_widened") / held_bytes(model) - 1) < 0.05
    assert not model.widened


@pytest.mark.parametrize("form", ["stored_widened", "grouped"])
@pytest.mark.parametrize(
    "kind",
    [
        *("Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ2_S", "MXFP4", "Q5_0", "Q5_1", "NVFP4"),
        *("TQ2_0", "IQ3_S", "IQ1_M"),
    ],
)
def test_planned_bytes_are_what_a_loaded_model_holds(kind: str, form: WeightForm, tmp_path: Path) -> None:
    path = write_blocks(tmp_path / "model.gguf", KINDS[kind])
    model = load_model(path, dtype=torch.bfloat16, device=CPU, max_positions=1, weights=form)
    assert abs(size(path, form) / held_bytes(model) - 1) < 0.05
    assert not model.widened


@pytest.mark.parametrize("kind", ["MXFP4", "IQ1_S", "IQ3_XXS"])
def test_a_matrix_with_a_scale_that_no_blocks_hold_is_planned_widened(kind: str, tmp_path: Path) -> None:
    """An exponent below those of half precision, and a factor whose half or eighth is."""
    path = write_blocks(tmp_path / "model.gguf", KINDS[kind])
    (gate,) = (each for each in gguf.GGUFReader(path, "r+").tensors if each.name == "blk.0.ffn_gate.weight")
    gate.data.reshape(-1)[0] = 1
    gate.data.flush()
    model = load_model(path, dtype=torch.bfloat16, device=CPU, max_positions=1, weights="stored_widened")
    assert model.widened == (kind,)
    assert abs(size(path, "stored_widened") / held_bytes(model) - 1) < 0.02
