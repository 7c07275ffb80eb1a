"""Step profiler: run an engine under a fixed load and divide a step's time into parts and kernel families.

The parts are those of ``StepTimer``, and are read from the engine's counters. The forward pass is divided further by
the families of native kernels that it calls.
"""

from __future__ import annotations

import itertools
import random
import time
from array import array
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

import torch

from ...kernels import machine_limits, ops
from ...kernels.layouts import int8_kv_layout
from ...kernels.layouts.grouped_forms import GroupedLinear, GroupForm
from ...kernels.layouts.packed_weights import Format, Linear, QuantisedLinear, parts_of
from ..checkpoint.model_config import ModelConfig
from ..config import EngineConfig
from ..core.engine_core import EngineCore
from ..errors import ConfigError
from ..executor.device import choose_device, choose_kv_dtype
from ..executor.worker import Worker
from ..messages import Failed, Submit, TokenOut, encode
from ..models.decoder import DecoderModel
from ..models.kv_pool import bytes_per_page
from ..step_timer import StepTimer
from ..types import SamplingParams
from .step_report import Part, StepLoad, StepTimes

_WARM: Final = 6  # steps until passes are recorded and caches are filled

# Parts that ``StepTimer`` measures, in order.
_PARTS: Final = ("schedule", "inputs", "forward", "head", "sample", "commit")
_FAMILIES: Final = {  # Groups of the native calls of a forward pass.
    "linear": "linear",
    "gated_linear": "linear",
    "quantised_linear": "linear",
    "both_forms_linear": "linear",
    "widened_linear": "linear",
    "attention": "attention",
    "rope_store_kv": "rope and KV",
    "rope_store_latent": "rope and KV",
    "causal_conv": "recurrent",
    "block_scores": "attention",
    "choose_tokens": "attention",
    "take_columns": "attention",
    "output_gate": "attention",
    "ssm_scan": "recurrent",
    "selective_scan": "recurrent",
    "delta_scan": "recurrent",
    "gated_norm": "recurrent",
    "rms_norm": "norm",
    "layer_norm": "norm",
    "add_scaled": "norm",
    "copy_residual": "norm",
    "activation": "activation",
    "xielu": "activation",
    "expert_linear": "experts",
    "expert_activation": "activation",
    "route_tokens": "routing",
    "sum_experts": "routing",
    "expert_lora": "LoRA",
    "lora_shrink_expand": "LoRA",
    "quantised_rows": "embedding",
}
_OTHER: Final = "other kernels"


class _KernelTimes:
    """Seconds of native calls by family: of the forward passes, and of the part that a step is in."""

    def __init__(self) -> None:
        self.forward: dict[str, float] = defaultdict(float)
        self.part: dict[str, float] = defaultdict(float)

    def add(self, name: str, seconds: float) -> None:
        """Add a native call, told by ``ops.timed_calls``."""
        self.part[_FAMILIES.get(name, _OTHER)] += seconds


class _KernelStepTimer(StepTimer):
    """A ``StepTimer`` that also ends the parts of ``_KernelTimes``."""

    __slots__ = ("_kernels",)

    def __init__(self, kernels: _KernelTimes) -> None:
        self._kernels = kernels
        self.skip()
        super().__init__()

    def end(self, part: str) -> None:
        super().end(part)
        if part == "forward":
            for family, seconds in self._kernels.part.items():
                self._kernels.forward[family] += seconds
        self._kernels.part.clear()

    def skip(self) -> None:
        self._kernels.part.clear()
        super().skip()


@dataclass(frozen=True, slots=True)
class _Step:
    """Times of one step.

    Attributes:
        parts: seconds by part.
        kernels: seconds of the forward pass by kernel family, without those that were not called.
    """

    seconds: float
    tokens: int
    parts: dict[str, float]
    kernels: dict[str, float]


