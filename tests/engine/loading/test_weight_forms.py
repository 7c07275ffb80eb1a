"""The forms that weights take in memory: as a GGUF file stores them, plain, or rounded to 8 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import meta_gpu
from support.kernels.cpu_levels import WITHOUT_AMX, load_level
from support.models.paged_run import run_whole
from support.models.small_gguf import HALVES, HIDDEN, SHAPES, VOCAB, random_blocks, tensors, write
from support.models.tiny_models import oracle_logits, save

from rootgraft.engine.checkpoint.gguf import GgufFile
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError, ModelError
from rootgraft.engine.loading import measured_form, weight_forms, weight_readers
from rootgraft.engine.loading.gguf_numbers import GROUPED_TYPES, gguf_numbers, grouped_bits
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.measured_form import FEW_ROWS, FormSpeeds, StoredBlocks, most_rows
from rootgraft.engine.loading.weight_forms import WeightForm, choose_weight_form
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.models.experts import Experts
from rootgraft.kernels import ops, quantised_weights
from rootgraft.kernels.backend import LIBRARY
from rootgraft.kernels.cpu.native_ops import Kernels
from rootgraft.kernels.grouped_weights import GroupForm, NumberForm, Offsets, Scales, dequantise, pack_grouped
from rootgraft.kernels.layouts.packed_weights import Format
from rootgraft.kernels.triton.grouped_product import meta_part

CPU = torch.device("cpu")
KINDS = gguf.GGMLQuantizationType
SUPERS: dict[quantised_weights.BlockType, Format] = {
    "Q2_K": Format.SUPER_2_BITS,
    "Q3_K": Format.SUPER_3_BITS,
    "Q4_K": Format.SUPER_NIBBLES,
    "Q5_K": Format.SUPER_5_BITS,
    "Q6_K": Format.SUPER_6_BITS,
    "IQ4_XS": Format.SUPER_TABLE,
}
FORMATS = {KINDS.Q4_0: Format.SYMMETRIC, KINDS.Q4_1: Format.NIBBLES, KINDS.Q8_0: Format.BYTES}
MATRICES = [name for name, shape in SHAPES.items() if len(shape) == 2]

pytestmark = pytest.mark.skipif(not quantised_weights.available(), reason="no compiler")


MEASURED = measured_form.is_dynamic_faster.__wrapped__


@pytest.fixture(autouse=True)
def slow_activations_of_8_bits() -> Iterator[None]:
    """On every CPU the choice among forms with the same bits is tested, but where a test says otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measured_form, "is_dynamic_faster", lambda *_: False)
        yield


def load(path: Path, weights: WeightForm, dtype: torch.dtype = torch.bfloat16) -> DecoderModel:
    return load_model(path, dtype=dtype, device=CPU, weights=weights)


def forms(model: DecoderModel) -> list[Format | None]:
    packed = [part.packed for part in model.projections]
    return [part.format.unarranged if isinstance(part, ops.QuantisedLinear) else None for part in packed]


def assert_same_weights(quantised_model: DecoderModel, plain: DecoderModel, tolerance: float = 0.0) -> None:
    """Every row of every matrix, read back, is what the plain form multiplies with."""
    for part, other in zip(quantised_model.projections, plain.projections, strict=True):
        expected = ops.linear(torch.eye(other.packed.in_features), other.packed).T
        if isinstance(part.packed, ops.QuantisedLinear):
            found = quantised_weights.rows(part.packed, torch.arange(part.packed.out_features))
            torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("piece", [1, 8 << 20])
