"""The exactness matrix of adapters: every model family under every option of PEFT, against PEFT's own logits.

A cell is ``exact`` if all logits are PEFT's within 1e-4 of the largest one in fp32, ``refused: OPTION`` if the adapter
is refused by the name of that option, ``not in peft`` if PEFT cannot make such an adapter of this family. Anything else
is a fault. ``tests/lora/exactness.json`` holds the cells; after a change that is meant, it is written anew by

    PYTHONPATH=tests python -m support.models.peft_matrix
"""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rootgraft.lora.errors import AdapterError
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.prepare_factors import PreparedAdapter
from rootgraft.lora.read_adapter import AdapterReader
from support.models.lora_driver import AdaptedRun
from support.models.lora_models import BASES, LINEARS, VOCAB, PeftOracle, base, decoder, layout_of, make_adapter

FILE = Path(__file__).parents[2] / "lora" / "exactness.json"
TOLERANCE = 1e-4
EVERYTHING = [*LINEARS, "embed_tokens", "lm_head"]
MAX_RANK = 64
INVOCATION = [7, 8]

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
    "layers and a whole name": {"layers_to_transform": [1], "target_modules": [*LINEARS, "lm_head"]},
    "excluded": {"exclude_modules": ["k_proj"], "target_modules": LINEARS},
    "embedding": {"target_modules": ["embed_tokens"], "r": 4},
    "dora embedding": {"target_modules": ["embed_tokens", "q_proj"], "use_dora": True},
    "head": {"target_modules": ["lm_head"], "r": 6},
    "dora head": {"target_modules": ["lm_head", "o_proj"], "use_dora": True},
    "everything": {"target_modules": EVERYTHING, "use_dora": True, "use_rslora": True},
    "everything by patterns": {"target_modules": EVERYTHING, "rank_pattern": {"embed_tokens": 2, "lm_head": 13}},
    "activated": {"target_modules": LINEARS, "alora_invocation_tokens": INVOCATION},
    "mica": {"init_lora_weights": "mica", "target_modules": LINEARS, "r": 4},
    "orthogonal": {"init_lora_weights": "orthogonal", "target_modules": LINEARS, "r": 4},
    "gaussian": {"init_lora_weights": "gaussian", "target_modules": LINEARS},
    "monteclora": {"monteclora_config": {"num_samples": 2}, "target_modules": ["q_proj"]},
    "bias all": {"bias": "all"},
    "bias all and linear": {"bias": "all", "target_modules": LINEARS},
    "bias all and dora": {"bias": "all", "target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "bias all and lora_bias": {"bias": "all", "target_modules": ["q_proj", "o_proj"], "lora_bias": True},
    "bias lora_only": {"bias": "lora_only", "target_modules": LINEARS},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "modules_to_save of the embedding": {"modules_to_save": ["embed_tokens"]},
    "modules_to_save of both": {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": LINEARS},
    "modules_to_save of norms": {"modules_to_save": ["norm"]},
    "modules_to_save of all": {"modules_to_save": ["norm", "embed_tokens", "lm_head"], "bias": "all"},
    "tied modules_to_save": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tied embedding": {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True, "r": 4},
    "tied head by patterns": {
        "target_modules": ["lm_head", "q_proj"],
        "ensure_weight_tying": True,
        "rank_pattern": {"embed_tokens": 4, "lm_head": 2},
        "alpha_pattern": {"lm_head": 40},
    },
    "trainable_token_indices": {"trainable_token_indices": INVOCATION},
    "trainable_token_indices of both": {"trainable_token_indices": {"embed_tokens": [7, 3], "lm_head": [7, 3]}},
    "trainable_token_indices apart": {"trainable_token_indices": {"embed_tokens": [7, 8], "lm_head": [5, 2, 9]}},
    "trainable_token_indices of the head": {"trainable_token_indices": {"lm_head": [5, 2, 9]}},
    "trl's tokens": {"trainable_token_indices": {"embed_tokens": [7, 8]}, "modules_to_save": ["lm_head"]},
    # What PEFT computes and we refuse.
    "modules_to_save of linear": {"modules_to_save": ["o_proj"]},
    "layer_replication": {"layer_replication": [[0, 2], [0, 2]]},
    "pissa": {"init_lora_weights": "pissa", "target_modules": LINEARS, "r": 4},
    "olora": {"init_lora_weights": "olora", "target_modules": LINEARS, "r": 4},
}
"""By name, fields of PEFT's ``LoraConfig``."""

EDITS: dict[str, dict[str, Any]] = {
    "corda": {"init_lora_weights": "corda"},
    "loftq": {"init_lora_weights": "loftq"},
    "arrow": {"arrow_config": {"top_k": 2}},
    "kasa": {"kasa_config": {"beta": 0.1}},
    "bdlora": {"use_bdlora": {"nblocks": 2}},
    "qalora": {"use_qalora": True},
    "target_parameters": {"target_parameters": ["mlp.experts.gate_up_proj"]},
    "megatron": {"megatron_config": {"x": 1}},
    "dora and lora_bias": {"use_dora": True, "lora_bias": True},
    "activated modules_to_save": {"modules_to_save": ["norm"], "alora_invocation_tokens": [7]},
    "activated bias": {"bias": "all", "alora_invocation_tokens": [7]},
    "activated dora": {"use_dora": True, "alora_invocation_tokens": [7]},
    "another type": {"peft_type": "IA3"},
    "another task": {"task_type": "OTHER"},
    "option of the future": {"use_tomorrow": True},
}
"""By name, fields written into the config of a plain adapter: options that PEFT makes of no tiny random model."""


def options_of(family: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options for a family: Phi's modules are fused."""
    if family != "phi3":
        return options
    swaps = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj", "k_proj": "o_proj"}
    text = json.dumps(options)
    for old, new in swaps.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    fields: dict[str, Any] = json.loads(text)
    if isinstance(fields.get("target_modules"), list):
        gone = ("v_proj", "up_proj")
        fields["target_modules"] = [name for name in fields["target_modules"] if name not in gone] or ["qkv_proj"]
    return fields


def prompt(seed: int, length: int | None = None) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length or rng.randint(3, 24))]


