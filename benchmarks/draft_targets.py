"""Target models that a draft model predicts as well as is asked: ``python -m benchmarks.draft_targets``.

Random weights of two sizes agree by chance alone, so nothing measured on them says what a draft model brings. These
checkpoints are made of the default model's weights, and say what it says:

    wide FOLDER --noise 0.1   1.5 billion weights: 30 layers of 1,920, in which the model's own 576 are computed as they
                              are. The other units of its MLPs are random and add noise of the given size to it, by
                              which the acceptance rate is set; 0 for none. A step costs what a step of this shape costs
    short FOLDER --layers 20  the default model without layers before its last: a worse, faster draft

The rate that came of it is told by ``benchmarks.drafts`` (drafts_accepted_model of drafted_model):

    python -m benchmarks.draft_targets wide FOLDER --noise 0.1
    python -m benchmarks.drafts --model FOLDER --workloads W1 --temperatures 1 \\
        --speculative-config '{"model": "SmolLM2-135M-Instruct.Q4_1.gguf"}'
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from rootgraft.engine.checkpoint.gguf import GgufFile
from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.checkpoint.model_config import ModelConfig
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.loading.weight_readers import GgufWeights
from rootgraft.engine.text.tokenizer_gguf import read_gguf

HIDDEN, HEADS, KV_HEADS, MLP = 1920, 30, 10, 6656  # of the wide model; heads are of 64, three to a KV head as before


def read_default() -> tuple[ModelConfig, dict[str, Tensor], Path]:
    """The default model: shape, weights by their Hugging Face names in bfloat16, and its file."""
    path = resolve_model(None).path
    file = GgufFile.open(path)
    config = read_model_config(file)
    source = GgufWeights(file, config)
    weights = {}
    for name, shape in source.shapes.items():
        weights[name] = torch.empty(shape, dtype=torch.bfloat16)
        source.read(name, weights[name])
    return config, weights, path


def save(folder: Path, config: ModelConfig, weights: dict[str, Tensor], gguf: Path, **changes: object) -> None:
    """Write a checkpoint in Hugging Face format, with the default model's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": weights["model.layers.0.mlp.up_proj.weight"].shape[0],
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": 100000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": list(config.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(shape | changes, indent=1))
    tokenizer = read_gguf(gguf)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.definition))
    template = next(iter(tokenizer.chat_templates.values()))
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokenizer.special, "chat_template": template}))


def placed(weight: Tensor, rows: int, columns: int) -> Tensor:
    """A matrix of zeros with ``weight`` in its first corner."""
    wide = torch.zeros(rows, columns, dtype=weight.dtype)
    wide[: weight.shape[0], : weight.shape[1]] = weight
    return wide


def widen(folder: Path, noise: float) -> None:
    """Write the wide model. Norms are over more dimensions, of which the others are 0, so their weights are less."""
    config, weights, gguf = read_default()
    generator = torch.Generator().manual_seed(0)
    own, mlp, dim = config.hidden_size, weights["model.layers.0.mlp.up_proj.weight"].shape[0], config.head_dim
    share = own / HIDDEN
    heights = {"q_proj": HEADS * dim, "k_proj": KV_HEADS * dim, "v_proj": KV_HEADS * dim, "o_proj": HIDDEN}
    wide: dict[str, Tensor] = {}
    for name, weight in weights.items():
        part = name.split(".")[-2]
        if part.endswith("norm"):
            wide[name] = torch.zeros(HIDDEN, dtype=weight.dtype)
            wide[name][:own] = weight * math.sqrt(share)
        elif part in ("gate_proj", "up_proj"):
            wide[name] = placed(weight, MLP, HIDDEN)
            random = torch.randn(MLP - mlp, own, generator=generator) * weight.float().std()
            wide[name][mlp:, :own] = random.to(weight.dtype)
        elif part == "down_proj":
            wide[name] = placed(weight, HIDDEN, MLP)
            random = torch.randn(own, MLP - mlp, generator=generator) * weight.float().std()
            wide[name][:own, mlp:] = (noise * random * math.sqrt(mlp / (MLP - mlp))).to(weight.dtype)
        elif part == "embed_tokens":
            wide[name] = placed(weight, len(weight), HIDDEN)
        elif part != "lm_head":
            wide[name] = placed(weight, heights[part], HEADS * dim if part == "o_proj" else HIDDEN)
    eps = config.norm_eps * share
    changes = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    save(folder, config, wide, gguf, rms_norm_eps=eps, **changes)


def shorten(folder: Path, layers: int) -> None:
    """Write the default model with its first layers and its last one."""
    config, weights, gguf = read_default()
    kept = [*range(layers - 1), config.num_layers - 1]
    renamed = {f"model.layers.{old}.": f"model.layers.{new}." for new, old in enumerate(kept)}
    short: dict[str, Tensor] = {}
    for name, weight in weights.items():
        prefix = ".".join(name.split(".")[:3]) + "."
        if prefix in renamed:
            short[renamed[prefix] + name.removeprefix(prefix)] = weight
        elif ".layers." not in name and not name.startswith("lm_head"):
            short[name] = weight
    save(folder, config, short, gguf, num_hidden_layers=layers)


def main() -> None:
    """Write a checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("wide", "short"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--noise", type=float, default=0.0, help="of the wide model, beside the size of its own MLPs")
    parser.add_argument("--layers", type=int, default=20, help="of the short model")
    options = parser.parse_args()
    if options.kind == "wide":
        widen(options.folder, options.noise)
    else:
        shorten(options.folder, options.layers)


if __name__ == "__main__":
    main()