@pytest.mark.parametrize("kind", [KINDS.Q4_0, KINDS.Q4_1, KINDS.Q8_0])
def test_blocks_stay_as_they_are(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of q and k come in the published order, fused matrices in one piece, a tied head is the embedding."""
    monkeypatch.setattr(weight_readers, "_PIECE", piece)
    path = write(tmp_path / "model.gguf", tensors(), types=dict.fromkeys(MATRICES, kind))
    model, plain = load(path, "stored"), load(path, "plain", torch.float32)
    assert forms(model) == [FORMATS[kind]] * 5
    assert model.embedding is model.head.packed
    assert model.dtype is torch.bfloat16
    assert_same_weights(model, plain)
    tokens = torch.tensor([3, 0, VOCAB - 1])
    assert isinstance(plain.embedding, torch.Tensor)
    assert torch.equal(model._embed(tokens), plain.embedding[tokens])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [KINDS.Q4_0, KINDS.Q4_1, KINDS.Q8_0])
def test_widened_blocks_give_the_bits_of_plain_weights(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, dtype: torch.dtype
) -> None:
    path = write(tmp_path / "model.gguf", tensors(), types=dict.fromkeys(MATRICES, kind))
    model, plain = load(path, "stored_widened", dtype), load(path, "plain", dtype)
    assert forms(model) == [FORMATS[kind]] * 5
    tokens = [3, 0, VOCAB - 1, 7, 7, 12] * 6
    assert torch.equal(run_whole(model, tokens), run_whole(plain, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("few_rows", [1, 5, 1000])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [KINDS.Q4_0, KINDS.Q4_1, KINDS.Q8_0])
def test_both_forms_give_the_bits_of_plain_weights(
    tmp_path: Path,
    kind: gguf.GGMLQuantizationType,
    tied: bool,
    few_rows: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In chunks of any number of tokens: below, at and above the rows for which the blocks are used."""
    monkeypatch.setattr(weight_forms, "measure_few_rows", lambda *_: few_rows)
    shapes = SHAPES if tied else SHAPES | {"output.weight": (VOCAB, HIDDEN)}
    types = dict.fromkeys([name for name, shape in shapes.items() if len(shape) == 2], kind)
    path = write(tmp_path / "model.gguf", tensors(shapes), types=types)
    model, plain = load(path, "stored_both", dtype), load(path, "plain", dtype)
    packed = [part.packed for part in model.projections]
    assert all(isinstance(each, ops.QuantisedLinear) and each.widened is not None for each in packed)
    assert (model.embedding is model.head.packed) == tied
    assert isinstance(model.embedding, ops.QuantisedLinear) and (model.embedding.widened is not None) == tied
    tokens = [3, 0, VOCAB - 1, 7, 7, 12] * 6
    for count in (1, 5, 6, 36):
        assert torch.equal(run_whole(model, tokens[:count]), run_whole(plain, tokens[:count]))


def test_blocks_that_are_never_faster_are_widened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_forms, "measure_few_rows", lambda form, *_: 4 * (form is Format.BYTES))
    types = dict.fromkeys(MATRICES, KINDS.Q4_1) | {"token_embd.weight": KINDS.Q8_0}
    model = load(write(tmp_path / "model.gguf", tensors(), types=types), "stored_both")
    *layers, head = (part.packed for part in model.projections)
    assert not any(isinstance(each, ops.QuantisedLinear) for each in layers)
    assert isinstance(head, ops.QuantisedLinear) and head.widened is not None and head.widened.few_rows == 4


def test_what_has_no_kernel_or_differs_within_a_product_is_dequantised(tmp_path: Path) -> None:
    types = dict.fromkeys(MATRICES, KINDS.Q4_1) | {
        "blk.0.attn_v.weight": KINDS.Q8_0,
        "blk.0.ffn_down.weight": KINDS.BF16,
        "token_embd.weight": KINDS.F16,
    }
    model = load(write(tmp_path / "model.gguf", tensors(), types=types), "stored")
    assert forms(model) == [None, Format.NIBBLES, Format.NIBBLES, None, None]
    assert isinstance(model.embedding, torch.Tensor)


def test_a_head_of_its_own(tmp_path: Path) -> None:
    content = tensors(SHAPES | {"output.weight": (VOCAB, HIDDEN)})
    types = {"output.weight": KINDS.Q4_0, "token_embd.weight": KINDS.Q8_0}
    model = load(write(tmp_path / "model.gguf", content, types=types), "stored")
    assert isinstance(model.embedding, ops.QuantisedLinear) and isinstance(model.head.packed, ops.QuantisedLinear)
    assert (model.embedding.format, model.head.packed.format) == (Format.BYTES, Format.SYMMETRIC)


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    content = tensors()
    content["blk.0.attn_output.weight"][3, 5] = 1e30
    with np.errstate(over="ignore"):
        path = write(tmp_path / "model.gguf", content, types={"blk.0.attn_output.weight": KINDS.Q8_0})
    with pytest.raises(ModelError, match=r"o_proj\.weight is malformed: a block has a scale"):
        load(path, "stored")


