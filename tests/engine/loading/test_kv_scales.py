"""Static scales of keys and values, against transformers over K and V that are quantised and dequantised by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.paged_run import CPU, PagedRun
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ModelError
from rootgraft.engine.executor.pool_pages import PoolPages
from rootgraft.engine.executor.worker_plan import WorkerPlan
from rootgraft.engine.executor.worker_summary import summary_lines
from rootgraft.engine.loading.kv_scales import scales_of_rank
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.shards import Shard
from rootgraft.engine.loading.stages import Stage
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.models.kv_pool import KvPool
from rootgraft.kernels.collectives import Alone
from rootgraft.kernels.layouts import int8_kv_layout, kv_forms
from rootgraft.kernels.layouts.kv_forms import StaticForm

TOKENS: Final = [5, 9, 100, 7, 64, 3, 77, 12]
LAYERS, HEADS = 2, 2
SCALES: Final = {"fp8": torch.tensor([0.002, 0.0005]), "int8": torch.tensor([0.009, 0.004])}  # some numbers are cut off
FLOAT = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True, "strategy": "tensor"}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {}, "format": "dense"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=HEADS, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("plain")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def with_scales(plain: Path, folder: Path, scales: dict[str, Tensor], quantization: dict[str, Any] | None) -> Path:
    """The model with these tensors, and this ``quantization_config``."""
    folder.mkdir(exist_ok=True)
    tensors = load_file(plain / "model.safetensors") | {f"model.layers.{name}": each for name, each in scales.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    more = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config | more))
    return folder


def in_attention(names: tuple[str, str], form: StaticForm, heads: int = 1) -> dict[str, Tensor]:
    """A scale of the keys and one of the values of each layer, or one for each head of twice as much in the second."""
    spread = torch.arange(1, heads + 1).view(heads, 1, 1) if heads > 1 else torch.ones(())
    return {
        f"{layer}.self_attn.{name}": SCALES[form][kind] * (1 + layer) * spread
        for layer in range(LAYERS)
        for kind, name in enumerate(names)
    }


def quantised(x: Tensor, scale: Tensor, form: StaticForm) -> Tensor:
    """[1, Hkv, T, D], rounded by the scale of each head or of all."""
    scaled = x / scale.reshape(-1, 1, 1)
    if form == "int8":
        return scaled.round().clamp(-128, 127) * scale.reshape(-1, 1, 1)
    return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale.reshape(-1, 1, 1)


def oracle(
    plain: Path, scales: dict[str, Tensor], form: StaticForm, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, V] of transformers whose attention reads quantised K and V, and these of the first layer."""
    read: list[Tensor] = []
    eager = modeling_llama.eager_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Any:
        k, v = (each for name, each in sorted(scales.items()) if name.startswith(f"{module.layer_idx}."))
        kept = quantised(key, k, form), quantised(value, v, form)
        read.extend(kept if module.layer_idx == 0 else ())
        return eager(module, query, *kept, *rest, **more)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", attend)
    model = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0], read


def run(folder: Path, kv: torch.dtype) -> tuple[Tensor, PagedRun]:
    """Logits of the tokens in chunks of three, with KV of a type."""
    paged = PagedRun(load_model(folder, dtype=torch.float32, device=CPU), 16, 1, len(TOKENS), kv_dtype=kv)
    return torch.cat([paged.step({0: TOKENS[at : at + 3]})[0] for at in range(0, len(TOKENS), 3)]), paged