class _Bench:
    """An engine under the measured load."""

    def __init__(self, config: EngineConfig, model_path: Path, load: StepLoad) -> None:
        self._kernels = _KernelTimes()
        self.worker = Worker(config, model_path, lambda: _KernelStepTimer(self._kernels))
        # A target would cut prompts into chunks.
        self.core = EngineCore(replace(config, target_itl_ms="0"), self.worker)
        self._load, self._config = load, config
        self._random, self._ids = random.Random(0), itertools.count(1)
        _check(config, self.worker, load)

    def fill(self) -> None:
        """Bring every row to its context, and warm the engine up."""
        adapters = itertools.cycle((None, *self._config.named_adapters))
        length = max(1, self._load.context - _WARM)
        limit = self.worker.max_model_len - length
        shared = self._tokens(self._load.shared)
        rows = [self._prompt(shared, length, limit, next(adapters)) for _ in range(self._load.rows)]
        # The others find its prefix in the cache.
        self._start(rows[:1])
        self._start(rows[1:])
        for _ in range(_WARM):
            self._step()

    def _start(self, rows: list[Submit]) -> None:
        """Compute prompts until each has its first token."""
        self.core.handle(rows)
        missing = {row.id for row in rows}
        while missing:
            out = self.core.step()
            if failed := next((message for message in out if isinstance(message, Failed)), None):
                raise ConfigError(f"A row could not be started: {failed.message}")
            missing -= {message.id for message in out if isinstance(message, TokenOut)}

    def measure(self, count: int, *, kernels: bool) -> list[_Step]:
        """Run steps and return the faster half of their times; those of ``kernels`` slow a step down."""
        with ops.timed_calls(self._kernels.add) if kernels else nullcontext():
            steps = [self._measure() for _ in range(count)]
        return sorted(steps, key=lambda step: step.seconds)[: (count + 1) // 2]

    def _measure(self) -> _Step:
        before = self.core.stats()
        self._kernels.forward.clear()
        begin = time.perf_counter()
        tokens, encoding = self._step()
        seconds = time.perf_counter() - begin
        after = self.core.stats()
        names = {part: f"seconds_{part}" for part in _PARTS}
        parts = {part: after[name] - before.get(name, 0.0) for part, name in names.items()}
        return _Step(seconds, tokens, {**parts, "encode": encoding}, dict(self._kernels.forward))

    def _step(self) -> tuple[int, float]:
        """Run one step and encode its messages. Returns the generated tokens, and the seconds of the encoding."""
        if self._load.prefill:
            self.core.handle([self._prompt(array("i"), self._load.prefill, 1, None)])
        out = self.core.step()
        begin = time.perf_counter()
        encode(out)
        encoding = time.perf_counter() - begin
        return sum(len(message.tokens) for message in out if isinstance(message, TokenOut)), encoding

    def _tokens(self, count: int) -> array[int]:
        return array("i", (self._random.randrange(self.worker.vocab_size) for _ in range(count)))

    def _prompt(self, shared: array[int], length: int, answer: int, adapter: str | None) -> Submit:
        tokens = shared + self._tokens(max(1, length - len(shared)))
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        return Submit(next(self._ids), tokens, params, adapter)


def measure_steps(config: EngineConfig, model_path: Path, load: StepLoad) -> StepTimes:
    """Load a model, run steps and return their times.

    Raises:
        ModelError: the model cannot be computed exactly.
        ConfigError: the options do not fit the model, or the load does not fit the engine.
    """
    if choose_device(config).type != "cpu":
        raise ConfigError("bench step measures the CPU kernels: give it --device cpu.")
    bench = _Bench(config, model_path, load)
    model = bench.worker.model
    if not isinstance(model, DecoderModel):
        raise ConfigError("bench step measures our own kernels: give it --model-impl rootgraft.")
    kv_dtype = choose_kv_dtype(config, model.config, model.device, model.dtype)
    rates = measure_rates(model, kv_dtype)
    bench.fill()
    untimed = bench.measure(load.steps, kernels=False)
    steps = bench.measure(load.steps, kernels=True)
    bench.core.close()
    parts = _parts(steps, least_times(model, load, kv_dtype, rates))
    seconds = fmean(step.seconds for step in steps)
    return StepTimes(
        summary=bench.worker.summary,
        reading=rates.reading,
        products=rates.products,
        seconds=seconds,
        untimed=fmean(step.seconds for step in untimed),
        tokens=fmean(step.tokens for step in steps),
        parts=parts,
        rest=seconds - sum(part.seconds for part in parts.values()),
    )


def _check(config: EngineConfig, worker: Worker, load: StepLoad) -> None:
    rows, tokens = load.rows + bool(load.prefill), load.rows + load.prefill
    longest = max(
        load.context + (2 * load.steps + _WARM) * (1 + config.speculative.num_speculative_tokens), load.prefill
    )
    pages = load.rows * -(-longest // config.block_size)
    if rows > config.most_seqs:
        raise ConfigError(f"--rows: {rows} sequences run at a time, but --max-num-seqs is {config.most_seqs}.")
    if tokens > config.most_tokens:
        raise ConfigError(
            f"--prefill: a step has {tokens} tokens, but --max-num-batched-tokens is {config.most_tokens}."
        )
    if longest >= worker.max_model_len or pages > worker.num_pages:
        raise ConfigError(
            f"--context and --steps: rows may reach {longest} tokens, {pages} pages in all; a sequence may have "
            f"{worker.max_model_len} tokens, and there are {worker.num_pages} pages."
        )


def _parts(steps: list[_Step], bounds: dict[str, float]) -> dict[str, Part]:
    """Return the parts in the order of a step, the forward pass divided into kernel families and the time between."""
    families = dict.fromkeys((*_FAMILIES.values(), _OTHER))
    kernels = {name: fmean(step.kernels.get(name, 0.0) for step in steps) for name in families}
    kernels = {name: seconds for name, seconds in kernels.items() if seconds}
    parts: dict[str, Part] = {}
    for name in steps[0].parts:
        seconds = fmean(step.parts[name] for step in steps)
        if name == "forward":
            parts |= {family: Part(took, bounds.get(family), True) for family, took in kernels.items()}
            parts["between kernels"] = Part(seconds - sum(kernels.values()), None, True)
        else:
            parts[name] = Part(seconds, bounds.get(name), name == "head")
    return parts


class StepRates(NamedTuple):
    """Rates of the machine per second: bytes read, products of linear layers in their form, products of attention."""

    reading: float
    products: float
    attention: float


def measure_rates(model: DecoderModel, kv_dtype: torch.dtype) -> StepRates:
    """Measure the machine's rates for a model's forms of weights and KV, with all threads."""
    return StepRates(
        machine_limits.reading_rate(),
        fastest_layer_rate(model),
        machine_limits.products_rate(model.dtype, bytewise=kv_dtype is int8_kv_layout.DTYPE),
    )


def fastest_layer_rate(model: DecoderModel, *, budget: float = 0.3) -> float:
    """Measure the multiplications per second of each kind of linear layer in a model, and return the largest number.

    Args:
        budget: seconds to measure each kind.
    """
    *inner, _ = (each for part in model.projections for each in parts_of(part.packed))
    kinds = {(layer.in_features, layer.out_features, _form(layer)): layer for layer in inner}
    return max(machine_limits.layer_rate(layer, model.dtype, budget=budget) for layer in kinds.values())


def _form(layer: Linear) -> tuple[Format, int] | GroupForm | None:
    if isinstance(layer, GroupedLinear):
        return layer.form
    return (layer.format, layer.planes) if isinstance(layer, QuantisedLinear) else None


def _score_dims(config: ModelConfig, index: int) -> int:
    """Products of a query head with a key and its value in one layer."""
    dim = config.heads_of(index).dim
    return dim + (dim if config.latent is None else config.latent.kv_rank)


def least_times(model: DecoderModel, load: StepLoad, kv_dtype: torch.dtype, rates: StepRates) -> dict[str, float]:
    """Return the least seconds of linear layers, experts, attention and head in a step.

    For each of them it is the time to read all bytes once or the time to make all products, whichever is longer. The
    last layer computes K and V for all tokens, but its attention and MLP only for tokens whose logits are needed. All
    tokens may be sent to the same experts, so only the bytes of one token's experts are counted.
    """
    config = model.config
    tokens, positions = load.rows + load.prefill, load.rows + bool(load.prefill)
    context = load.context + load.steps
    token_bytes = bytes_per_page(config, 1, kv_dtype)
    cells = load.rows * (context - load.shared) + load.shared + load.prefill
    pairs = load.rows * context + load.prefill * (load.prefill + 1) // 2
    sampled_pairs = load.rows * context + load.prefill
    *earlier, last_layer = (
        config.attends[index] * _score_dims(config, index) * config.num_heads_of(index)
        for index in range(config.num_layers)
    )
    attended = pairs * sum(earlier) + sampled_pairs * last_layer
    *inner, head = (each for part in model.projections for each in parts_of(part.packed))
    last = [each for part in model.layers[-1].behind_kv for each in parts_of(part.packed)]
    inner = inner[: len(inner) - len(last)]
    products = tokens * sum(map(_products, inner)) + positions * sum(map(_products, last))
    return {
        "linear": max(sum(map(_nbytes, (*inner, *last))) / rates.reading, products / rates.products),
        "experts": _experts_bound(model, tokens, positions, rates),
        "attention": max(cells * token_bytes / rates.reading, attended / rates.attention),
        "head": max(_nbytes(head) / rates.reading, positions * _products(head) / rates.products),
    }


def _experts_bound(model: DecoderModel, tokens: int, positions: int, rates: StepRates) -> float:
    """Return the least seconds of the experts' products. The last layer computes only those of ``positions``."""
    per_layer = [[(count, weights.first) for count, weights in layer.active] for layer in model.layers]
    num_bytes = sum(count * _nbytes(first) for layer in per_layer for count, first in layer)
    products = [sum(count * _products(first) for count, first in layer) for layer in per_layer]
    total = tokens * sum(products[:-1]) + positions * products[-1]
    return max(num_bytes / rates.reading, total / rates.products)


def _products(layer: Linear) -> int:
    """Return the multiplications of a linear layer for one token."""
    return layer.in_features * layer.out_features


def _nbytes(layer: Linear) -> int:
    if isinstance(layer, GroupedLinear):
        return layer.nbytes
    return layer.weight.nbytes + (layer.scales.nbytes if isinstance(layer, QuantisedLinear) else 0)
