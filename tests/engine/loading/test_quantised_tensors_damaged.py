"""Damaged quantised checkpoints of every format: refused by name, or read to the same finite numbers in every form."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.machine.thoroughness import taking_turns
from support.models import small_gguf
from support.models.paged_run import CPU, run_whole
from support.models.quantised_oracle import matrix_meant
from support.models.quantised_parts import (
    MATRICES,
    ROWS,
    WIDTH,
    StoredMatrix,
    damaged,
    damaged_file,
    folder_of,
    mxfp4_stack,
)
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rootgraft.engine.checkpoint import gguf as gguf_types
from rootgraft.engine.checkpoint.gguf import GgufFile
from rootgraft.engine.checkpoint.quantization_config import Scheme, read_quantization
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.errors import ModelError
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.tensor_names import check_tensors, expected_shapes
from rootgraft.engine.loading.weight_forms import WeightForm
from rootgraft.engine.loading.weight_readers import GgufWeights, SafetensorsFolder, WeightSource
from rootgraft.kernels import quantised_weights
from rootgraft.kernels.grouped_weights import dequantise, pack_grouped
from rootgraft.kernels.layouts.grouped_forms import NumberForm
from rootgraft.kernels.layouts.packed_weights import Format

NAME = "m.weight"
NAMES_ONE = re.compile(
    r"The tensor \S+ |The checkpoint (lacks|has tensors [\w ]+:) \S+"
    r"|config\.json: quantization_config|quanto_qmap\.json: |model\.safetensors "
)
"""Beginnings of errors: they name a tensor, or a file that is no such one as a whole."""
DAMAGES = 20
"""Damages of each format, the first of those that were looked at."""


def kinds_and_damages(kinds: Sequence[Any]) -> Any:
    """Parametrise by all kinds with a few damages, and by a quarter of them, in turns, with 200."""
    many = (pytest.param(kind, 200, marks=pytest.mark.heavy) for kind in taking_turns(kinds, 4))
    cases = [*((kind, DAMAGES) for kind in kinds), *many]
    return pytest.mark.parametrize(("kind", "damages"), cases, ids=lambda each: getattr(each, "name", None))


def matrix_of(kind: str) -> StoredMatrix:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return MATRICES[kind]()


def in_every_form(source: WeightSource, name: str = NAME) -> Iterator[Tensor]:
    """The matrix as each kind of kernel would read it, dequantised."""
    widened = torch.empty(source.shapes[name])
    source.read(name, widened)
    yield widened
    numbers = source.numbers(name)
    if numbers is not None and (grouped := pack_grouped([numbers], CPU, torch.bfloat16)) is not None:
        yield dequantise(grouped)
    if (stored := source.byte_rows(name)) is not None:
        assert stored.scales is not None
        form = Format.FLOAT8 if stored.numbers is NumberForm.E4M3 else Format.WIDENED
        packed = quantised_weights.pack_bytes(stored.pieces, stored.shape, stored.scales, form=form)
        yield quantised_weights.rows(packed, torch.arange(source.shapes[name][0]))
    if (found := source.blocks(name)) is not None:
        kind, pieces = found
        if kind not in quantised_weights.BLOCK_SIZES:
            return
        raw = torch.cat(list(pieces))
        try:
            packed = quantised_weights.pack_blocks(raw, cast(quantised_weights.BlockType, kind), widened=True)
        except ValueError as error:
            raise ModelError(f"The tensor {name} is malformed: {error}") from error
        yield quantised_weights.rows(packed, torch.arange(source.shapes[name][0]))


def check(matrix: StoredMatrix, folder: Path, damage: Callable[[bytes], bytes] = lambda raw: raw) -> bool:
    """Check that a matrix is refused in one line, which names it or the config, or is what the oracle reads.

    Args:
        damage: of the file.

    Returns:
        whether it was refused.
    """
    file = folder / "model.safetensors"
    try:
        quantization = read_quantization({"quantization_config": matrix.config})
        save_file({f"m.{name}": part.contiguous() for name, part in matrix.parts.items()}, file)
        file.write_bytes(damage(file.read_bytes()))
        source = SafetensorsFolder(folder, (), quantization)
        check_tensors({NAME: (ROWS, WIDTH)}, source.shapes, frozenset())
        found = list(in_every_form(source))
    except ModelError as error:
        assert "\n" not in str(error)
        assert NAMES_ONE.match(str(error)), str(error)
        return True
    stored = {name.removeprefix("m."): part for name, part in load_file(file).items()}
    want = torch.from_numpy(matrix_meant(matrix.config, stored)).float()
    for each in found:
        torch.testing.assert_close(each, want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))
    return False


@kinds_and_damages(list(MATRICES))
def test_a_damaged_matrix_is_refused_or_means_what_the_oracle_reads(kind: str, damages: int, tmp_path: Path) -> None:
    matrix = matrix_of(kind)
    assert not check(matrix, tmp_path)
    refused = 0
    for seed in range(damages):
        refused += check(damaged(matrix, seed), tmp_path)
        if seed % 3 == 0:
            refused += check(matrix, tmp_path, lambda raw: damaged_file(raw, seed))  # noqa: B023 (called at once)
    assert refused > damages // 3


def check_stack(matrix: StoredMatrix, folder: Path, damage: Callable[[bytes], bytes] = lambda raw: raw) -> bool:
    """The same of two experts in gpt-oss' MXFP4, by transformers' decoder."""
    file, name = folder / "model.safetensors", "experts.down_proj"
    try:
        quantization = read_quantization({"quantization_config": matrix.config})
        save_file({f"{name}{part}": each.contiguous() for part, each in matrix.parts.items()}, file)
        file.write_bytes(damage(file.read_bytes()))
        source = SafetensorsFolder(folder, (), quantization)
        check_tensors({name: (2, WIDTH, ROWS)}, source.shapes, frozenset())
        source.check_scales()
        found: list[list[Tensor]] = []
        for part in range(2):
            widened = torch.empty(WIDTH, ROWS)
            source.read(name, widened, part)
            found.append([widened])
            numbers = source.numbers(name, part)
            if numbers is not None and (grouped := pack_grouped([numbers], CPU, torch.bfloat16)) is not None:
                found[-1].append(dequantise(grouped).T)
            if (blocks := source.part_rows(name, part)) is not None:
                packed = quantised_weights.pack_blocks(blocks[1], blocks[0], widened=True)
                found[-1].append(quantised_weights.rows(packed, torch.arange(ROWS)).T)
    except ModelError as error:
        assert "\n" not in str(error)
        assert NAMES_ONE.match(str(error)), str(error)
        return True
    stored = load_file(file)
    want = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"], dtype=torch.float32)
    for expert, forms in enumerate(found):
        assert all(bool(each.isfinite().all()) and torch.equal(each, want[expert]) for each in forms)
    return False


@pytest.mark.parametrize("damages", [3 * DAMAGES, pytest.param(200, marks=pytest.mark.heavy)])
def test_damaged_experts_in_mxfp4_are_refused_or_mean_what_transformers_reads(damages: int, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        matrix = mxfp4_stack()
    assert not check_stack(matrix, tmp_path)
    refused = 0
    for seed in range(damages):
        refused += check_stack(damaged(matrix, seed), tmp_path)
        if seed % 3 == 0:
            refused += check_stack(matrix, tmp_path, lambda raw: damaged_file(raw, seed))  # noqa: B023 (called at once)
    assert refused > damages // 3


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
    source = folder_of(StoredMatrix(matrix.config, parts), tmp_path)
    with pytest.raises(ModelError, match=f"The tensor m.weight is malformed: {match}"):
        list(source.numbers(NAME).pieces)  # type: ignore[union-attr]
    with pytest.raises(ModelError, match=r"The tensor m\.weight is malformed"):
        source.read(NAME, torch.empty(ROWS, WIDTH))


@pytest.mark.parametrize("exponent", [253, 255])
def test_exponents_of_mxfp4_without_finite_numbers_are_refused(exponent: int, tmp_path: Path) -> None:
    matrix = matrix_of("compressed-tensors mxfp4")
    matrix.parts["weight_scale"][3, 1] = exponent
    with pytest.raises(ModelError, match=r"The tensor m\.weight is malformed: weight_scale has exponents above 252"):
        folder_of(matrix, tmp_path).read(NAME, torch.empty(ROWS, WIDTH))
    stack = mxfp4_stack()
    stack.parts["_scales"][1, 3, 1] = exponent
    assert check_stack(stack, tmp_path)
    stack.parts["_scales"][1, 3, 1] = 252
    assert not check_stack(stack, tmp_path)


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    quantised = {
        name: gguf.GGMLQuantizationType.Q8_0 for name, shape in small_gguf.SHAPES.items() if len(shape) > 1
    } | {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q4_1}
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    small_gguf.write(path, small_gguf.tensors(), types=quantised, tokenizer__ggml__model="gpt2")
    return path.read_bytes()


TYPES = [
    kind
    for kind in gguf.GGMLQuantizationType
    if kind.name in small_gguf.HALVES and kind.value in gguf_types.TENSOR_TYPES
]
WIDE = 256
"""Inputs of the matrix that is in blocks."""
DOWN, STORED_DOWN = "model.layers.0.mlp.down_proj.weight", "blk.0.ffn_down.weight"


def check_gguf(path: Path) -> bool:
    """Check that a file is refused in one line, or its matrix in blocks is what the gguf package reads."""
    try:
        file = GgufFile.open(path)
        config = read_model_config(file)
        source = GgufWeights(file, config)
        check_tensors(expected_shapes(config), source.shapes, frozenset({"lm_head.weight"}))
        for name, shape in source.shapes.items():
            source.read(name, torch.empty(shape))
        found = list(in_every_form(source, DOWN))
    except ModelError as error:
        assert "\n" not in str(error)
        return True
    (stored,) = (each for each in gguf.GGUFReader(path).tensors if each.name == STORED_DOWN)
    want = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy()).float()
    for each in found:
        torch.testing.assert_close(each, want, rtol=1e-5, atol=1e-6 * float(want.abs().max()))
    return False


@kinds_and_damages(TYPES)
def test_a_damaged_gguf_type_is_refused_or_means_what_the_gguf_package_reads(
    kind: gguf.GGMLQuantizationType, damages: int, tmp_path: Path
) -> None:
    hidden = small_gguf.HIDDEN
    shapes = small_gguf.SHAPES | {f"blk.0.ffn_{side}.weight": (WIDE, hidden) for side in ("gate", "up")}
    content = small_gguf.tensors(shapes) | {STORED_DOWN: small_gguf.random_blocks(kind, hidden, WIDE)}
    path = tmp_path / "whole.gguf"
    metadata = {"feed_forward_length": WIDE, "tokenizer__ggml__model": "gpt2"}
    small_gguf.write(path, content, types={STORED_DOWN: kind}, **metadata)
    assert not check_gguf(path)
    whole, damaged_path, refused = path.read_bytes(), tmp_path / "damaged.gguf", 0
    for seed in range(damages):
        damaged_path.write_bytes(damaged_gguf(whole, seed))
        refused += check_gguf(damaged_path)
    assert refused > damages // 5


def damaged_gguf(whole: bytes, seed: int) -> bytes:
    """Cut it, or change a byte of its header, or what it says of a matrix, or many of its numbers."""
    draw, raw = random.Random(seed), bytearray(whole)
    header = 1500
    match draw.randrange(6):
        case 0:
            return bytes(raw[: draw.randrange(len(raw))])
        case 4:
            place = raw.index(STORED_DOWN.encode()) + len(STORED_DOWN)
            raw[place + draw.randrange(4 + 8 + 8 + 4 + 8)] = draw.choice((0, 1, 2, 30, 40, 128, draw.randrange(256)))
        case 5:
            for _ in range(3):
                raw[-draw.randrange(1, 4000)] = draw.choice((0, 0x7C, 0x7E, 0xFF, draw.randrange(256)))
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
    path.write_bytes(damaged_gguf(gguf_bytes, seed))
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
    folder_of(matrix, tmp_path)
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
            folder_of(StoredMatrix(matrix.config | lie, matrix.parts), tmp_path)


def torchao_type(kind: str) -> dict[str, object]:
    """Return a serialised config of torchao without options."""
    return {"_type": f"{kind}Config", "_version": 2, "_data": {}}


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "quanto", "weights": "int8"}, "modules must be an object of objects, as in quanto_qmap.json"),
        (
            {"quant_method": "quanto", "modules": {"m": {"weights": "qint4"}}},
            "quanto_qmap.json: weights 'qint4' are not supported; qint8, qfloat8, qfloat8_e4m3fn are",
        ),
        ({"quant_method": "hqq", "quant_config": []}, "quant_method 'hqq' is not supported; gptq, awq,"),
        ({"quant_method": ["gptq"]}, "quant_method .* is not supported"),
    ],
)
def test_other_tools_are_refused_by_the_name_of_their_scheme(config: dict[str, object], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read_quantization({"quantization_config": config})


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ("int8_weight_only", "quant_type must be an object with the key default"),
        ({"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}, "torchao's 'Int4WeightOnlyConfig' is not"),
        ({"default": {"_type": "Int4WeightOnlyConfig"}}, "quant_type.default must be an object with _type and _data"),
        ({"default": {"_type": "Int8WeightOnlyConfig", "_data": {"group_size": 48}}}, "group_size must be -1 or one"),
        (
            {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"re:(": torchao_type("Int8WeightOnly")}}}},
            "the pattern '.*' is not supported",
        ),
        (
            {"default": {"_type": "IntxWeightOnlyConfig", "_data": {"intx_packing_format": {"_data": "OPAQUE"}}}},
            "intx_packing_format must be UNPACKED_TO_INT8",
        ),
    ],
)
def test_layouts_of_torchao_that_are_not_read_are_refused_by_name(config: object, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        read_quantization({"quantization_config": {"quant_method": "torchao", "quant_type": config}})


def test_torchao_names_a_config_for_each_module() -> None:
    """By whole name or pattern, with or without the parameter's name; null means plain weights."""
    listed = {
        "model.layers.0.mlp.up_proj.weight": torchao_type("Int8WeightOnly"),
        r"re:.*\.mlp\..*": torchao_type("Float8WeightOnly"),
        "model.layers.1.mlp.up_proj": None,
        "_default": torchao_type("Int8DynamicActivationInt8Weight"),
    }
    config = {"default": {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": listed}}}
    found = read_quantization({"quantization_config": {"quant_method": "torchao", "quant_type": config}})
    assert found is not None
    layouts = [
        found.scheme(f"model.layers.{name}") for name in ("0.mlp.up_proj", "0.mlp.down_proj", "0.self_attn.q_proj")
    ]
    assert layouts == [
        Scheme("int8", has_zeros=True),
        Scheme("float8"),
        Scheme("int8", rounds_inputs=True, has_zeros=True),
    ]