@pytest.mark.parametrize(
    ("names", "form", "heads", "quantization"),
    [
        (("k_scale", "v_scale"), "fp8", 1, COMPRESSED | {"kv_cache_scheme": FLOAT}),
        (("k_scale", "v_scale"), "fp8", HEADS, COMPRESSED | {"kv_cache_scheme": FLOAT | {"strategy": "attn_head"}}),
        (("k_scale", "v_scale"), "int8", 1, COMPRESSED | {"kv_cache_scheme": FLOAT | {"type": "int"}}),
        (("k_proj.k_scale", "v_proj.v_scale"), "fp8", 1, MODELOPT | {"kv_cache_quant_algo": "FP8"}),
        (("k_proj.k_scale", "v_proj.v_scale"), "int8", 1, MODELOPT | {"kv_cache_quant_algo": "INT8"}),
        (("attn.k_scale", "attn.v_scale"), "fp8", 1, None),
    ],
)
def test_keys_and_values_are_quantised_by_the_scales_of_the_checkpoint(
    names: tuple[str, str], form: StaticForm, heads: int, quantization: dict[str, Any] | None, plain: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    scales = in_attention(names, form, heads)
    folder = with_scales(plain, tmp_path, scales, quantization)
    wanted, read = oracle(plain, scales, form, monkeypatch)
    rows = kv_forms.FLOAT8 if form == "fp8" else kv_forms.INT8
    torch.testing.assert_close(run(folder, rows)[0], wanted, rtol=0, atol=1e-4)
    other = kv_forms.INT8 if form == "fp8" else kv_forms.FLOAT8
    assert torch.equal(run(folder, other)[0], run(plain, other)[0])  # scales for other numbers have no effect
    assert torch.equal(run(folder, torch.float32)[0], run(plain, torch.float32)[0])
    if form == "int8":  # the CPU's own kernels, which round queries too
        logits, paged = run(folder, int8_kv_layout.DTYPE)
        page = int(paged.table[0, 0])
        kept = (int8_kv_layout.keys, paged.kv.k_layers), (int8_kv_layout.values, paged.kv.v_layers)
        for (decode, layers), exact in zip(kept, read, strict=True):
            found = decode(layers[0][page : page + 1])[:, :, : len(TOKENS)]
            torch.testing.assert_close(found, exact, rtol=0, atol=1e-6)
        assert (logits - wanted).abs().max() < 0.05 * wanted.abs().max()


@pytest.mark.parametrize(
    "scheme", [FLOAT | {"dynamic": True}, FLOAT | {"symmetric": False}, FLOAT | {"num_bits": 4}, FLOAT | {"type": "x"}]
)
def test_schemes_without_static_scales_leave_those_of_tokens(
    scheme: dict[str, Any], plain: Path, tmp_path: Path
) -> None:
    scales = in_attention(("k_scale", "v_scale"), "fp8")
    folder = with_scales(plain, tmp_path, scales, COMPRESSED | {"kv_cache_scheme": scheme})
    assert torch.equal(run(folder, kv_forms.FLOAT8)[0], run(plain, kv_forms.FLOAT8)[0])
    assert summary(folder, kv_forms.FLOAT8).endswith("have no effect; each token and head has a scale of its own")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"1.self_attn.k_scale": torch.tensor(float("nan"))},
            r"layers\.1\.self_attn\.k_scale has a scale that is not a f",
        ),
        ({"0.self_attn.v_scale": torch.tensor([0.1, 0.0])}, r"v_scale has a scale that is not a finite number above 0"),
        (
            {"0.self_attn.v_scale": torch.ones(3)},
            r"v_scale has shape \[3\], but a scale must be one number, or one for each",
        ),
        ({"0.self_attn.k_proj.k_scale": torch.tensor(0.1)}, r"is given twice for its layer, also as model\.layers\.0"),
    ],
)
def test_malformed_scales_are_refused_by_name(
    change: dict[str, Tensor], match: str, plain: Path, tmp_path: Path
) -> None:
    scales = in_attention(("k_scale", "v_scale"), "fp8") | change
    with pytest.raises(ModelError, match=match):
        load_model(with_scales(plain, tmp_path, scales, None), dtype=torch.float32, device=CPU)


def test_a_scale_of_keys_alone_is_refused(plain: Path, tmp_path: Path) -> None:
    folder = with_scales(plain, tmp_path, {"1.self_attn.k_scale": torch.tensor(0.1)}, None)
    with pytest.raises(
        ModelError, match=r"1\.self_attn\.k_scale is the only scale of its layer, but keys and values need a scale each"
    ):
        load_model(folder, dtype=torch.float32, device=CPU)


def pool(model: DecoderModel, dtype: torch.dtype) -> KvPool:
    return KvPool(model.config, 2, 16, dtype, CPU)


def summary(folder: Path, kv: torch.dtype) -> str:
    """The line on scales of KV that a start of this model shows."""
    model = load_model(folder, dtype=torch.float32, device=CPU)
    plan = WorkerPlan(kv, 1, 2, 0, None, 32, 1 << 40, None, 0)
    lines = summary_lines(EngineConfig(), model, plan, pool(model, kv), None, (0.0, 0.0))
    return next((line for line in lines if line.startswith("KV scales")), "")


def test_kv_by_other_scales_is_another_form_and_the_start_says_which(plain: Path, tmp_path: Path) -> None:
    """So KV of disks, files and other replicas that was made by other scales, or by those of tokens, is none of it."""
    folders = {
        factor: with_scales(
            plain,
            tmp_path / str(factor),
            {name: each * factor for name, each in in_attention(("k_scale", "v_scale"), "fp8").items()},
            None,
        )
        for factor in (1, 2)
    }
    forms = []
    for folder in (plain, *folders.values()):
        model = load_model(folder, dtype=torch.float32, device=CPU)
        forms.append([PoolPages(EngineConfig(), model, pool(model, kv)).form for kv in kv_forms.ROW_DTYPES])
    of_int8, of_fp8 = zip(*forms, strict=True)
    assert len(set(of_int8)) == 1 and len(set(of_fp8)) == 3
    assert summary(folders[1], kv_forms.FLOAT8) == (
        "KV scales: static, the checkpoint's k_scale and v_scale of 2 layers"
    )
    assert summary(folders[1], kv_forms.INT8).startswith(
        "KV scales: the checkpoint's k_scale and v_scale, which are for --kv-cache-dtype fp8, have no effect"
    )
    assert not summary(plain, kv_forms.FLOAT8) and not summary(folders[1], torch.float32)


class SecondOfTwo(Alone):
    """The second rank of two."""

    rank, size = 1, 2


def test_a_rank_has_the_scales_of_its_heads_and_layers(plain: Path, tmp_path: Path) -> None:
    folder = with_scales(plain, tmp_path, in_attention(("k_scale", "v_scale"), "fp8", HEADS), None)
    model = load_model(folder, dtype=torch.float32, device=CPU)
    assert model.kv_scales is not None
    shard, stage = Shard.of(model.config, SecondOfTwo()), Stage.of(model.config, SecondOfTwo())
    of_heads = scales_of_rank(model.kv_scales, shard, None)
    assert {index: each.values.tolist() for index, each in of_heads.items()} == {
        index: each.values[:, 1:].tolist() for index, each in model.kv_scales.items()
    }
    [(index, found)] = scales_of_rank(model.kv_scales, None, stage).items()
    assert index == 0 and torch.equal(found.values, model.kv_scales[stage.first].values)
