"""Quantised matrices of folders against what wrote them: AutoAWQ, GPTQModel, compressed-tensors and bitsandbytes.

``data/packed_words.safetensors`` has small matrices as AutoAWQ 0.2.9 and GPTQModel 7.7 pack them, with the integers and
zero points that were given to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from compressed_tensors.utils.match import match_targets
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.kernels import triton_interpreter
from support.models.paged_run import CPU, run_whole
from support.models.quantised_parts import COMPRESSED, compressed, compressed_config
from support.models.tiny_models import save
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rootgraft.engine.checkpoint.quantization_config import Layout, Scheme, read_quantization
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError, ModelError
from rootgraft.engine.loading import weight_forms
from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.quantised_tensors import QuantisedTensor, View, unpacked
from rootgraft.engine.loading.weight_forms import WeightForm, choose_weight_form
from rootgraft.engine.loading.weight_readers import SafetensorsFolder
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.kernels import ops, quantised_weights
from rootgraft.kernels.grouped_weights import GroupedLinear, GroupedPart, dequantise, pack_grouped
from rootgraft.kernels.layouts.packed_weights import Format, QuantisedLinear

WORDS = Path(__file__).parent / "data" / "packed_words.safetensors"
CASES = sorted({name.rpartition(".")[0] for name in load_file(WORDS)})
TOKENS = [5, 9, 100, 7, 64, 3]


def views(parts: Mapping[str, Tensor], folder: Path) -> dict[str, View]:
    file = folder / "parts.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in parts.items()}, file)
    opened = safe_open(file, framework="pt")
    return {name: View(opened, name) for name in parts}


def decoded(scheme: Scheme, parts: Mapping[str, Tensor], folder: Path) -> Tensor:
    tensor = QuantisedTensor("m.weight", scheme, views(parts, folder))
    out = torch.empty(tensor.shape)
    tensor.read(out)
    return out


def stored_case(case: str) -> dict[str, Tensor]:
    return {name.rpartition(".")[2]: tensor for name, tensor in load_file(WORDS).items() if name.startswith(f"{case}.")}


def meaning(parts: Mapping[str, Tensor], scales: Tensor, groups: Tensor) -> Tensor:
    """(q - z) s, by input's group."""
    return (parts["ints"].float() - parts["zeros"].float()[:, groups]) * scales.float()[:, groups]


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("gptq")])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_gptq_of_every_kind_means_what_was_packed(case: str, layout: Layout, tmp_path: Path) -> None:
    _, bits, group, symmetric, _ = case.split(".")
    parts = stored_case(case)
    zeros = parts.get("qzeros_v1" if layout == "gptq" else "qzeros_v2")
    if zeros is None:
        pytest.skip("of three bits the second version alone is recorded")
    scheme = Scheme(layout, int(bits), None if group == "-1" else int(group), symmetric == "sym")
    stored = {"qweight": parts["qweight"], "qzeros": zeros, "scales": parts["scales"], "g_idx": parts["g_idx"]}
    want = meaning(parts, parts["scales"].T, parts["g_idx"].long())
    assert torch.equal(decoded(scheme, stored, tmp_path), want)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("awq")])