@pytest.mark.parametrize(("weights", "form"), [("int8_weight_only", Format.WIDENED), ("int8_dynamic", Format.CHANNELS)])
def test_rounded_to_8_bits(tmp_path: Path, weights: WeightForm, form: Format) -> None:
    path = write(tmp_path / "model.gguf", tensors())
    model, plain = load(path, weights, torch.float32), load(path, "plain", torch.float32)
    assert set(forms(model)) == {form}
    largest = max(ops.linear(torch.eye(p.packed.in_features), p.packed).abs().max().item() for p in plain.projections)
    assert_same_weights(model, plain, largest / 127 * 0.51)


@pytest.mark.parametrize(("weights", "form"), [("int8_weight_only", Format.WIDENED), ("int8_dynamic", Format.CHANNELS)])
def test_experts_are_rounded_and_what_decides_is_not(tmp_path: Path, weights: WeightForm, form: Format) -> None:
    model = load(save("qwen2_moe", tmp_path), weights, torch.float32)
    experts = model.layers[0].mlp
    assert isinstance(experts, Experts) and experts.shared_gate is not None and experts.shared is not None
    for product in (experts.gate_up, experts.down):
        assert isinstance(product.weights.first, ops.QuantisedLinear) and product.weights.first.format is form
    assert isinstance(experts.shared.down.packed, ops.QuantisedLinear)
    assert not isinstance(experts.router.packed, ops.QuantisedLinear)
    assert not isinstance(experts.shared_gate.packed, ops.QuantisedLinear)
    tokens = [3, 99, 14, 77, 5, 120, 42]
    ours, theirs = run_whole(model, tokens), oracle_logits("qwen2_moe", tokens)
    assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.98


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=len(FEW_ROWS), max_size=len(FEW_ROWS)))
def test_blocks_are_used_for_as_many_rows_as_gain_most(speeds: list[float]) -> None:
    gains = {0: 1.0} | {rows: math.prod(speeds[: i + 1]) for i, rows in enumerate(FEW_ROWS)}
    chosen = most_rows(speeds)
    assert gains[chosen] == max(gains.values())
    if min(speeds) > 1:
        assert chosen == FEW_ROWS[-1]
    if max(speeds) < 1:
        assert chosen == 0


def test_one_disturbed_measurement_decides_little() -> None:
    assert most_rows([0.7, 1.8, 1.6, 1.1, 0.8]) == 128
    assert most_rows([1.4, 0.9, 0.9, 0.9, 1.0]) == 1


@pytest.mark.parametrize("form", [*FORMATS.values(), Format.SUPER_NIBBLES, Format.SUPER_6_BITS])
def test_few_rows_are_measured(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_form, "_FEW_SIZE", 1 << 16)
    assert measured_form.measure_few_rows.__wrapped__(form, torch.bfloat16) in (0, *FEW_ROWS)