def reader(family: str, bases: Path) -> AdapterReader:
    return AdapterReader(layout_of(decoder(family, bases), base(family, bases)), max_rank=MAX_RANK)


def bank_of(family: str, bases: Path, adapters: list[PreparedAdapter]) -> AdapterBank:
    bank = AdapterBank(layout_of(decoder(family, bases), base(family, bases)), len(adapters))
    for slot, adapter in enumerate(adapters):
        bank.install(slot, adapter)
    return bank


def off(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@cache
def _plain_logits(family: str, bases: Path, tokens: tuple[int, ...]) -> torch.Tensor:
    return PeftOracle(family, bases).logits(None, list(tokens))


def cell(family: str, option: str, bases: Path, out: Path) -> str:
    """Compute a cell of the matrix, with an adapter that is written to the folder ``out``."""
    fields = {"target_modules": ["q_proj"], **OPTIONS.get(option, {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            make_adapter(family, bases, out, **options_of(family, fields))
        except Exception as error:
            return f"not in peft: {type(error).__name__}"
    if option in EDITS:
        config = out / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | EDITS[option]))
    try:
        adapter = reader(family, bases).read(str(out))
        reader(family, bases).check(str(out))  # must raise for none that can be read
    except AdapterError as error:
        return f"refused: {error.option}"
    # The invocation of an activated adapter is in the text; other adapters do not care.
    tokens = [*prompt(1, 9), *INVOCATION, *prompt(2, 9)]
    expected = PeftOracle(family, bases).logits(out, tokens)
    assert off(_plain_logits(family, bases, tuple(tokens)), expected) > 1e-2, "the adapter does too little"
    first = 9 if adapter.invocation_tokens else 0
    run = AdaptedRun(decoder(family, bases), bank_of(family, bases, [adapter]), [0], [first])
    actual = torch.cat([run.extend([tokens[:13]])[0], run.extend([tokens[13:]])[0]])
    found = off(actual, expected)
    return "exact" if found < TOLERANCE else f"wrong by {found:.0e}"


def matrix() -> dict[str, dict[str, str]]:
    """Compute the whole matrix, by family and option."""
    cells: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for family in BASES:
            row = cells[family] = {}
            for option in (*OPTIONS, *EDITS):
                row[option] = cell(family, option, folder, folder / "adapter")
                shutil.rmtree(folder / "adapter", ignore_errors=True)
    return cells


if __name__ == "__main__":
    torch.set_num_threads(1)
    FILE.write_text(json.dumps(matrix(), indent=1) + "\n")