def test_awq_in_both_orders_means_what_was_packed(case: str, tmp_path: Path) -> None:
    kind, group = case.split(".")
    parts = stored_case(case)
    stored = {name: parts[name] for name in ("qweight", "qzeros", "scales")}
    want = meaning(parts, parts["steps"], torch.arange(128) // int(group))
    assert torch.equal(decoded(Scheme(cast(Layout, kind), 4, int(group)), stored, tmp_path), want)


@given(st.integers(1, 8), st.integers(1, 100), st.integers(0, 2**32))
def test_integers_of_any_width_follow_each_other_in_words(bits: int, count: int, seed: int) -> None:
    numbers = torch.randint(1 << bits, (3, count), generator=torch.Generator().manual_seed(seed)).tolist()
    streams = [sum(number << (bits * index) for index, number in enumerate(row)) for row in numbers]
    num_bytes = -(-count * bits // 32) * 4
    words = torch.tensor([list(stream.to_bytes(num_bytes, "little")) for stream in streams], dtype=torch.uint8)
    assert unpacked(words.view(torch.int32), bits, count).tolist() == numbers


@pytest.mark.parametrize("kind", COMPRESSED)
def test_compressed_tensors_reads_the_same_numbers(kind: str, tmp_path: Path) -> None:
    form, args = COMPRESSED[kind]
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    stored, want = compressed(form, args, weight)
    found = read_quantization({"quantization_config": compressed_config(form, args)})
    assert found is not None
    scheme = found.scheme("m")
    assert scheme is not None
    got = decoded(scheme, {name: tensor for name, tensor in stored.items() if tensor.numel()}, tmp_path)
    # The package reads NVFP4 back in bfloat16.
    torch.testing.assert_close(got, want, rtol=4e-3 if kind == "nvfp4" else 1e-6, atol=1e-7)
    assert (got - weight).abs().max() < weight.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_stays_in_4_bits_on_a_cpu(dtype: torch.dtype, tmp_path: Path) -> None:
    """With the bits of the widened form, where rows are whole blocks of 256."""
    form, args = COMPRESSED["nvfp4"]
    weight = torch.randn(40, 512, generator=torch.Generator().manual_seed(1))
    stored, _ = compressed(form, args, weight)
    found = read_quantization({"quantization_config": compressed_config(form, args)})
    assert found is not None
    scheme = found.scheme("m")
    assert scheme is not None
    tensor = QuantisedTensor("m.weight", scheme, views(stored, tmp_path))
    plain = torch.empty(40, 512)
    tensor.read(plain)
    blocks = tensor.blocks()
    assert blocks is not None
    kind, pieces = blocks
    raw = torch.cat(list(pieces))
    layer = quantised_weights.pack_blocks(raw, kind, widened=True)
    assert layer.weight.nbytes + layer.scales.nbytes <= 1.03 * 48 * (256 + 32)  # three panels of 16 rows
    assert torch.equal(quantised_weights.rows(layer, torch.arange(40)), plain)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(ops.linear(x, layer), ops.linear(x, ops.pack_linear(plain.to(dtype))))


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("shape", [(64, 128), (33, 50), (48, 96)])
def test_four_bits_of_bitsandbytes(kind: str, is_nested: bool, shape: tuple[int, int], tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=is_nested, blocksize=64)
    stored = {"weight": packed, **{f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}}
    got = decoded(Scheme("bnb_4bit", 4), stored, tmp_path)
    # As one row: where blocks span rows of 96, bitsandbytes 0.50 takes wrong scales on a CPU with AVX-512.
    state.shape = torch.Size((weight.numel(),))
    want = functional.dequantize_4bit(packed, state).float().view(shape)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)
    assert (got - weight).abs().max() < 0.2 * weight.abs().max()


def test_eight_bits_of_bitsandbytes(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(3))
    numbers, scales, _ = functional.int8_vectorwise_quant(weight.half())
    stored = {"weight": numbers, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    want = functional.int8_vectorwise_dequant(numbers, scales).float()
    torch.testing.assert_close(decoded(Scheme("bnb_int8"), stored, tmp_path), want, rtol=1e-6, atol=1e-7)


def save_llama(folder: Path) -> None:
    """A tiny model whose widths are whole blocks."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(4)
    LlamaForCausalLM(config).save_pretrained(folder)


def save_mixture(folder: Path) -> None:
    """The same with experts."""
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        head_dim=16, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(4)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def quantised_folder(tmp_path: Path, kind: str, family: str) -> tuple[Path, Path]:
    """A model whose projections compressed-tensors has quantised, and the same with what they mean."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    if family == "whole blocks":
        save_llama(plain)
    elif family == "experts of whole blocks":
        save_mixture(plain)
    else:
        save(family, plain)
    form, args = COMPRESSED[kind]
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name, weight in list(tensors.items()):
        if not name.endswith("_proj.weight"):
            continue
        parts, tensors[name] = compressed(form, args, weight.float())
        del stored[name]
        stored |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items() if tensor.numel()}
    packed.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file({name: part.contiguous() for name, part in stored.items()}, packed / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = compressed_config(form, args)
    (packed / "config.json").write_text(json.dumps(config))
    return plain, packed


def test_a_scale_of_the_last_layer_is_refused_before_a_matrix_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, packed = quantised_folder(tmp_path, "w4a16", "whole blocks")
    stored = load_file(packed / "model.safetensors")
    stored["model.layers.1.mlp.down_proj.weight_scale"][3, 1] = float("inf")
    save_file(stored, packed / "model.safetensors")
    monkeypatch.setattr(SafetensorsFolder, "read", lambda *_: pytest.fail("a matrix was read"))
    with pytest.raises(
        ModelError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is malformed: weight_scale has num"
    ):
        load_model(packed, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", ["w3 asymmetric", "w8a8", "fp8 channel"])
def test_a_quantised_model_is_the_model_that_it_means(family: str, kind: str, tmp_path: Path) -> None:
    plain, packed = quantised_folder(tmp_path, kind, family)
    logits = [run_whole(load_model(folder, dtype=torch.float32, device=CPU), TOKENS) for folder in (plain, packed)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_schemes_by_target_each_mean_their_modules(tmp_path: Path) -> None:
    """A name before a pattern before a class, as compressed-tensors matches; what no scheme matches is plain."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    save_llama(plain)
    named, pattern = "model.layers.1.mlp.down_proj", r"re:.*\.mlp\..*_proj$"
    targets = {"w8a8": "Linear", "w4a16": pattern, "fp8 channel": named}
    groups = {}
    for kind, target in targets.items():
        form, args = COMPRESSED[kind]
        group = compressed_config(form, args)["config_groups"]["group_0"]
        groups[kind] = group | {"targets": [target], "format": form}
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    ignored = "model.layers.0.self_attn.k_proj"
    for name, weight in list(tensors.items()):
        module = name.removesuffix(".weight")
        if not module.endswith("_proj") or module == ignored:
            continue
        [target, *_] = match_targets(module, torch.nn.Linear(1, 1), targets.values())
        kind = next(kind for kind, each in targets.items() if each == target)
        parts, tensors[name] = compressed(*COMPRESSED[kind], weight.float())
        del stored[name]
        stored |= {f"{module}.{part}": tensor for part, tensor in parts.items() if tensor.numel()}
    packed.mkdir()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file({name: part.contiguous() for name, part in stored.items()}, packed / "model.safetensors")
    quantization = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = quantization | {"ignore": ["lm_head", ignored]}
    (packed / "config.json").write_text(json.dumps(config))
    found = read_quantization(config)
    assert found is not None
    schemes = [
        found.scheme(module) for module in (named, "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj")
    ]
    assert [scheme and scheme.layout for scheme in schemes] == ["float8", "packed", "int8"]
    logits = [run_whole(load_model(folder, dtype=torch.float32, device=CPU), TOKENS) for folder in (plain, packed)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["stored_widened", "stored_both"])
@pytest.mark.parametrize(
    ("kind", "blocks"),
    [("w4a16", Format.SYMMETRIC), ("w4a16 asymmetric", Format.ZERO_POINTS), ("w8 groups", Format.BYTES)],
)
def test_blocks_of_a_quantised_folder_have_the_bits_of_their_widened_form(
    kind: str, blocks: Format, form: WeightForm, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_forms, "measure_few_rows", lambda *_: 4)
    monkeypatch.setitem(COMPRESSED["w8 groups"][1], "group_size", 32)  # which divides the widths of this model
    _, packed = quantised_folder(tmp_path, kind, "whole blocks")
    halve_scales(packed / "model.safetensors")
    plain = load_model(packed, dtype=dtype, device=CPU)
    model = load_model(packed, dtype=dtype, device=CPU, weights=form)
    formats = {each.packed.format.unarranged for each in model.projections if isinstance(each.packed, QuantisedLinear)}
    assert formats == {blocks}
    assert torch.equal(run_whole(model, TOKENS), run_whole(plain, TOKENS))


def halve_scales(file: Path) -> None:
    """Store scales in half precision, as the tools do for models in it."""
    tensors = load_file(file)
    save_file({name: part.half() if name.endswith("scale") else part for name, part in tensors.items()}, file)


def test_the_form_of_a_quantised_folder_is_chosen_as_that_of_a_gguf_file(tmp_path: Path) -> None:
    plain, packed = quantised_folder(tmp_path, "w4a16 asymmetric", "whole blocks")
    halve_scales(packed / "model.safetensors")

    def choose(folder: Path, available: int | None = None) -> WeightForm:
        return choose_weight_form(EngineConfig(), CPU, torch.bfloat16, folder, available=available)

    assert [choose(plain), choose(packed), choose(packed, 1)] == ["plain", "stored_both", "plain"]
    assert choose_weight_form(EngineConfig(quantization="gguf"), CPU, torch.bfloat16, packed) == "stored"
    with pytest.raises(ConfigError, match=r"The weights need .* GiB"):
        load_model(packed, dtype=torch.bfloat16, device=CPU, available=1)


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("w4a16", "plain"), ("w4a16 asymmetric", "stored_both"), ("w8a8", "stored_widened"),
        ("fp8 channel", "stored_widened"), ("w3 asymmetric", "grouped"), ("nvfp4", "grouped"), ("mxfp4", "grouped"),
    ],
)  # fmt: skip
def test_an_adapter_over_a_quantised_base_is_exact(kind: str, form: WeightForm, tmp_path: Path) -> None:
    """Products of adapters take x alone; the norms of DoRA are those of the dequantised base, in every form."""
    plain, packed = quantised_folder(tmp_path, kind, "whole blocks")
    layouts = []
    for folder, weights in ((plain, "plain"), (packed, form)):
        model = load_model(folder, dtype=torch.float32, device=CPU, weights=cast(WeightForm, weights))
        layouts.append(base_layout(model, folder, dummy=False))
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        one, other = (layout.read_weight(module) for layout in layouts)
        # compressed-tensors reads NVFP4 back in bfloat16.
        torch.testing.assert_close(one, other, rtol=4e-3 if kind == "nvfp4" else 1e-6, atol=1e-7)


def test_malformed_parts_are_refused_by_name(tmp_path: Path) -> None:
    case = "gptq.4.32.asym.act"
    parts = stored_case(case)
    stored = {name: parts[name] for name in ("qweight", "scales", "g_idx")} | {"qzeros": parts["qzeros_v2"]}
    scheme = Scheme("gptq_v2", 4, 32, symmetric=False)
    outside = stored["g_idx"].clone()
    outside[3] = 4
    endless = stored["scales"].clone()
    endless[0, 0] = float("inf")
    for change, scheme_now, match in (
        ({"scales": stored["scales"][:-1]}, scheme, "scales is F16"),
        ({"qzeros": stored["qzeros"][:, :-1]}, scheme, "qzeros is I32"),
        ({"qweight": stored["qweight"].float()}, scheme, "qweight is F32"),
        ({"g_idx": outside}, scheme, "g_idx has indices outside of 0 to 3"),
        ({"scales": endless}, scheme, "scales has numbers that are not finite"),
        ({}, replace(scheme, group=64), "scales is F16"),
        ({}, replace(scheme, bits=8), "scales is F16"),
    ):
        with pytest.raises(ModelError, match=f"The tensor m.weight .*{match}"):
            decoded(scheme_now, stored | change, tmp_path)
    for missing in ("scales", "qzeros"):
        with pytest.raises(ModelError, match=f"{missing} is missing"):
            decoded(scheme, {name: part for name, part in stored.items() if name != missing}, tmp_path)


GROUPED = [kind for kind in COMPRESSED if kind not in ("fp8 blocks", "w8 groups")]  # wider than a tiny model


@pytest.mark.parametrize("kind", GROUPED)
def test_kernels_of_a_gpu_get_the_numbers_as_they_are_stored(kind: str, tmp_path: Path) -> None:
    """All but the smallest matrices are kept packed, and give what the dequantised weights give in fp32."""
    _, packed = quantised_folder(tmp_path, kind, "whole blocks")
    model = load_model(packed, dtype=torch.float32, device=CPU, weights="grouped")
    layers = [each.packed for each in model.projections[:-1]]
    assert all(isinstance(each, GroupedLinear) for each in layers)
    expected = run_whole(load_model(packed, dtype=torch.float32, device=CPU), TOKENS)
    torch.testing.assert_close(run_whole(model, TOKENS), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("w4a16 asymmetric", "whole blocks"),
        *((kind, "experts of whole blocks") for kind in ("w4a16 asymmetric", "w8a8", "fp8 channel")),
    ],
)
def test_a_step_by_kernels_of_a_gpu_is_that_of_the_dequantised_model(kind: str, family: str, tmp_path: Path) -> None:
    """Static scales of activations, as W8A8 and FP8 have them, change nothing: activations are not rounded there."""
    plain, packed = quantised_folder(tmp_path, kind, family)
    if kind in ("w8a8", "fp8 channel"):
        tensors = load_file(packed / "model.safetensors")
        modules = [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]
        scales = {f"{name.removesuffix('weight')}input_scale": torch.tensor([0.02]) for name in modules}
        save_file(tensors | scales, packed / "model.safetensors")
    model = load_model(packed, dtype=torch.float32, device=CPU, weights="grouped")
    allow_experts(model)
    expected = run_whole(load_model(plain, dtype=torch.float32, device=CPU), TOKENS)
    assert any(isinstance(each, GroupedLinear) for each in model.weights)
    torch.testing.assert_close(run_whole(model, TOKENS), expected, rtol=1e-4, atol=1e-4)


def allow_experts(model: DecoderModel) -> None:
    """Let interpreted kernels reach the tensors that tables of experts point at."""
    for layer in model.layers:
        for _, product in layer.active:
            for expert in product.experts:
                assert isinstance(expert, GroupedLinear)
                (part,) = expert.parts
                assert isinstance(part, GroupedPart)
                triton_interpreter.allow(*(each for each in part.tensors if each is not None))


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("gptq", "awq"))])
def test_integers_in_words_are_kept_for_a_gpu(case: str, tmp_path: Path) -> None:
    """Also those of groups that are out of order, by a permutation of x."""
    parts = stored_case(case)
    if case.startswith("awq"):
        kind, group = case.split(".")
        stored = {name: parts[name] for name in ("qweight", "qzeros", "scales")}
        scheme, scales = Scheme(cast(Layout, kind), 4, int(group)), parts["steps"]
        groups = torch.arange(128) // int(group)
    else:
        _, bits, group, symmetric, _ = case.split(".")
        names = {"qweight": "qweight", "qzeros": "qzeros_v2", "scales": "scales", "g_idx": "g_idx"}
        stored = {name: parts[each] for name, each in names.items()}
        scheme = Scheme("gptq_v2", int(bits), None if group == "-1" else int(group), symmetric == "sym")
        scales, groups = parts["scales"].T, parts["g_idx"].long()
    numbers = QuantisedTensor("m.weight", scheme, views(stored, tmp_path)).numbers()
    assert numbers is not None
    layer = pack_grouped([numbers], CPU, torch.bfloat16)
    assert layer is not None
    torch.testing.assert_close(dequantise(layer), meaning(parts, scales, groups), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_bitsandbytes_are_kept_for_a_gpu(kind: str, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=True, blocksize=64)
    stored = {"weight": packed, **{f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}}
    scheme = Scheme("bnb_4bit", 4)
    numbers = QuantisedTensor("m.weight", scheme, views(stored, tmp_path)).numbers()
    assert numbers is not None
    layer = pack_grouped([numbers], CPU, torch.bfloat16)
    assert layer is not None
    torch.testing.assert_close(dequantise(layer), decoded(scheme, stored, tmp_path), rtol=1e-6, atol=1e-7)


def test_blocks_of_fp8_are_kept_for_a_gpu(tmp_path: Path) -> None:
    weight = torch.randn(200, 320)
    parts, meant = compressed(*COMPRESSED["fp8 blocks"], torch.nn.functional.pad(weight, (0, 64, 0, 56)))
    numbers = QuantisedTensor("m.weight", Scheme("float8"), views(parts, tmp_path)).numbers()
    assert numbers is not None
    layer = pack_grouped([numbers], CPU, torch.bfloat16)
    assert layer is not None
    torch.testing.assert_close(dequantise(layer), meant, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", ["whole blocks", "experts of whole blocks"])
@pytest.mark.parametrize(
    ("kind", "scales", "form"),
    [
        ("fp8 channel", torch.float32, Format.FLOAT8), ("fp8 tensor", torch.float32, Format.FLOAT8),
        ("w8a8", torch.float32, Format.WIDENED), ("w8 tensor", torch.float32, Format.WIDENED),
        ("w8a16 by channel", torch.float32, Format.WIDENED), ("fp8 channel", torch.bfloat16, Format.FLOAT8),
        ("w8a8", torch.bfloat16, Format.WIDENED), ("w8a16 by channel", torch.bfloat16, Format.WIDENED),
    ],
)  # fmt: skip
def test_eight_bits_are_kept_on_a_cpu(
    kind: str, scales: torch.dtype, form: Format, family: str, tmp_path: Path
) -> None:
    """With the digits of the plain form: scales are applied to sums."""
    _, packed = quantised_folder(tmp_path, kind, family)
    stored = load_file(packed / "model.safetensors")
    of_type = {name: each.to(scales) if name.endswith("_scale") else each for name, each in stored.items()}
    save_file(of_type, packed / "model.safetensors")
    chosen = choose_weight_form(EngineConfig(), CPU, torch.float32, packed)
    assert chosen == "stored_widened"
    model, plain = (load_model(packed, dtype=torch.float32, device=CPU, weights=each) for each in (chosen, "plain"))
    assert {each.format for each in model.weights if isinstance(each, QuantisedLinear)} == {form}
    logits = [run_whole(each, TOKENS) for each in (model, plain)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["whole blocks", "experts of whole blocks"])
def test_a_model_made_for_activations_of_8_bits_is_multiplied_with_such(family: str, tmp_path: Path) -> None:
    """In bfloat16; integers are those of the file, and logits those of the plain form but for the rounding of x."""
    _, packed = quantised_folder(tmp_path, "w8a8", family)
    file = json.loads((packed / "config.json").read_text())
    for group in file["quantization_config"]["config_groups"].values():
        group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    (packed / "config.json").write_text(json.dumps(file))
    rounded, plain, exact = (
        load_model(packed, dtype=dtype, device=CPU, weights=form)
        for dtype, form in (
            (torch.bfloat16, "stored_widened"), (torch.bfloat16, "plain"), (torch.float32, "stored_widened"),
        )
    )  # fmt: skip
    kept = [each for each in rounded.weights if isinstance(each, QuantisedLinear)]
    assert {each.format for each in kept} == {Format.CHANNELS}
    assert {each.format for each in exact.weights if isinstance(each, QuantisedLinear)} == {Format.WIDENED}
    logits = [run_whole(each, TOKENS).float() for each in (rounded, plain)]
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[1].norm()


def test_blocks_of_fp8_are_kept_on_a_cpu(tmp_path: Path) -> None:
    parts, meant = compressed(*COMPRESSED["fp8 blocks"], torch.randn(256, 384))
    stored = QuantisedTensor("m.weight", Scheme("float8"), views(parts, tmp_path)).bytes()
    assert stored is not None and stored.scales is not None
    layer = quantised_weights.pack_bytes(stored.pieces, stored.shape, stored.scales, form=Format.FLOAT8)
    assert torch.equal(quantised_weights.rows(layer, torch.arange(256)), meant)


def test_experts_whose_forms_differ_are_widened(tmp_path: Path) -> None:
    """Scales of one expert that fit half precision, and of the others that do not."""
    _, packed = quantised_folder(tmp_path, "w4a16", "experts of whole blocks")
    file = packed / "model.safetensors"
    tensors = load_file(file)
    halved = {name: part.half() for name, part in tensors.items() if "experts.1." in name and name.endswith("_scale")}
    save_file(tensors | halved, file)
    model, plain = (
        load_model(packed, dtype=torch.float32, device=CPU, weights=each) for each in ("stored_widened", "plain")
    )
    assert torch.equal(run_whole(model, TOKENS), run_whole(plain, TOKENS))
