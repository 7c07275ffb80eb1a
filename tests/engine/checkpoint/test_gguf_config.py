"""GGUF files: what their metadata and tensors may be, and what is refused by name."""

from __future__ import annotations

import mmap
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.models.small_gguf import HIDDEN, SHAPES, VOCAB, tensors, write

from rootgraft.engine.checkpoint.base_digest import base_digest
from rootgraft.engine.checkpoint.gguf import GgufFile
from rootgraft.engine.checkpoint.model_config import FrequencyFactors, LinearScaling
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ModelError
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.models.decoder import DecoderModel

CPU = torch.device("cpu")


def load(path: Path) -> DecoderModel:
    return load_model(path, dtype=torch.float32, device=CPU)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_mixed_types(path: Path) -> None:
    """Tensors of several types in one file, each as the gguf package reads it."""
    kinds = gguf.GGMLQuantizationType
    types = {
        "token_embd.weight": kinds.Q8_0,
        "blk.0.attn_v.weight": kinds.Q5_1,
        "blk.0.ffn_gate.weight": kinds.Q4_0,
        "blk.0.ffn_up.weight": kinds.BF16,
        "blk.0.ffn_down.weight": kinds.Q4_1,
    }
    content = tensors()
    model = load(write(path, content, types=types))
    read = {
        name: torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(content[name], kind), kind).copy())
        for name, kind in types.items()
    }
    torch.testing.assert_close(model.embedding, read["token_embd.weight"])
    gate_up = torch.cat((read["blk.0.ffn_gate.weight"], read["blk.0.ffn_up.weight"]))
    torch.testing.assert_close(model.layers[0].mlp.gate_up(torch.eye(HIDDEN)), gate_up.T.contiguous())
    torch.testing.assert_close(model.layers[0].mlp.down(torch.eye(96)), read["blk.0.ffn_down.weight"].T.contiguous())


def test_a_worker_parses_the_header_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration, weights, digest and adapters' layout come from one opened file."""
    write(path, tensors())
    opened: list[Path] = []
    original = GgufFile.__init__

    def counted(self: GgufFile, path: Path, mapped: mmap.mmap) -> None:
        opened.append(path)
        original(self, path, mapped)

    monkeypatch.setattr(GgufFile, "__init__", counted)
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, max_num_seqs=2, block_size=4, max_num_batched_tokens=8,
        num_gpu_blocks_override=8, enable_lora=True, max_loras=1,
    )  # fmt: skip
    worker = Worker(config, path)
    assert opened == [path]
    assert worker.base_digest == base_digest(path) and worker.vocab_size == VOCAB


def test_a_head_of_its_own(path: Path) -> None:
    content = tensors(SHAPES | {"output.weight": (VOCAB, HIDDEN)})
    model = load(write(path, content))
    assert not model.config.tied_head
    torch.testing.assert_close(model.head(torch.eye(HIDDEN)), torch.from_numpy(content["output.weight"].T.copy()))


def test_end_tokens(path: Path) -> None:
    special = {f"tokenizer.ggml.{name}_token_id": token for name, token in (("bos", 1), ("eos", 4), ("eot", 9))}
    config = read_model_config(write(path, tensors(), **special, **{"tokenizer.ggml.eom_token_id": 4}))
    assert (config.bos_token_id, config.eos_token_ids) == (1, (4, 9))


def test_rope_scaling(path: Path) -> None:
    linear = read_model_config(write(path, tensors(), rope__scaling__type="linear", rope__scaling__factor=2.0))
    assert linear.layers[0].rope is not None and linear.layers[0].rope.scaling == LinearScaling(2.0)
    factors = tensors() | {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}
    divided = read_model_config(write(path, factors))
    assert divided.layers[0].rope is not None
    assert divided.layers[0].rope.scaling == FrequencyFactors((1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0))


def test_windows(path: Path) -> None:
    pattern = {"attention.sliding_window_pattern": [False], "attention.sliding_window": 9}
    assert read_model_config(write(path, tensors(), architecture="gemma3", **pattern)).layers[0].window is None
    pattern["attention.sliding_window_pattern"] = [True]
    assert read_model_config(write(path, tensors(), architecture="gemma3", **pattern)).layers[0].window == 9
    assert read_model_config(write(path, tensors(), architecture="gemma3")).layers[0].window is None
    assert read_model_config(write(path, tensors(), architecture="gemma2")).layers[0].window == 4096
    assert read_model_config(write(path, tensors(), architecture="phi3")).layers[0].window is None