@pytest.mark.parametrize("factor", [0.3, None])
@pytest.mark.parametrize("width", [256, 192])
def test_nvfp4_of_a_gguf_file(factor: float | None, width: int, tmp_path: Path) -> None:
    """By the gguf package, with the factor beside it; in 4 bits where rows are whole blocks of 256."""
    down = "blk.0.ffn_down"
    shapes = SHAPES | {f"blk.0.ffn_{side}.weight": (width, HIDDEN) for side in ("gate", "up")}
    content = tensors(shapes) | {f"{down}.weight": random_blocks(KINDS.NVFP4, HIDDEN, width)}
    want = gguf.quants.dequantize(content[f"{down}.weight"], KINDS.NVFP4)
    if factor:
        content |= {f"{down}.scale": np.array([factor], "f4"), f"{down}.input_scale": np.array([2], "f4")}
        want = want * np.float32(factor)
    path = write(tmp_path / "model.gguf", content, types={f"{down}.weight": KINDS.NVFP4}, feed_forward_length=width)
    plain, kept, grouped = (load(path, form, torch.float32) for form in ("plain", "stored_widened", "grouped"))
    (of_plain, of_kept, of_grouped) = (each.projections[3].packed for each in (plain, kept, grouped))
    assert isinstance(of_kept, ops.QuantisedLinear) == (width == 256)
    eye = torch.eye(width)
    torch.testing.assert_close(ops.linear(eye, of_plain).T, torch.from_numpy(want), rtol=1e-6, atol=0)
    assert torch.equal(ops.linear(eye, of_kept), ops.linear(eye, of_plain))
    torch.testing.assert_close(dequantise(of_grouped), torch.from_numpy(want), rtol=1e-6, atol=0)


def test_factors_of_nvfp4_that_no_matrix_has_are_refused(tmp_path: Path) -> None:
    down = "blk.0.ffn_down"
    shapes = SHAPES | {f"blk.0.ffn_{side}.weight": (256, HIDDEN) for side in ("gate", "up")}
    for factors, match in (
        ([1.0, 2.0], r"it is F32 \[2\]; F32 \[1\] is needed"),
        ([np.nan], "values that are not finite"),
    ):
        content = tensors(shapes) | {
            f"{down}.weight": random_blocks(KINDS.NVFP4, HIDDEN, 256),
            f"{down}.scale": np.array(factors, "f4"),
        }
        path = write(tmp_path / "model.gguf", content, types={f"{down}.weight": KINDS.NVFP4}, feed_forward_length=256)
        with pytest.raises(ModelError, match=rf"The tensor blk\.0\.ffn_down\.scale is malformed: .*{match}"):
            load(path, "plain")


@pytest.fixture
def big_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GgufFile:
    """A file whose blocks count as many bytes."""
    monkeypatch.setattr(measured_form, "LEAST_BYTES", 1)
    return GgufFile.open(write(tmp_path / "model.gguf", tensors(), types=dict.fromkeys(MATRICES, KINDS.Q4_1)))


