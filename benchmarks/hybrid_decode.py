"""Write a checkpoint of random weights in the shape of Qwen 3.5 0.8B, to time its decode steps by ``bench step``.

    python benchmarks/hybrid_decode.py FOLDER && rootgraft bench step FOLDER --rows 1 --context 256 --max-model-len 2048

The report compares each part of a step with the time that its bytes take to read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import transformers

# Of its config.json.
SHAPE = {
    "vocab_size": 248_320,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


def main() -> None:
    """Write the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**SHAPE))
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
