"""Whole-model logits with adapters are those of peft: every option alone, mixtures, and mixed batches."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.lora_driver import AdaptedRun
from support.models.lora_models import BASES, LINEARS, VOCAB, PeftOracle, base, decoder, layout_of, make_adapter

from rootgraft.lora.activated_lora import activation_position
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.prepare_factors import PreparedAdapter
from rootgraft.lora.read_adapter import AdapterReader

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rank 1": {"r": 1, "lora_alpha": 3},
    "rank 23": {"r": 23, "lora_alpha": 7.5},
    "all linear": {"target_modules": "all-linear"},
    "all named": {"target_modules": LINEARS},
    "regex": {"target_modules": r".*\.(q_proj|down_proj)"},
    "rslora": {"use_rslora": True, "target_modules": LINEARS, "r": 5},
    "rank_pattern": {"target_modules": LINEARS, "rank_pattern": {"k_proj": 3, r"layers\.1\.mlp\..*": 11}},
    "alpha_pattern": {"target_modules": LINEARS, "alpha_pattern": {"v_proj": 3, "model.layers.0.self_attn.q_proj": 50}},
    "patterns and rslora": {
        "target_modules": LINEARS,
        "use_rslora": True,
        "rank_pattern": {"(q|v)_proj": 2, ".*_proj": 6},
        "alpha_pattern": {r"^model\.layers\.[01]\.self_attn\.q_proj": 5, r"mlp\.\w+": 9},
    },
    "dora": {"use_dora": True, "target_modules": LINEARS},
    "dora and rslora": {"use_dora": True, "use_rslora": True, "target_modules": ["v_proj", "up_proj"], "r": 3},
    "lora_bias": {"lora_bias": True, "target_modules": LINEARS, "lora_alpha": 20},
    "layers": {"layers_to_transform": [1], "target_modules": LINEARS},
    "one layer": {"layers_to_transform": 0, "layers_pattern": "layers", "target_modules": LINEARS},
    "excluded": {"exclude_modules": ["k_proj"], "target_modules": LINEARS},
    "embedding": {"target_modules": ["embed_tokens"], "r": 4},
    "dora embedding": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "head": {"target_modules": ["lm_head"], "r": 6},
    "dora head": {"target_modules": ["lm_head", "o_proj"], "use_dora": True},
    "everything": {"target_modules": [*LINEARS, "embed_tokens", "lm_head"], "use_dora": True, "use_rslora": True},
    "mica": {"init_lora_weights": "mica", "target_modules": LINEARS, "r": 4},
    "orthogonal": {"init_lora_weights": "orthogonal", "target_modules": LINEARS, "r": 4},
    "monteclora": {"monteclora_config": {"num_samples": 2}, "target_modules": ["q_proj"]},
}
PROMPTS = 5


def prompt(seed: int, length: int | None = None) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length or rng.randint(3, 24))]


def reader(name: str, bases: Path) -> AdapterReader:
    return AdapterReader(layout_of(decoder(name, bases), base(name, bases)), max_rank=64)


def bank_of(name: str, bases: Path, adapters: list[PreparedAdapter]) -> AdapterBank:
    bank = AdapterBank(layout_of(decoder(name, bases), base(name, bases)), len(adapters))
    for slot, adapter in enumerate(adapters):
        bank.install(slot, adapter)
    return bank


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def phi3(options: dict[str, Any]) -> dict[str, Any]:
    """The same for a base with fused modules."""
    swaps = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj", "k_proj": "o_proj"}
    text = json.dumps(options)
    for old, new in swaps.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    fields = json.loads(text)
    if isinstance(fields.get("target_modules"), list):
        gone = ("v_proj", "up_proj")
        fields["target_modules"] = [name for name in fields["target_modules"] if name not in gone] or ["qkv_proj"]
    return fields


def check(name: str, options: dict[str, Any], bases: Path, out: Path) -> None:
    folder = make_adapter(name, bases, out, **options)
    adapter = reader(name, bases).read(str(folder))
    run = AdaptedRun(decoder(name, bases), bank_of(name, bases, [adapter]), [0])
    tokens = prompt(1, 20)
    oracle = PeftOracle(name, bases)
    expected, plain = oracle.logits(folder, tokens), oracle.logits(None, tokens)
    actual = torch.cat([run.extend([tokens[:13]])[0], run.extend([tokens[13:]])[0]])
    assert off(actual, expected) < 1e-4
    assert off(plain, expected) > 1e-2, "the adapter does too little to prove anything"


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_each_option(options, bases, tmp_path):
    check("llama", options, bases, tmp_path)


@pytest.mark.parametrize("name", [name for name in BASES if name != "llama"])
@pytest.mark.parametrize(
    "option", ["all linear", "patterns and rslora", "lora_bias", "dora", "everything", "embedding"]
)
def test_each_base(name, option, bases, tmp_path):
    options = OPTIONS[option] if name != "phi3" else phi3(OPTIONS[option])
    check(name, options, bases, tmp_path)


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
        folders.append(make_adapter(name, bases, folder, seed=index, **(phi3(options) if name == "phi3" else options)))
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