@pytest.mark.parametrize(
    ("speeds", "form"),
    [
        ((3.0, 2.5, 1.9, 1.6, 1.1, 1.01), "stored_widened"),  # faster at every size
        ((3.0, 2.5, 1.9, 1.6, 1.1, 0.9), "stored_widened"),  # and nowhere much slower
        ((3.0, 2.5, 1.9, 1.6, 0.9, 0.81), "stored_widened"),  # in the mean, and nowhere very much slower
        ((3.0, 2.5, 1.9, 1.6, 0.9, 0.79), "plain"),
        ((1.1, 1.1, 0.9, 0.9, 0.9, 0.9), "plain"),
        ((1.0,) * 6, "plain"),
    ],
)
@pytest.mark.parametrize("has_memory", [True, False])
def test_blocks_of_a_file_are_kept_where_that_is_faster(
    speeds: tuple[float, ...],
    form: WeightForm,
    has_memory: bool,
    big_file: GgufFile,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Both forms where there is memory, unless one is enough; else the better one for all numbers of rows together."""
    asked = []

    def measure(blocks: StoredBlocks, dtype: torch.dtype) -> FormSpeeds:
        asked.append((blocks, dtype))
        return FormSpeeds(speeds)

    available = 2 * both_bytes(big_file) - (0 if has_memory else 1)
    if has_memory and min(speeds) < 0.9:
        form = "stored_both"
    elif speeds == (1.0,) * 6:
        form = "plain"
    assert choose_weight_form(EngineConfig(), CPU, torch.bfloat16, big_file, measure, available) == form
    ((blocks, dtype),) = asked
    assert blocks[:2] == ("Q4_1", HIDDEN) and dtype is torch.bfloat16
    told = capsys.readouterr().err
    kept = {"stored_widened": "as stored", "stored_both": "as stored and widened", "plain": "widened"}[form]
    assert f"kept {kept}: " in told and f"{speeds[0]:.1f}, {speeds[1]:.1f}" in told


def both_bytes(file: GgufFile) -> int:
    return sum(tensor.num_bytes + 2 * math.prod(tensor.shape) for tensor in file.tensors.values())


def test_a_small_file_is_kept_in_both_forms_where_half_of_the_memory_holds_them(
    big_file: GgufFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()

    def choose(available: int | None) -> WeightForm:
        return choose_weight_form(EngineConfig(), CPU, torch.bfloat16, big_file, available=available)

    needed = both_bytes(big_file)
    assert [choose(each) for each in (None, 2 * needed, 2 * needed - 1)] == ["stored_both", "stored_both", "plain"]


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "blk.0.ffn_gate.3.weight"])
def test_experts_have_one_form(name: str, tmp_path: Path) -> None:
    shape = (2, 96, HIDDEN) if "exps" in name else (96, HIDDEN)
    content = tensors(SHAPES | {name: shape})
    file = GgufFile.open(write(tmp_path / "model.gguf", content, types=dict.fromkeys([*MATRICES, name], KINDS.Q4_1)))
    assert choose_weight_form(EngineConfig(), CPU, torch.bfloat16, file) == "plain"


@pytest.mark.parametrize("is_faster", [True, False])
def test_activations_of_8_bits_are_for_cpus_without_products_of_bfloat16(
    is_faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There they are what llama.cpp computes, several times as fast as blocks that are widened."""
    measured: list[Format] = []

    def measure(form: Format, dtype: torch.dtype) -> bool:
        measured.append(form)
        return is_faster

    monkeypatch.setattr(measured_form, "is_dynamic_faster", measure)
    # The package does not quantise to super-blocks.
    sizes = {KINDS[name]: quantised_weights.BLOCK_SIZES[name][1] for name in SUPERS}
    rounded = KINDS.Q4_1, KINDS.Q4_0, KINDS.Q8_0, *sizes
    forms = {}
    for level in ("avx2", WITHOUT_AMX):
        monkeypatch.setitem(vars(LIBRARY), "native", Kernels(load_level(level)))
        for kind in (*rounded, KINDS.F16):
            rows = np.zeros((8, sizes[kind]), np.uint8) if kind in sizes else np.ones((8, 256), np.float32)
            content = dict.fromkeys(MATRICES, rows)
            file = GgufFile.open(write(tmp_path / "model.gguf", content, types=dict.fromkeys(MATRICES, kind)))
            forms[level, kind] = choose_weight_form(EngineConfig(), CPU, torch.bfloat16, file)
    dynamic = {key for key, form in forms.items() if form == "stored_dynamic"}
    assert dynamic == {("avx2", kind) for kind in rounded if is_faster}
    assert measured == [Format.NIBBLES, Format.SYMMETRIC, Format.BYTES, *SUPERS.values()]


def test_the_speed_of_activations_of_8_bits_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_form, "_FEW_SIZE", 1 << 16)
    for form in (Format.NIBBLES, Format.SYMMETRIC, Format.BYTES, *SUPERS.values()):
        assert MEASURED(form, torch.bfloat16) in (True, False)


def test_what_is_not_measured(big_file: GgufFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object) -> FormSpeeds:
        raise AssertionError("not to be measured")

    def choose(config: EngineConfig, checkpoint: Path | GgufFile, dtype: torch.dtype = torch.bfloat16) -> WeightForm:
        return choose_weight_form(config, CPU, dtype, checkpoint, measure)

    assert choose(EngineConfig(quantization="gguf"), big_file) == "stored"
    assert choose(EngineConfig(load_format="dummy"), big_file) == "plain"
    assert choose(EngineConfig(), tmp_path) == "plain"
    assert choose(EngineConfig(), big_file, torch.float16) == "plain"
    plain_file = GgufFile.open(write(tmp_path / "plain.gguf", tensors()))
    assert choose(EngineConfig(), plain_file) == "plain"
    monkeypatch.undo()
    assert choose(EngineConfig(), big_file) == "stored_both"  # few bytes


