"""Whole-model logits with adapters are those of peft: mixtures of options, and mixed batches.

Each option alone: ``test_peft_matrix.py``.
"""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.lora_driver import AdaptedRun
from support.models.lora_models import BASES, LINEARS, VOCAB, PeftOracle, base, decoder, layout_of, make_adapter
from support.models.peft_matrix import bank_of, off, options_of, prompt, reader

from rootgraft.lora.activated_lora import activation_position
from rootgraft.lora.lora_step import AdapterBank

PROMPTS = 5


def mixture(rng: random.Random) -> dict[str, Any]:
    """Options drawn at random, of those that peft can combine."""
    kind = rng.choice(["plain", "dora", "lora_bias", "activated"])
    names = LINEARS if kind in ("lora_bias", "activated") else [*LINEARS, "embed_tokens", "lm_head"]
    targets = rng.sample(names, rng.randint(1, len(names)))
    options: dict[str, Any] = {
        "r": rng.randint(1, 17),
        "lora_alpha": rng.randint(4, 40),
        "use_rslora": rng.random() < 0.5,
        "target_modules": targets,
        "rank_pattern": {rng.choice(targets): rng.randint(1, 9)} if rng.random() < 0.5 else {},
        "alpha_pattern": {rng.choice(targets): rng.randint(1, 60)} if rng.random() < 0.5 else {},
    }
    if kind == "dora":
        options["use_dora"] = True
    elif kind == "lora_bias":
        options["lora_bias"] = True
    elif kind == "activated":
        options["alora_invocation_tokens"] = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
    return options


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("seed", range(2))
def test_mixed_batches(name, seed, bases, tmp_path):
    """Rows of the base and of adapters with random options share steps that cut their prompts anywhere."""
    rng = random.Random(f"{name} {seed}")
    folders: list[Path | None] = [None]
    for index in range(3):
        options = mixture(rng)
        folder = tmp_path / str(index)
        folders.append(make_adapter(name, bases, folder, seed=index, **options_of(name, options)))
    adapters = [reader(name, bases).read(str(folder)) for folder in folders if folder]
    choice = [0, 1, 2, 3, rng.randrange(4), rng.randrange(4)]
    rows = [prompt(rng.randrange(1000)) for _ in choice]
    first = []
    for row, index in enumerate(choice):
        invocation = adapters[index - 1].invocation_tokens if index else ()
        if invocation and rng.random() < 0.8:
            at = rng.randint(0, len(rows[row]))
            rows[row] = [*rows[row][:at], *invocation, *rows[row][at:]]
        first.append(first_adapted(rows[row], invocation))
    run = AdaptedRun(decoder(name, bases), bank_of(name, bases, adapters), [index - 1 for index in choice], first)
    parts: list[list[torch.Tensor]] = [[] for _ in rows]
    left = list(rows)
    while any(left):
        cut = [rng.randint(0, 9) for _ in left]
        cut = cut if any(n and tokens for n, tokens in zip(cut, left, strict=True)) else [9] * len(left)
        for part, logits in zip(parts, run.extend([t[:n] for t, n in zip(left, cut, strict=True)]), strict=True):
            part.append(logits)
        left = [tokens[n:] for tokens, n in zip(left, cut, strict=True)]
    oracle = PeftOracle(name, bases)
    for tokens, index, part in zip(rows, choice, parts, strict=True):
        assert off(torch.cat(part), oracle.logits(folders[index], tokens)) < 1e-4


def first_adapted(tokens: list[int], invocation: tuple[int, ...]) -> int:
    if not invocation:
        return 0
    position = activation_position(array("i", tokens), invocation)
    return 1 << 30 if position is None else position


@pytest.mark.parametrize("where", ["absent", "start", "twice", "end", "cut off"])
def test_activated(where, bases, tmp_path):
    """The base's bits up to the last invocation, peft's logits from there on."""
    invocation = [7, 8, 9]
    folder = make_adapter(
        "llama", bases, tmp_path, target_modules=LINEARS, alora_invocation_tokens=invocation, lora_bias=True
    )
    tokens = {
        "absent": prompt(1, 15),
        "start": [*invocation, *prompt(2, 9)],
        "twice": [*prompt(3, 4), *invocation, *prompt(4, 5), *invocation, 4, 5],
        "end": [*prompt(5, 8), *invocation],
        "cut off": [*prompt(6, 8), 7, 8],
    }[where]
    adapter = reader("llama", bases).read(str(folder))
    assert adapter.invocation_tokens == (7, 8, 9)
    first = first_adapted(tokens, adapter.invocation_tokens)
    assert first == {"start": 0, "twice": 12, "end": 8}.get(where, 1 << 30)
    bank = bank_of("llama", bases, [adapter])
    logits = AdaptedRun(decoder("llama", bases), bank, [0], [first]).extend([tokens])[0]
    plain = AdaptedRun(decoder("llama", bases), bank, [-1]).extend([tokens])[0]
    assert torch.equal(logits[:first], plain[:first])
    assert off(logits, PeftOracle("llama", bases).logits(folder, tokens)) < 1e-4


def test_a_row_does_not_depend_on_its_neighbours(bases, tmp_path):
    """Bit for bit: alone, with the base and other adapters, and in any slot."""
    kinds = [{"r": 3}, {"r": 17, "use_dora": True}, {"r": 8, "lora_bias": True}]
    folders = [
        make_adapter("qwen2", bases, tmp_path / str(i), seed=i, target_modules=LINEARS, **kind)
        for i, kind in enumerate(kinds)
    ]
    adapters = [reader("qwen2", bases).read(str(folder)) for folder in folders]
    model, prompts = decoder("qwen2", bases), [prompt(i, 5 + i) for i in range(PROMPTS)]
    slots = [0, 1, -1, 2, 1]
    together = AdaptedRun(model, bank_of("qwen2", bases, adapters), slots).extend(prompts)
    turned = bank_of("qwen2", bases, adapters[::-1])
    for tokens, slot, logits in zip(prompts, slots, together, strict=True):
        alone = AdaptedRun(model, turned, [slot if slot < 0 else 2 - slot]).extend([tokens])[0]
        assert torch.equal(alone, logits)


def test_a_step_of_the_base_has_no_adapters(bases):
    bank = AdapterBank(layout_of(decoder("llama", bases), base("llama", bases)), 4)
    assert bank.step(np.full(9, -1, np.int32)) is None
