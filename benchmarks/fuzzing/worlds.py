"""Worlds and requests of the fuzzer, drawn from a seed: the options of an engine, and what is asked of it."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from support.models.lora_models import LINEARS, NATIVE_BASES, VOCAB

from rootgraft.engine.messages import Submit
from rootgraft.engine.serving.request import RequestLimits, TextRequest
from rootgraft.engine.types import Priority, SamplingParams
from rootgraft.grammar.spec import GrammarSpec

MAX_LEN = 96  # tokens of a sequence
MOST_ANSWERS = 5
INVOCATION = [7, 8]
ADAPTERS: dict[str, dict[str, Any]] = {
    "small": {"r": 1, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 6, "target_modules": [*LINEARS, "embed_tokens", "lm_head"], "lora_alpha": 12},
    "dora": {"r": 3, "target_modules": LINEARS, "use_dora": True},
    "activated": {"r": 5, "target_modules": LINEARS, "alora_invocation_tokens": INVOCATION},
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "name": {"type": "string", "maxLength": 5}},
    "required": ["ok"],
    "additionalProperties": False,
}
GRAMMARS = (
    *(GrammarSpec.regex(each) for each in ("[0-9]{4}", "(ab|c)+", "yes, certainly|no", "[a-z ]*\\.")),
    GrammarSpec.choice(["the first one", "the second one", "none"]),
    GrammarSpec.json_schema(SCHEMA),
)


Model = tuple[str, str, str, str | None]
"""Family, types of weights and KV, quantisation."""


@dataclass(frozen=True)
class World:
    """An engine's options; the model's part of them is that of the engine in which requests are alone, too."""

    family: str
    dtype: str
    kv: str
    quantization: str | None
    options: dict[str, Any]
    overlaps: bool
    slow_masks: bool
    stems: tuple[tuple[int, ...], ...]

    @property
    def model(self) -> Model:
        return self.family, self.dtype, self.kv, self.quantization

    def __str__(self) -> str:
        shown = {name: value for name, value in self.options.items() if name != "speculative_config"}
        extra = ("overlapped" * self.overlaps, "slow masks" * self.slow_masks, self.options["speculative_config"])
        return f"{'/'.join(map(str, self.model))} {shown} {' '.join(filter(None, extra))}"


def draw_world(seed: str) -> World:
    rng = random.Random(seed)
    kv = rng.choice(("auto", "auto", "int8"))
    page = rng.choice((16, 32) if kv == "int8" else (1, 2, 4, 8, 16, 32, 128))
    rows = rng.randint(3, 10)
    method = rng.choice(("auto", "auto", "ngram", "off"))
    pool = rng.randint(MAX_LEN + 2 * page + 2, MAX_LEN + 2 * page + 60)
    options = {
        "block_size": page,
        "num_gpu_blocks_override": -(-pool // page),
        "max_num_seqs": rows,
        "max_num_batched_tokens": rng.randint(rows, 64),
        "speculative_config": f'{{"method": "{method}", "num_speculative_tokens": {rng.choice((1, 4, 16))}}}',
        "max_loras": rng.randint(1, 3),
        "enforce_eager": rng.random() < 0.3,
        "threads": rng.choice((1, 1, 1, 2)),
    }
    return World(
        family=rng.choice(list(NATIVE_BASES)),
        dtype=rng.choice(("float32", "float32", "bfloat16")),
        kv=kv,
        quantization=rng.choice((None, None, None, "int8_dynamic", "int8_weight_only")),
        options=options,
        overlaps=rng.random() < 0.4,
        slow_masks=rng.random() < 0.3,
        stems=tuple(tuple(rng.randrange(3, VOCAB) for _ in range(rng.randint(4, 50))) for _ in range(4)),
    )


@dataclass(frozen=True)
class Request:
    """One request: its sequences, the step before which it comes, and the step before which it is aborted."""

    number: int
    submits: tuple[Submit, ...]
    arrival: int
    abort: int | None


def draw_request(world: World, seed: str, number: int, arrival: int) -> Request:
    rng = random.Random(f"{seed} {number}")
    params = _draw_params(rng)
    adapter = rng.choice((None, None, *ADAPTERS))
    prompt = _draw_prompt(rng, world)
    if rng.random() < (0.7 if adapter == "activated" else 0.1):
        at = rng.randint(0, len(prompt))
        prompt = [*prompt[:at], *INVOCATION, *prompt[at:]]
    prompt = prompt[-(MAX_LEN - params.max_tokens) :]
    tenant = rng.choice("ab")
    request = TextRequest(
        array("i", prompt),
        replace(params, logprob_start_len=min(params.logprob_start_len, len(prompt) - 1)),
        n=rng.randint(2, MOST_ANSWERS) if rng.random() < 0.07 else 1,
        adapter=adapter,
        salt=rng.choice(("", "", "salt")),
        grammar=rng.choice(GRAMMARS) if rng.random() < 0.25 else None,
        tenant=tenant,
        cache_tenant=rng.choice(("", tenant)),
        priority=rng.choice(list(Priority)),
        session=rng.choice(("", "", "session")),
        pin_seconds=rng.choice((0.0, 0.0, 0.0, 60.0)),
    )
    submits = RequestLimits(MAX_LEN, VOCAB).check(request).submits(count(number * MOST_ANSWERS))
    return Request(number, tuple(submits), arrival, arrival + rng.randint(0, 25) if rng.random() < 0.1 else None)


def _draw_prompt(rng: random.Random, world: World) -> list[int]:
    """The beginning of one that others have too, and text of its own, which may repeat itself."""
    stem = rng.choice(world.stems)
    own = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 9))]
    return [*stem[: rng.randint(0, len(stem))], *own * rng.choice((1, 1, 1, 3))]


def _draw_params(rng: random.Random) -> SamplingParams:
    most = rng.randint(1, rng.choice((8, 20)))
    fields: dict[str, Any] = {"temperature": 0.0, "max_tokens": most, "ignore_eos": rng.random() < 0.5}
    if rng.random() < 0.5:
        fields |= {"temperature": rng.choice((0.3, 1.0, 1.8)), "seed": rng.randint(1, 1 << 40)}
        fields |= {"top_k": rng.choice((0, 0, 1, 5)), "top_p": rng.choice((1.0, 0.9, 0.3))}
        fields["min_p"] = rng.choice((0.0, 0.0, 0.05))
    if rng.random() < 0.3:
        fields |= {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)}
        fields["repetition_penalty"] = rng.uniform(0.5, 2)
    if rng.random() < 0.2:
        fields["logit_bias"] = tuple((rng.randrange(VOCAB), rng.uniform(-100, 100)) for _ in range(rng.randint(1, 5)))
    if rng.random() < 0.15:
        fields["stop_token_ids"] = tuple(rng.sample(range(VOCAB), rng.randint(1, 30)))
    if rng.random() < 0.2:
        fields["min_tokens"] = rng.randint(0, most)
    if rng.random() < 0.4:
        fields["logprobs"] = rng.choice((0, 2, 20))
    if rng.random() < 0.15:
        fields |= {"prompt_logprobs": rng.choice((0, 3)), "logprob_start_len": rng.choice((0, 0, 5))}
    return SamplingParams(**fields)
