"""Train the three example adapters on the default model, on a CPU, in minutes each.

    python examples/train_adapters.py [--output FOLDER] [--only NAME]

The model is the quantised GGUF file of ``rootgraft pull``. The adapters are trained on its dequantised weights, which
are those that the engine computes with. Needs transformers and peft, which come with
``pip install '.[test]'``.
"""

from __future__ import annotations

import argparse
import math
import random
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from adapters_data import Example, Task, tasks
from torch import Tensor
from torch.nn import functional

from rootgraft.engine.checkpoint.locate import DEFAULT_NAME, resolve_model
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.loading.load_model import open_source
from rootgraft.engine.text.tokenizer import Tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing them
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

BASE_NAME = f"HuggingFaceTB/{DEFAULT_NAME}"
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Training parameters. Rank 8 in the attention modules is 922,000 parameters, 1.9 MB in 16 bits."""

    rank: int
    epochs: int
    learning_rate: float = 2e-3
    batch_size: int = 12


RECIPES = {
    "pirate": Recipe(rank=4, epochs=2),
    "contact-card": Recipe(rank=8, epochs=1),
    "shell": Recipe(rank=8, epochs=1),
}


def main() -> None:
    """Train all adapters, or one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=RECIPES, help="train this one alone")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "adapters", help="where they go")
    arguments = parser.parse_args()
    path = resolve_model(None).path
    tokenizer = Tokenizer.load(path)
    for task in tasks():
        if arguments.only in (None, task.name):
            train(load_for_training(path), tokenizer, task, RECIPES[task.name], arguments.output / task.name)


def load_for_training(path: Path) -> Any:
    """The default model as a transformers model in bfloat16, its weights read by the engine's own loader."""
    config = read_model_config(path)
    rope = config.layers[0].rope
    assert config.family == "llama" and rope is not None and rope.scaling is None
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=config.tied_head,
        )
    ).to(torch.bfloat16)
    source = open_source(path, config, dummy=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            source.read(name, parameter)
    return model


def train(model: Any, tokenizer: Tokenizer, task: Task, recipe: Recipe, folder: Path) -> None:
    """Train one adapter and save it in PEFT's format, in 16 bits and without local paths."""
    torch.manual_seed(0)
    config = LoraConfig(r=recipe.rank, lora_alpha=2 * recipe.rank, target_modules=MODULES, task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of each other
        adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    parameters = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    encoded = [encode(tokenizer, example) for example in task.train]
    steps = recipe.epochs * math.ceil(len(encoded) / recipe.batch_size)
    began = time.monotonic()
    for step, batch in enumerate(batches(encoded, recipe)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min((step + 1) / (0.05 * steps), 1 - step / steps)
        loss = answer_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(
                f"{task.name}: step {step} of {steps}, loss {loss.item():.3f}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    adapted.peft_config["default"].base_model_name_or_path = BASE_NAME
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)  # PEFT's template of a model card


Encoded = tuple[list[int], int]
"""(tokens of a conversation, index of the answer's first token)."""


def encode(tokenizer: Tokenizer, example: Example) -> Encoded:
    """Tokenize a conversation as the engine does, and the answer with its end token."""
    prompt = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": example.prompt}]), False)
    answer = tokenizer.encode(f"{example.answer}<|im_end|>", False)
    return [*prompt, *answer], len(prompt)


def batches(encoded: Sequence[Encoded], recipe: Recipe) -> Iterator[list[Encoded]]:
    """Batches of all epochs in random order, each of similar lengths to reduce padding."""
    rng = random.Random(0)
    for _ in range(recipe.epochs):
        ordered = sorted(encoded, key=lambda each: (len(each[0]), rng.random()))
        cut = [ordered[at : at + recipe.batch_size] for at in range(0, len(ordered), recipe.batch_size)]
        rng.shuffle(cut)
        yield from cut


def answer_loss(model: Any, batch: list[Encoded]) -> Tensor:
    """Mean cross entropy of the answers' tokens; only these go through the head."""
    width = max(len(tokens) for tokens, _ in batch)
    padded = torch.tensor([tokens + [0] * (width - len(tokens)) for tokens, _ in batch])
    wanted = torch.tensor([[start <= at < len(tokens) for at in range(width)] for tokens, start in batch])
    hidden = model.model(input_ids=padded, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][wanted[:, 1:]])
    return functional.cross_entropy(logits.float(), padded[:, 1:][wanted[:, 1:]])


if __name__ == "__main__":
    main()
