"""Adapters that read the base's weights (DoRA), on bases that are no folder: a quantised GGUF file, random weights."""

from __future__ import annotations

import warnings
from array import array
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.messages import Failed, Submit, TokenOut
from rootgraft.engine.types import SamplingParams

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    from peft import LoraConfig, PeftModel, get_peft_model

CPU = torch.device("cpu")
VOCAB, HEADS, KV_HEADS = 96, 4, 2
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
LINEARS = [name.rpartition(".")[2] for name in NAMES if name.endswith("_proj")]


def interleaved(rows: Tensor, heads: int) -> Tensor:
    """The rows of each head in llama.cpp's order, and back with ``deinterleaved``."""
    return rows.view(heads, 2, -1, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def deinterleaved(rows: Tensor, heads: int) -> Tensor:
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def gguf_name(key: str) -> str:
    module, _, kind = key.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    _, _, index, inner = module.split(".", 3)
    return f"blk.{index}.{NAMES[inner]}.{kind}"


def heads_of(key: str) -> int:
    return HEADS if ".q_proj." in key else KV_HEADS if ".k_proj." in key else 0


@pytest.fixture(scope="module", params=["Q4_1", "Q8_0"])
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A GGUF file with quantised matrices, and transformers' model of what the gguf package reads in it."""
    kind = gguf.GGMLQuantizationType[request.param]
    path = tmp_path_factory.mktemp("quantised") / "model.gguf"
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=128, initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_context_length, 128), (writer.add_embedding_length, 64), (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 96), (writer.add_head_count, HEADS), (writer.add_head_count_kv, KV_HEADS),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps), (writer.add_rope_freq_base, 10000.0),
        (writer.add_eos_token_id, 2),
    ):  # fmt: skip
        add(value)  # type: ignore[operator]
    with torch.no_grad():
        for key, value in model.state_dict().items():
            heads = heads_of(key)
            stored = interleaved(value, heads) if heads else value
            if value.dim() == 1:
                writer.add_tensor(gguf_name(key), stored.numpy())
                continue
            data = gguf.quants.quantize(stored.numpy(), kind)
            writer.add_tensor(gguf_name(key), data, raw_dtype=kind)
            read = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
            value.copy_(deinterleaved(read, heads) if heads else read)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path, model


def make_dora(model: Any, folder: Path) -> Path:
    """A DoRA adapter of all linear modules and the head, whose magnitudes are far from the base's norms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"r": 3, "use_dora": True, "target_modules": [*LINEARS, "lm_head"], "init_lora_weights": False}
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
        with torch.no_grad():
            for key, parameter in adapted.named_parameters():
                if "lora_magnitude" in key:
                    parameter.mul_(0.5 + torch.rand_like(parameter))
        adapted.save_pretrained(folder)
        adapted.unload()
    return folder


def generate(path: Path, folder: Path, prompt: list[int], count: int, **options: Any) -> list[int]:
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, num_gpu_blocks_override=20, enable_lora=True,
        lora_modules=(f"dora={folder}",), **options,
    )  # fmt: skip
    core = EngineCore.load(config, path)
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    core.handle([Submit(1, array("i", prompt), params, "dora")])
    tokens: list[int] = []
    while core.has_work:
        for message in core.step():
            assert not isinstance(message, Failed), message
            tokens += message.tokens if isinstance(message, TokenOut) else ()
    core.close()
    return tokens


@torch.no_grad()
def oracle(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([tokens])).logits[0, -1]
        best = logits.topk(2).values
        assert best[0] - best[1] > 1e-4, "the oracle itself is undecided"
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


PROMPT = [(7 * i + i * i) % VOCAB for i in range(21)]


def test_dora_on_a_quantised_file_is_pefts_on_the_dequantised_weights(quantised, tmp_path):
    path, model = quantised
    folder = make_dora(model, tmp_path / "dora")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(model, folder).eval()
    wanted = oracle(adapted, PROMPT, 12)
    adapted.unload()
    assert generate(path, folder, PROMPT, 12) == wanted != oracle(model, PROMPT, 12)


def test_the_layout_reads_what_the_model_computes_with(quantised):
    path, model = quantised
    layout = base_layout(load_model(path, dtype=torch.float32, device=CPU), path, dummy=False)
    for module in (f"model.layers.1.{name}" for name in NAMES if name.endswith("_proj")):
        torch.testing.assert_close(layout.read_weight(module), model.get_submodule(module).weight, rtol=0, atol=0)


def test_dora_on_random_weights_is_pefts_on_the_same(tmp_path):
    """``--load-format dummy``: the norms are those of the very weights that the model was given."""
    LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "base")  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path / "base")).eval()
    ours = load_model(tmp_path / "base", dtype=torch.float32, device=CPU, dummy=True)
    layout = base_layout(ours, tmp_path / "base", dummy=True)
    torch.testing.assert_close(layout.read_weight("model.embed_tokens"), ours.embedding, rtol=0, atol=0)
    attention = ours.layers[1].attention.output
    read = layout.read_weight("model.layers.1.self_attn.o_proj")
    torch.testing.assert_close(attention(torch.eye(48)), read.T.contiguous(), rtol=0, atol=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.copy_(layout.read_weight(name.removesuffix(".weight")))
    folder = make_dora(model, tmp_path / "dora")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = oracle(PeftModel.from_pretrained(model, folder).eval(), PROMPT, 12)
    assert generate(tmp_path / "base", folder, PROMPT, 12, load_format="dummy") == wanted
