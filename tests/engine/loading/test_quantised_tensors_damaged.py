"""Damaged quantised checkpoints of every format: refused by name, or read to the same finite numbers in every form."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import save_file
from support.models import small_gguf
from support.models.paged_run import CPU, run_whole
from support.models.quantised_parts import MATRICES, ROWS, WIDTH, StoredMatrix, damaged
from torch import Tensor

from rootgraft.engine.checkpoint.quantization_config import read_quantization
from rootgraft.engine.errors import ModelError
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.weight_forms import WeightForm
from rootgraft.engine.loading.weight_readers import SafetensorsFolder
from rootgraft.kernels import quantised_weights
from rootgraft.kernels.grouped_weights import dequantise, pack_grouped
from rootgraft.kernels.layouts.grouped_forms import NumberForm
from rootgraft.kernels.layouts.packed_weights import Format

NAME = "m.weight"
ALL_ROWS = torch.arange(ROWS)
DAMAGES = 12
"""Damages of each format, the first of those that were looked at."""


def matrix_of(kind: str) -> StoredMatrix:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MATRICES[kind]()


def source_of(matrix: StoredMatrix, folder: Path) -> SafetensorsFolder:
    quantization = read_quantization({"quantization_config": matrix.config})
    parts = {f"m.{name}": part.contiguous() for name, part in matrix.parts.items()}
    save_file(parts, folder / "model.safetensors")
    return SafetensorsFolder(folder, (), quantization)


def in_every_form(source: SafetensorsFolder) -> Iterator[Tensor]:
    """The matrix as each kind of kernel would read it, dequantised."""
    widened = torch.empty(source.shapes[NAME])
    source.read(NAME, widened)
    yield widened
    numbers = source.numbers(NAME)
    if numbers is not None and (grouped := pack_grouped([numbers], CPU, torch.bfloat16)) is not None:
        yield dequantise(grouped)
    if (stored := source.byte_rows(NAME)) is not None:
        assert stored.scales is not None
        form = Format.FLOAT8 if stored.numbers is NumberForm.E4M3 else Format.WIDENED
        packed = quantised_weights.pack_bytes(stored.pieces, stored.shape, stored.scales, form=form)
        yield quantised_weights.rows(packed, ALL_ROWS)
    if (found := source.blocks(NAME)) is not None:
        kind, pieces = found
        packed = quantised_weights.pack_blocks(torch.cat(list(pieces)), kind, widened=True)
        yield quantised_weights.rows(packed, ALL_ROWS)


def check(matrix: StoredMatrix, folder: Path) -> None:
    """Check that a matrix is refused in one line that names it or the config, or has one meaning in all forms."""
    try:
        source = source_of(matrix, folder)
        if source.shapes.get(NAME) != (ROWS, WIDTH):  # which loading a model refuses
            return
        first, *others = in_every_form(source)
    except ModelError as error:
        assert "\n" not in str(error)
        assert str(error).startswith(("The tensor m.", "config.json: quantization_config"))
        return
    assert bool(torch.isfinite(first).all())
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-6 * float(first.abs().max()))


@pytest.mark.parametrize("kind", MATRICES)
def test_a_damaged_matrix_is_refused_or_means_the_same_everywhere(kind: str, tmp_path: Path) -> None:
    matrix = matrix_of(kind)
    check(matrix, tmp_path)
    for seed in range(DAMAGES):
        check(damaged(matrix, seed), tmp_path)


@pytest.mark.parametrize(
    ("kind", "part", "value", "match"),
    [
        ("fp8", "weight", float("nan"), "weight has numbers that are NaN"),
        ("fp8", "weight_scale", float("inf"), "weight_scale has numbers that are not finite"),
        ("awq gemm", "scales", float("nan"), "scales has numbers that are not finite"),
        ("bitsandbytes nf4", "weight.absmax", 3e38, "weight.absmax has numbers that are not finite, or above 1e\\+30"),
        ("modelopt nvfp4", "weight_scale", float("nan"), "weight_scale has numbers that are not finite"),
    ],
)
def test_what_is_no_number_is_refused_by_its_part(
    kind: str, part: str, value: float, match: str, tmp_path: Path
) -> None:
    matrix = matrix_of(kind)
    stored = matrix.parts[part].float().reshape(-1)
    stored[-1] = value
    parts = matrix.parts | {part: stored.to(matrix.parts[part].dtype).reshape(matrix.parts[part].shape)}
    source = source_of(StoredMatrix(matrix.config, parts), tmp_path)
    with pytest.raises(ModelError, match=f"The tensor m.weight is malformed: {match}"):
        list(source.numbers(NAME).pieces)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"The tensor m\.weight is malformed"):
        source.read(NAME, torch.empty(ROWS, WIDTH))


def test_exponents_of_mxfp4_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    matrix = matrix_of("compressed-tensors mxfp4")
    matrix.parts["weight_scale"][3, 1] = 255
    with pytest.raises(ModelError, match=r"The tensor m\.weight is malformed: weight_scale has exponents of 255"):
        source_of(matrix, tmp_path).read(NAME, torch.empty(ROWS, WIDTH))


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    quantised = {
        name: gguf.GGMLQuantizationType.Q8_0 for name, shape in small_gguf.SHAPES.items() if len(shape) > 1
    } | {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q4_1}
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    small_gguf.write(path, small_gguf.tensors(), types=quantised, tokenizer__ggml__model="gpt2")
    return path.read_bytes()


def damaged_file(whole: bytes, seed: int) -> bytes:
    """Cut it, or change a byte of its header, or many of its numbers."""
    draw, raw = random.Random(seed), bytearray(whole)
    header = 1500
    match draw.randrange(4):
        case 0:
            return bytes(raw[: draw.randrange(len(raw))])
        case 1:
            raw[draw.randrange(header)] = draw.randrange(256)
        case 2:
            raw[draw.randrange(header)] = 255
        case _:
            for _ in range(50):
                raw[draw.randrange(header, len(raw))] = 255
    return bytes(raw)


@pytest.mark.parametrize("seed", range(20))
def test_a_damaged_gguf_file_is_refused_or_means_the_same_in_every_form(
    gguf_bytes: bytes, seed: int, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged_file(gguf_bytes, seed))
    forms: tuple[WeightForm, ...] = ("plain", "stored_widened", "grouped")
    found: list[Tensor | None] = []
    for form in forms:
        try:
            model = load_model(path, dtype=torch.float32, device=CPU, weights=form)
        except ModelError as error:
            assert "\n" not in str(error)
            found.append(None)
        else:
            found.append(run_whole(model, [5, 9, 3, 7]))
    assert len({each is None for each in found}) == 1
    first, *others = found
    for other in others:
        if first is not None and other is not None:
            assert bool(torch.isfinite(first).all())
            torch.testing.assert_close(other, first, rtol=1e-3, atol=1e-3)


def test_a_scale_of_a_gguf_file_that_is_infinite_is_refused_by_name(gguf_bytes: bytes, tmp_path: Path) -> None:
    path = tmp_path / "infinite.gguf"
    (scale,) = {gguf_bytes[-34:-32]}  # of the last block, of Q8_0
    assert scale != b"\x00\x7c"
    path.write_bytes(gguf_bytes[:-34] + b"\x00\x7c" + gguf_bytes[-32:])
    for form in ("plain", "grouped"):
        with pytest.raises(ModelError, match=r"The tensor blk\.0\.ffn_down\.weight is malformed: it has values that"):
            load_model(path, dtype=torch.float32, device=CPU, weights=form)


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_header_of_safetensors_is_refused_or_read(seed: int, tmp_path: Path) -> None:
    """A header that says other shapes, types or places of the same bytes."""
    matrix = matrix_of("gptq 4 bits")
    source_of(matrix, tmp_path)
    file = tmp_path / "model.safetensors"
    raw, draw = bytearray(file.read_bytes()), random.Random(seed)
    length = int.from_bytes(raw[:8], "little")
    for _ in range(3):
        raw[draw.randrange(8 + length)] = draw.choice(b'0123456789,"}\xff')
    file.write_bytes(raw)
    quantization = read_quantization({"quantization_config": matrix.config})
    try:
        source = SafetensorsFolder(tmp_path, (), quantization)
        read = {name: torch.empty(shape) for name, shape in source.shapes.items()}
        for name, out in read.items():
            source.read(name, out)
    except ModelError as error:
        assert "\n" not in str(error)
    else:
        assert all(bool(torch.isfinite(each).all()) for each in read.values())


def test_a_config_that_lies_about_its_tensors_is_refused(tmp_path: Path) -> None:
    matrix = matrix_of("gptq 4 bits")
    for lie, match in (
        ({"bits": 8}, "The tensor m.weight in the layout gptq is malformed: scales is F16"),
        ({"group_size": 128}, "The tensor m.weight in the layout gptq is malformed: scales is F16"),
        ({"quant_method": "awq"}, "The tensor m.g_idx is stored as I32, which is not supported"),
        ({"quant_method": "quip"}, "quant_method 'quip' is not supported"),
    ):
        with pytest.raises(ModelError, match=match):
            source_of(StoredMatrix(matrix.config | lie, matrix.parts), tmp_path)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
            "'torchao' with 'Int4W",
        ),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "'torchao' with 'int8_weight_only' is not"),
        ({"quant_method": "quanto", "weights": "int8"}, "'quanto' with 'int8' is not supported; gptq, awq,"),
        ({"quant_method": "hqq", "quant_config": []}, "'hqq' is not supported"),
        ({"quant_method": ["gptq"]}, "is not supported"),
    ],
)
def test_other_tools_are_refused_by_the_name_of_their_scheme(config: dict[str, object], match: str) -> None:
    with pytest.raises(ModelError, match=f"quant_method .*{match}"):
        read_quantization({"quantization_config": config})
