"""Folders that are quantised here: read back by transformers with compressed-tensors, and by ourselves, alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from support.models.paged_run import CPU, run_whole
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rootgraft.api.cli.main import main
from rootgraft.engine.errors import ConfigError, ModelError
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.model_tools.quantize_folder import SCHEMES, Scheme, quantize_folder

TOKENS = [5, 9, 100, 7, 64, 3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(4)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "plain", max_shard_size="200KB")
    (tmp_path / "plain" / "tokenizer.json").write_text("{}")
    return tmp_path / "plain"


def fp4_values(parts: dict[str, Tensor]) -> Tensor:
    """What NVFP4 means, in fp32."""
    codes = torch.stack((parts["weight_packed"] & 15, parts["weight_packed"] >> 4), -1).flatten(1)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[(codes & 7).int()] * (1 - 2 * (codes >> 3).float())
    scales = parts["weight_scale"].float() / parts["weight_global_scale"]
    return values * scales.repeat_interleave(16, 1)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_reader_gets_the_same_numbers(scheme: Scheme, folder: Path, tmp_path: Path) -> None:
    """Ours, transformers' and the package's own: one model, near to the one before."""
    out = tmp_path / "out"
    steps: list[tuple[int, int]] = []
    found = quantize_folder(folder, out, scheme, lambda done, total: steps.append((done, total)))
    assert [done for done, _ in steps] == list(range(1, steps[-1][1] + 1)) and len({total for _, total in steps}) == 1
    assert found.modules == 14 and found.bytes_after < found.bytes_before
    assert (out / "tokenizer.json").is_file() and len(list(out.glob("*.safetensors"))) > 1
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    group = QuantizationConfig.model_validate(config).config_groups["group_0"]
    ours = run_whole(load_model(out, dtype=torch.float32, device=CPU), TOKENS)
    plain = {name: part for file in folder.glob("*.safetensors") for name, part in load_file(file).items()}
    stored = {name: part for file in out.glob("*.safetensors") for name, part in load_file(file).items()}
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    for name in [name for name in plain if name.endswith("_proj.weight")]:
        module = name.removesuffix("weight")
        parts = {key.removeprefix(module): part for key, part in stored.items() if key.startswith(module)}
        weight = plain[name].float()
        meant = compressor.decompress(parts, group)["weight"].float()
        if scheme == "nvfp4":  # which the package rounds to bfloat16
            assert torch.equal(fp4_values(parts).bfloat16().float(), meant.bfloat16().float())
            meant = fp4_values(parts)
        plain[name] = meant
        step = weight.abs().amax() / {"w4a16": 7.5, "w8a8": 120, "fp8": 28, "nvfp4": 5}[scheme]
        assert (plain[name] - weight).abs().max() <= step
    for file in folder.glob("*.safetensors"):
        save_file({name: plain[name] for name in load_file(file)}, file, metadata={"format": "pt"})
    meant = run_whole(load_model(folder, dtype=torch.float32, device=CPU), TOKENS)
    torch.testing.assert_close(ours, meant, rtol=1e-4, atol=1e-4)


def test_transformers_reads_it_back(folder: Path, tmp_path: Path) -> None:
    quantize_folder(folder, tmp_path / "out", "w4a16")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0]
    ours = run_whole(load_model(tmp_path / "out", dtype=torch.float32, device=CPU), TOKENS)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_numbers_of_nvfp4_are_the_nearest_and_blocks_share_a_factor(folder: Path, tmp_path: Path) -> None:
    quantize_folder(folder, tmp_path / "out", "nvfp4")
    plain = {name: part for file in folder.glob("*.safetensors") for name, part in load_file(file).items()}
    stored = {name: part for file in (tmp_path / "out").glob("*.safetensors") for name, part in load_file(file).items()}
    totals = {name: float(part) for name, part in stored.items() if name.endswith("weight_global_scale")}
    attention = {value for name, value in totals.items() if "layers.0.self_attn" in name}
    assert len(attention) == 1 and len(set(totals.values())) == 4
    for name in [name for name in plain if name.endswith("_proj.weight")]:
        module = name.removesuffix("weight")
        parts = {key.removeprefix(module): part for key, part in stored.items() if key.startswith(module)}
        scales = (parts["weight_scale"].float() / parts["weight_global_scale"]).repeat_interleave(16, 1)
        levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        exact = plain[name] / scales
        nearest = (exact.abs()[..., None] - levels).abs().amin(-1)
        torch.testing.assert_close((fp4_values(parts) / scales - exact).abs(), nearest, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_quantised_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    quantize_folder(folder, out, "fp8")
    with pytest.raises(ModelError, match="its weights are already quantised"):
        quantize_folder(out, tmp_path / "again", "w8a8")
    with pytest.raises(ConfigError, match="not empty"):
        quantize_folder(folder, out, "fp8")
    file = sorted(folder.glob("*.safetensors"))[-1]
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("_proj.weight"))
    tensors[name][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"_proj\.weight cannot be quantised: it has numbers that are not finite"):
        quantize_folder(folder, tmp_path / "again", "w8a8")
    assert not (tmp_path / "again").exists() and not list(tmp_path.glob(".again*"))


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", str(folder), "--output", str(tmp_path / "out"), "--scheme", "w8a8"]) == 0
    assert "14 linear modules in w8a8" in capsys.readouterr().out
    assert main(["quantize", str(folder)]) == 2
    assert "--output must name a folder" in capsys.readouterr().err