@pytest.mark.parametrize("block_type", ["Q4_1", "Q8_0", "Q4_K"])
def test_both_forms_are_measured_at_all_sizes(
    block_type: quantised_weights.BlockType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_form, "_SIZE", 1 << 16)
    speeds = measured_form.measure_forms.__wrapped__(StoredBlocks(block_type, 256, 0), torch.bfloat16)
    assert len(speeds.speeds) == len(measured_form.ROWS) and min(speeds.speeds) > 0


def test_the_options_decide() -> None:
    bf16, gpu = torch.bfloat16, torch.device("cuda")
    assert choose_weight_form(EngineConfig(), CPU, bf16) == "plain"
    assert choose_weight_form(EngineConfig(quantization="gguf"), CPU, bf16) == "stored"
    assert choose_weight_form(EngineConfig(quantization="gguf_dynamic"), CPU, bf16) == "stored_dynamic"
    assert choose_weight_form(EngineConfig(dtype="bfloat16"), CPU, bf16) == "plain"
    assert choose_weight_form(EngineConfig(dtype="float32"), CPU, torch.float32) == "plain"
    assert choose_weight_form(EngineConfig(), gpu, bf16) == "plain"
    for name in ("int8_weight_only", "int8_dynamic"):
        config = EngineConfig(quantization=name)
        assert choose_weight_form(config, CPU, bf16) == name
        for device, dtype in ((gpu, bf16), (CPU, torch.float16)):
            with pytest.raises(ConfigError, match=f"--quantization {name} needs --device cpu"):
                choose_weight_form(config, device, dtype)
    ops.use_native(False)
    try:
        assert choose_weight_form(EngineConfig(), CPU, bf16) == "plain"
        with pytest.raises(ConfigError, match="needs --device cpu, the native kernels"):
            choose_weight_form(EngineConfig(quantization="int8_dynamic"), CPU, bf16)
    finally:
        ops.use_native(True)


@pytest.mark.parametrize("name", sorted(GROUPED_TYPES))
def test_numbers_of_blocks_are_kept_for_a_gpu(name: str) -> None:
    """Random bytes of every type, whose halves are finite, by gguf's own decoder."""
    kind = KINDS[name]
    rows = torch.from_numpy(random_blocks(kind, 20, 1024))
    stored = gguf_numbers(name, rows, 1024)
    assert stored is not None
    layer = pack_grouped([stored], CPU, torch.bfloat16)
    assert layer is not None
    meant = torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind))
    torch.testing.assert_close(dequantise(layer), meant, rtol=1e-6, atol=1e-6)
    planned = grouped_bits(name) / 8 * 20 * 1024
    assert 0.99 * planned <= layer.nbytes - 64 <= 1.15 * planned
    assert planned == rows.numel() or grouped_bits(name) <= 5.25


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    """Files whose matrices are of all different types of blocks, and others of the same numbers in fp32."""
    folder, found = tmp_path_factory.mktemp("mixtures"), []
    shapes = {name: (*shape[:-1], 256) for name, shape in SHAPES.items()} | {"blk.0.ffn_down.weight": (256, 768)}
    shapes |= {f"blk.0.{name}.weight": (256, 256) for name in ("attn_q", "attn_output")}
    shapes |= {f"blk.0.{name}.weight": (128, 256) for name in ("attn_k", "attn_v")}
    shapes |= {f"blk.0.ffn_{name}.weight": (768, 256) for name in ("gate", "up")}
    sizes = {"embedding_length": 256, "feed_forward_length": 768}
    types = [*(KINDS[name] for name in sorted(HALVES)), KINDS.BF16]
    for part in range(3):
        kinds = dict(zip(MATRICES, types[part * 8 :] + types[: part * 8], strict=False))
        content = tensors(shapes)
        content |= {
            name: random_blocks(kind, *shapes[name], bits=0x23)
            for name, kind in kinds.items()
            if kind is not KINDS.BF16
        }
        file = write(folder / f"{part}.gguf", content, types=kinds, **sizes)
        stored = {name: gguf.quants.quantize(content[name], KINDS.BF16) for name in kinds if kinds[name] is KINDS.BF16}
        meant = {name: gguf.quants.dequantize((content | stored)[name], kind) for name, kind in kinds.items()}
        found.append((file, write(folder / f"{part}-meant.gguf", content | meant, **sizes)))
    return found


