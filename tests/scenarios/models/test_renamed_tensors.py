"""Checkpoints and adapters that name keys and tensors as their own code did (EXAONE 3.5, GLM-4, Phi-2 and others)."""

from __future__ import annotations

import json
import random
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.code_models import CODE_MODELS, CodeModel, write_code_model, write_ling_1
from support.models.lockstep_ranks import run_ranks
from support.models.lora_driver import AdaptedRun
from support.models.paged_run import CPU, run_ragged, run_whole
from support.models.tiny_models import VOCAB, adaptable, oracle_logits, save

from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.errors import ConfigError, ModelError
from rootgraft.engine.loading.base_layout import base_layout, planned_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.shards import Shard, check_split
from rootgraft.kernels.collectives import Ranks
from rootgraft.lora.errors import AdapterError
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.read_adapter import AdapterReader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from peft import LoraConfig, get_peft_model

TOKENS = [token * 7 % VOCAB for token in range(23)]
OWN = {
    "num_hidden_layers": "num_layers",
    "rms_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
CODE = (
    ("model.layers.", "transformer.h."),
    ("self_attn.o_proj", "attn.attention.out_proj"),
    ("self_attn.", "attn.attention."),
    ("mlp.gate_proj", "mlp.c_fc_0"),
    ("mlp.up_proj", "mlp.c_fc_1"),
    ("mlp.down_proj", "mlp.c_proj"),
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose config is as published: keys of its own, and a class that was code."""
    folder = save("exaone", tmp_path_factory.mktemp("exaone"))
    config = json.loads((folder / "config.json").read_text())
    config = {OWN.get(key, key): value for key, value in config.items()}
    config |= {
        "architectures": ["ExaoneForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert all("transformer." in name or name == "lm_head.weight" for name in load_file(folder / "model.safetensors"))
    return folder


def test_logits_are_those_of_transformers(published: Path) -> None:
    model = load_model(published, dtype=torch.float32, device=CPU)
    torch.testing.assert_close(run_whole(model, TOKENS), oracle_logits("exaone", TOKENS), rtol=1e-4, atol=1e-4)


def test_a_tensor_that_is_there_by_both_names_is_refused(published: Path, tmp_path: Path) -> None:
    tensors = load_file(published / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["transformer.h.0.mlp.c_fc_1.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((published / "config.json").read_bytes())
    with pytest.raises(ModelError, match=r"The tensor model.layers.0.mlp.up_proj.weight appears twice"):
        load_model(tmp_path, dtype=torch.float32, device=CPU)


def test_adapters_of_the_code_are_those_of_the_class(published: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(adaptable("exaone"), options).save_pretrained(tmp_path / "class")
    tensors = load_file(tmp_path / "class" / "adapter_model.safetensors")
    config = json.loads((tmp_path / "class" / "adapter_config.json").read_text())
    for name, own in CODE:
        tensors = {key.replace(name, own): value for key, value in tensors.items()}
    assert all(".transformer.h." in name for name in tensors)
    config["target_modules"] = ["q_proj", "k_proj", "v_proj", "out_proj", "c_fc_0", "c_fc_1", "c_proj"]
    (tmp_path / "code").mkdir()
    save_file(tensors, tmp_path / "code" / "adapter_model.safetensors")
    (tmp_path / "code" / "adapter_config.json").write_text(json.dumps(config))
    model = load_model(published, dtype=torch.float32, device=CPU)
    reader = AdapterReader(base_layout(model, published, dummy=False), max_rank=8)
    found, wanted = (reader.read(str(tmp_path / name)) for name in ("code", "class"))
    assert found.digest == wanted.digest


@pytest.fixture(scope="module", params=CODE_MODELS)
def code_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[CodeModel, Path]:
    model = CODE_MODELS[request.param]
    return model, write_code_model(model, tmp_path_factory.mktemp(request.param))


def test_code_is_what_transformers_computes(code_model: tuple[CodeModel, Path]) -> None:
    """Whole, and in chunks beside other rows."""
    model, folder = code_model
    loaded = load_model(folder, dtype=torch.float32, device=CPU)
    theirs = oracle_logits(model.base, TOKENS)
    close = {"rtol": 1e-4, "atol": 1e-4 * theirs.abs().max().item()}
    torch.testing.assert_close(run_whole(loaded, TOKENS), theirs, **close)
    for logits in run_ragged(loaded, [TOKENS, TOKENS], 4, random.Random(1)):
        torch.testing.assert_close(logits, theirs, **close)


def linear_modules(tensors: dict[str, torch.Tensor]) -> list[str]:
    """All of the layers but the router."""
    layers = (
        name for name in tensors if re.search(r"\.\d+\..*\.weight$", name) and not name.endswith(".mlp.gate.weight")
    )
    return [name.removesuffix(".weight") for name in layers if tensors[name].ndim == 2]


def test_an_adapter_on_every_linear_module_of_the_code(code_model: tuple[CodeModel, Path], tmp_path: Path) -> None:
    """It is what the weights with its products added are, in chunks, beside a row without one."""
    model, folder = code_model
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    modules = linear_modules(tensors)
    assert model.module in modules
    adapter: dict[str, torch.Tensor] = {}
    for module in modules:
        rows, columns = tensors[f"{module}.weight"].shape
        down, up = (0.3 * torch.randn(shape, generator=generator) for shape in ((2, columns), (rows, 2)))
        adapter |= {f"base_model.model.{module}.lora_{part}.weight": each for part, each in (("A", down), ("B", up))}
        tensors[f"{module}.weight"] += up @ down
    (tmp_path / "adapter").mkdir()
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors")
    targets = sorted({module.rpartition(".")[2] for module in modules})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": targets}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "merged").mkdir()
    save_file(tensors, tmp_path / "merged" / "model.safetensors")
    (tmp_path / "merged" / "config.json").write_bytes((folder / "config.json").read_bytes())
    loaded = load_model(folder, dtype=torch.float32, device=CPU)
    layout = base_layout(loaded, folder, dummy=False)
    bank = AdapterBank(layout, 1)
    bank.install(0, AdapterReader(layout, max_rank=8).read(str(tmp_path / "adapter")))
    run = AdaptedRun(loaded, bank, [0, -1], [0, 0])
    pieces = [run.extend([TOKENS[start : start + 9]] * 2) for start in range(0, len(TOKENS), 9)]
    adapted, plain = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    merged = run_whole(load_model(tmp_path / "merged", dtype=torch.float32, device=CPU), TOKENS)
    theirs = oracle_logits(model.base, TOKENS)
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4 * merged.abs().max().item())
    torch.testing.assert_close(plain, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    assert (adapted - plain).abs().max() > 0.05


def test_ranks_of_the_code_have_the_logits_of_one(code_model: tuple[CodeModel, Path]) -> None:
    model, folder = code_model
    config, theirs = read_model_config(folder), oracle_logits(model.base, TOKENS)

    def logits(ranks: Ranks) -> torch.Tensor:
        shard = Shard.of(config, ranks)
        return run_whole(load_model(folder, dtype=torch.float32, device=CPU, shard=shard), TOKENS)

    torch.testing.assert_close(run_ranks(2, logits)[0], theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
    if model.grouped:
        with pytest.raises(
            ConfigError, match=r"does not divide .*2 KV heads, which are stored in one tensor with their queries"
        ):
            check_split(config, 6)


def test_qwen_1_ends_where_its_code_changes_attention(tmp_path: Path) -> None:
    assert read_model_config(write_code_model(CODE_MODELS["qwen"], tmp_path)).max_position_embeddings == 96


def test_a_head_of_an_adapter_in_place_of_one_with_a_bias_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = LoraConfig(r=2, target_modules=["fc1"], modules_to_save=["lm_head"])
        get_peft_model(adaptable("phi"), options).save_pretrained(tmp_path / "adapter")
    layout = planned_layout(save("phi", tmp_path / "model"), torch.float32, dummy=False)
    with pytest.raises(
        AdapterError, match=r"its own weights of lm_head .* which a model whose head has a bias does not"
    ):
        AdapterReader(layout, max_rank=8).check(str(tmp_path / "adapter"))


def test_ling_1_is_a_qwen_2_moe_with_a_head_of_unit_columns(tmp_path: Path) -> None:
    oracle = write_ling_1(tmp_path)
    with torch.no_grad():
        theirs = oracle(torch.tensor([TOKENS])).logits[0]
    loaded = load_model(tmp_path, dtype=torch.float32, device=CPU)
    close = {"rtol": 1e-4, "atol": 1e-4 * theirs.abs().max().item()}
    for logits in (run_whole(loaded, TOKENS), *run_ragged(loaded, [TOKENS, TOKENS], 4, random.Random(1))):
        torch.testing.assert_close(logits, theirs, **close)


@pytest.mark.parametrize("name", ["ling", "ling_1"])
def test_the_only_expert_of_a_token_is_weighted_by_its_score(name: str, tmp_path: Path) -> None:
    """Which their code divides by the sum where there are several."""
    if name == "ling":
        write_code_model(CODE_MODELS[name], tmp_path)
        oracle = adaptable(CODE_MODELS[name].base)
    else:
        oracle = write_ling_1(tmp_path)
    routers = [module for module in oracle.modules() if hasattr(module, "norm_topk_prob")]
    assert routers
    for router in routers:
        router.top_k, router.norm_topk_prob = 1, False
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1, "norm_topk_prob": True}))
    with torch.no_grad():
        theirs = oracle(torch.tensor([TOKENS])).logits[0]
    ours = run_whole(load_model(tmp_path, dtype=torch.float32, device=CPU), TOKENS)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())


def test_bloom_as_published(tmp_path: Path) -> None:
    """Without the name of the whole model in front of tensors, and with the length of contexts under an old key."""
    folder = save("bloom", tmp_path)
    file = folder / "model.safetensors"
    stored = load_file(file)
    save_file({name.removeprefix("transformer."): tensor for name, tensor in stored.items()}, file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"n_embed": config.pop("hidden_size"), "seq_length": 96}
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(folder, dtype=torch.float32, device=CPU)
    assert model.config.max_position_embeddings == 96
    theirs = oracle_logits("bloom", TOKENS)
    torch.testing.assert_close(run_whole(model, TOKENS), theirs, rtol=1e-4, atol=1e-4 * theirs.abs().max().item())