REFUSED_METADATA = {
    "another router": (
        {"expert_count": 8, "expert_gating_func": 2},
        "expert_gating_func must be 1 or 3 (softmax), not 2",
    ),
    "more experts of a token than there are": (
        {"expert_count": 8, "expert_used_count": 9},
        "num_experts_per_tok must be an integer from 1 to 8, not 9",
    ),
    "scale of the scores": ({"attention.scale": 0.1}, "llama.attention.scale is not supported"),
    "factor of the logits": ({"logit_scale": 0.1}, "llama.logit_scale is not supported"),
    "YaRN with a factor of attention": (
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 2.0},
        "rope.scaling.attn_factor must be 1.0",
    ),
    "window in Llama": ({"attention.sliding_window": 5}, "attention.sliding_window must be absent, not 5"),
    "pattern in Llama": ({"attention.sliding_window_pattern": 5}, "attention.sliding_window_pattern must be absent"),
    "heads by layer": ({"attention.head_count": [4]}, "attention.head_count must be an integer"),
    "unequal head sizes": ({"attention.value_length": 8}, "attention.value_length must be equal"),
    "half a rotation": ({"rope.dimension_count": 8}, "rotates 8 of 16"),
    "wide rotation": ({"rope.dimension_count": 32}, "partial_rotary_factor must be"),
    "soft cap in Llama": ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "absurd number of layers": ({"block_count": 1 << 31}, "num_hidden_layers must be an integer"),
}


@pytest.mark.parametrize("case", REFUSED_METADATA)
def test_refused_metadata(case: str, path: Path) -> None:
    changes, message = REFUSED_METADATA[case]
    with pytest.raises(ModelError) as caught:
        read_model_config(write(path, tensors(), **changes))
    assert message in str(caught.value)


def test_unknown_architecture(path: Path) -> None:
    with pytest.raises(ModelError, match="The GGUF architecture 'mamba' is not supported"):
        load(write(path, tensors(), architecture="mamba"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.0.ffn_down.weight": None}, r"lacks model\.layers\.0\.mlp\.down_proj\.weight"),
        ({"token_embd.weight": None}, r"no matrix token_embd\.weight"),
        ({"blk.0.attn_sinks.weight": (4,)}, r"does not use: blk\.0\.attn_sinks\.weight"),
        ({"blk.0.post_ffw_norm.weight": (HIDDEN,)}, r"does not use: blk\.0\.post_ffw_norm\.weight"),
        ({"blk.1.attn_norm.weight": (HIDDEN,)}, r"does not use: model\.layers\.1\.input_layernorm\.weight"),
        ({"model.norm.weight": (HIDDEN,)}, "two tensors for the same purpose"),
        ({"blk.0.attn_k.weight": (33, HIDDEN)}, r"k_proj\.weight has shape \(33, 64\)"),
        ({"rope_factors_long.weight": (8,)}, "rope_factors_short.weight must exist"),
        ({"rope_freqs.weight": (7,)}, "must contain only finite numbers"),
        ({"rope_freqs.weight": (8,)}, "finite numbers above 0"),
    ],
)
def test_refused_tensors(path: Path, changes: dict[str, tuple[int, ...] | None], message: str) -> None:
    shapes = {name: shape for name, shape in (SHAPES | changes).items() if shape is not None}
    with pytest.raises(ModelError, match=message):
        load(write(path, tensors(shapes)))


def test_frequency_factors_must_be_the_only_scaling(path: Path) -> None:
    content = tensors() | {"rope_freqs.weight": np.ones(8, dtype=np.float32)}
    with pytest.raises(ModelError, match="only rope scaling"):
        read_model_config(write(path, content, rope__scaling__type="linear", rope__scaling__factor=2.0))
    half = {"rope_freqs.weight": gguf.GGMLQuantizationType.F16}
    with pytest.raises(ModelError, match="type F32"):
        read_model_config(write(path, content, types=half))


def test_a_file_of_ollamas_store_has_no_suffix(tmp_path: Path) -> None:
    blob = write(tmp_path / "sha256-6a0746a1", tensors())
    model = load(blob)
    assert model.config == read_model_config(blob) and model.embedding.shape == (VOCAB, HIDDEN)
    (tmp_path / "sha256-0").write_bytes(b"GGU")
    with pytest.raises(ModelError, match="sha256-0 is neither a folder"):
        load(tmp_path / "sha256-0")
