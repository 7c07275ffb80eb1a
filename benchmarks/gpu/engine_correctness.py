"""A whole engine on the device against transformers and PEFT in fp32: prompts, answers, adapters, shared prefixes.

An engine computes in its type, and so may err as much as transformers does in that type: its error, over all log
probabilities that it gives, is told as a share of twice that one's.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gpu.measure import Line, Machine, launches

if TYPE_CHECKING:
    from benchmarks.gpu.engine_runs import Answer, Engine, Shape

NEEDS = ("transformers", "peft", "msgpack", "safetensors", "psutil", "tqdm")
RANKS = (8, 16, 64)
KERNELS = {
    "_rms_norm", "_rope_store_kv", "extend", "decode", "_gated_activation", "_shrink", "_expand", "_expand_gated",
    "_expand_rope_store", "_expand_add_norm",
}  # fmt: skip
_LEAST_ERROR = 1e-5
WAYS: dict[str, dict[str, Any]] = {
    "captured": {},
    "op by op": {"enforce_eager": True},
    "with drafts": {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'},
}
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "kind": {"enum": ["first", "second"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}


def run(machine: Machine) -> Iterator[Line]:
    """The engine's error in each way of running, and structured answers that do not follow their schema."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        yield Line("engine", "engine", 0.0, "", note=f"left out: no {', '.join(missing)} here")
        return
    from benchmarks.gpu.engine_runs import SMALL, TINY, engine

    shape = TINY if machine.tiny else SMALL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        adapters = _save(folder, shape, machine)
        oracle = _Oracle(folder, adapters, machine)
        limits: dict[str, Any] = {
            "load_format": "auto",
            "max_num_seqs": 16,
            # More tokens than steps have in which expansions are within other launches.
            "max_num_batched_tokens": 96 if machine.tiny else 256,
            "max_model_len": 256 if machine.tiny else 4096,
            "kv_cache_memory": 0.01 if machine.tiny else 1.0,
            "enable_lora": True,
            "lora_modules": tuple(f"{path.name}={path}" for path in adapters),
            "max_loras": 4,
            "max_lora_rank": max(RANKS),
        }
        for way, options in ({"op by op": WAYS["op by op"]} if machine.tiny else WAYS).items():
            with launches() as launched, engine(machine, shape, folder, **{**limits, **options}) as made:
                yield _error_line(way, made, oracle, adapters, launched)
                yield _structured_line(way, made)


def _save(folder: Path, shape: Shape, machine: Machine) -> list[Path]:
    """Write a random model and adapters in the machine's type. Returns the adapters' folders."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.gpu.adapter_files import write_adapter

    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(shape.write(folder), initializer_range=0.05)
    AutoModelForCausalLM.from_config(config).to(machine.dtype).save_pretrained(folder)
    return [
        write_adapter(folder / f"adapter-{rank}", shape, rank, seed=rank, machine=machine, spread=0.05)
        for rank in RANKS
    ]


class _Oracle:
    """Log probabilities of transformers, in fp32 and in the machine's type, with PEFT's adapters."""

    def __init__(self, folder: Path, adapters: Sequence[Path], machine: Machine) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        self._machine = machine
        self._models = []
        for dtype in (torch.float32, machine.dtype):
            base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(machine.device).eval()
            model = PeftModel.from_pretrained(base, adapters[0], adapter_name=adapters[0].name)
            for path in adapters[1:]:
                model.load_adapter(path, adapter_name=path.name)
            self._models.append(model.to(dtype).eval())

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int], adapter: str | None) -> list[Tensor]:
        """[len(tokens), V] after each token: in fp32, then in the machine's type."""
        ids = torch.tensor([list(tokens)], device=self._machine.device)
        found = []
        for model in self._models:
            if adapter is None:
                with model.disable_adapter():
                    logits = model(ids).logits[0]
            else:
                model.set_adapter(adapter)
                logits = model(ids).logits[0]
            found.append(logits.float().log_softmax(-1))
        return found


def _error_line(way: str, engine: Engine, oracle: _Oracle, adapters: Sequence[Path], launched: set[str]) -> Line:
    names = [None, *(path.name for path in adapters)]
    answers = _answers(engine, names)
    ours, theirs, behind = [], [], 0.0
    for answer in answers:
        exact, narrow = oracle.logprobs([*answer.prompt, *answer.tokens], answer.adapter)
        for position, logprob in answer.positions():
            expected = exact[position - 1]
            ours.append(logprob.logprob - float(expected[logprob.token]))
            theirs.append(float(narrow[position - 1][logprob.token] - expected[logprob.token]))
            if answer.is_greedy and position >= len(answer.prompt):
                behind = max(behind, float(expected.max() - expected[logprob.token]))
    error, allowed = (float(torch.tensor(each).square().mean().sqrt()) for each in (ours, theirs))
    # Where both compute in fp32, the order of sums alone is unlike.
    largest = max(map(abs, ours)) / max(*map(abs, theirs), _LEAST_ERROR)
    note = f"{len(ours)} logprobs, largest error {largest:.2f} of theirs, greedy tokens at most {behind:.3g} behind"
    if missing := KERNELS - launched:
        return Line("engine", f"{way}: error", float("inf"), "of tolerance", note=f"never launched: {sorted(missing)}")
    return Line("engine", f"{way}: error", error / (2 * max(allowed, _LEAST_ERROR)), "of tolerance", note=note)


def _answers(engine: Engine, names: Sequence[str | None]) -> list[Answer]:
    """Rows that share a long prefix, which is computed first, beside prompts of all lengths; greedy and drawn."""
    tiny = engine.machine.tiny
    common = engine.tokens(40 if tiny else 1100)
    lengths = (1, 5, 20) if tiny else (1, 5, 63, 300, 700)
    prompts = [common + engine.tokens(length) for length in ((1, 3) if tiny else range(1, 11))]
    own = [engine.tokens(length) for length in lengths]
    steps = 3 if tiny else 24
    first = engine.answers([(common, None, 0.0)], steps)
    together = [(prompt, None, 0.0) for prompt in prompts]
    mixed = [(prompt, names[i % len(names)], (0.0, 0.8)[i // 2 % 2]) for i, prompt in enumerate([*own, *prompts[:4]])]
    return [*first, *engine.answers(together, steps), *engine.answers(mixed, steps)]


def _structured_line(way: str, engine: Engine) -> Line:
    """Return the line for answers that are not JSON of the schema, according to jsonschema."""
    if missing := [name for name in ("llguidance", "jsonschema") if importlib.util.find_spec(name) is None]:
        return Line("engine", f"{way}: structured", 0.0, "", note=f"left out: no {', '.join(missing)} here")
    import jsonschema

    engine.learn_bytes()
    grammar = ("json_schema", json.dumps(SCHEMA).encode())
    wrong = 0
    answers = engine.answers(
        [(engine.tokens(9), None, 1.0) for _ in range(2 if engine.machine.tiny else 8)], 60, grammar
    )
    for answer in answers:
        try:
            jsonschema.validate(json.loads(bytes(answer.tokens)), SCHEMA)
        except ValueError:
            wrong += not answer.is_cut
        except jsonschema.ValidationError:
            wrong += 1
    cut = sum(answer.is_cut for answer in answers)
    note = f"of {len(answers)}, {cut} cut by their length"
    return Line("engine", f"{way}: twice the invalid answers", 2.0 * wrong, "", note=note)