@pytest.mark.parametrize("form", ["plain", "stored_widened", "grouped"])
@pytest.mark.parametrize("part", range(3))
def test_a_file_of_all_types_is_the_model_that_it_means(
    part: int, form: WeightForm, mixtures: list[tuple[Path, Path]]
) -> None:
    file, meant = mixtures[part]
    forms: tuple[tuple[Path, WeightForm], ...] = (file, form), (meant, "plain")
    models = [load(path, weights, torch.float32) for path, weights in forms]
    # What is widened is told at the start: factors of few leading digits are no numbers of other blocks.
    inexact = {"IQ1_M", "IQ1_S", "IQ3_XXS"} if form == "stored_widened" else set()
    assert (set(models[0].widened) <= inexact) is (form != "plain") and not models[1].widened
    logits = [run_whole(model, [3, 0, 31, 7]) for model in models]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4 * float(logits[1].abs().max()))


@pytest.mark.parametrize("kind", [KINDS.Q4_0, KINDS.Q8_0])
def test_blocks_of_a_file_are_kept_for_a_gpu(tmp_path: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Rows of q and k come in the published order; a tied head is the embedding."""
    path = write(tmp_path / "model.gguf", tensors(), types=dict.fromkeys(MATRICES, kind))
    model, plain = load(path, "grouped", torch.float32), load(path, "plain", torch.float32)
    assert all(isinstance(part.packed, ops.GroupedLinear) for part in model.projections)
    assert model.embedding is model.head.packed
    tokens = [3, 0, VOCAB - 1, 7, 7, 12]
    torch.testing.assert_close(run_whole(model, tokens), run_whole(plain, tokens), rtol=1e-4, atol=1e-4)


def test_a_gpu_keeps_what_was_quantised(tmp_path: Path) -> None:
    """As it is stored by default, widened by name; plain files, float32 and other devices are as they were."""
    quantised = GgufFile.open(write(tmp_path / "q.gguf", tensors(), types=dict.fromkeys(MATRICES, KINDS.Q4_0)))
    plain = GgufFile.open(write(tmp_path / "p.gguf", tensors()))

    def choose(file: GgufFile, dtype: torch.dtype = torch.bfloat16, **options: str) -> WeightForm:
        return choose_weight_form(EngineConfig(**options), meta_gpu.GPU, dtype, file)

    with meta_gpu.posing_gpu():
        assert choose(quantised) == "grouped" and choose(quantised, torch.float16) == "grouped"
        assert choose(quantised, quantization="widened") == "plain"
        assert choose(quantised, torch.float32) == "plain" and choose(plain) == "plain"
        assert choose(quantised, load_format="dummy") == "plain"
        with pytest.raises(ConfigError, match="--quantization gguf needs --device cpu"):
            choose(quantised, quantization="gguf")
    assert choose_weight_form(EngineConfig(quantization="widened"), CPU, torch.bfloat16, quantised) == "plain"


def test_a_step_of_a_gpu_launches_the_product_of_packed_weights() -> None:
    """For each part one launch, which reads nothing back; with groups out of order after a gather of x."""
    form = GroupForm(NumberForm.INT4, Scales.FLOATS, Offsets.MIDDLE, 128, 128)
    part = meta_part(form, 512, 256)
    gathered = replace(part, permutation=meta_gpu.gpu_tensor(256, dtype=torch.int64))
    with meta_gpu.posing_gpu() as launched:
        layer = ops.GroupedLinear(256, 1024, torch.bfloat16, (part, gathered), None)
        for rows in (1, 16, 300):
            assert ops.linear(meta_gpu.gpu_tensor(rows, 256), layer).shape == (rows, 1024)
    assert launched == ["_grouped_product"] * 6
