"""Takes the times of steps: wraps the public methods that a step is made of, and listens to the native calls."""

from __future__ import annotations

import functools
import itertools
import random
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import torch

from ...kernels import machine_limits, ops
from ...kernels.layouts import int8_kv_layout
from ...kernels.layouts.packed_weights import Format, Linear, QuantisedLinear
from ..config import EngineConfig
from ..core.engine_core import EngineCore
from ..errors import ConfigError
from ..executor.device import choose_device, choose_kv_dtype
from ..executor.model_runner import ModelRunner
from ..executor.worker import Worker
from ..messages import Failed, Message, Submit, TokenOut, encode
from ..models.decoder import DecoderModel
from ..models.forward_inputs import InputBuilder
from ..models.kv_pool import bytes_per_page
from ..sampling.sampler import Sampler
from ..scheduling.scheduler import Scheduler
from ..types import SamplingParams
from .step_report import Part, StepLoad, StepTimes

_WARM: Final = 6  # steps until passes are recorded and caches are filled

_METHODS: Final[tuple[tuple[type[Any], str, str], ...]] = (
    (Scheduler, "schedule", "schedule"),
    (Scheduler, "mask_jobs", "schedule"),
    (InputBuilder, "build", "inputs"),
    (ModelRunner, "forward", "forward"),
    (DecoderModel, "logits", "head"),
    (DecoderModel, "best", "head"),
    (Sampler, "draw", "sample"),
    (Sampler, "collect", "sample"),
    (Scheduler, "commit", "commit"),
)
_FAMILIES: Final = {  # of the native calls of a forward pass
    "linear": "linear",
    "quantised_linear": "linear",
    "widened_linear": "linear",
    "attention": "attention",
    "rope_store_kv": "rope and KV",
    "rms_norm": "norm",
    "gated_activation": "activation",
    "lora_shrink_expand": "LoRA",
    "quantised_rows": "embedding",
}


@dataclass(slots=True)
class _Clock:
    """Seconds of the step under way, by the method that runs, and by family of the kernels of its forward pass."""

    methods: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    kernels: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    running: str = ""

    def hear(self, name: str, seconds: float) -> None:
        """A native call took so long."""
        if self.running == "forward":
            self.kernels[_FAMILIES.get(name, "other kernels")] += seconds

    def around(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, timed."""

        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.running, begin = part, time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.methods[part] += time.perf_counter() - begin
                self.running = ""

        return run


@dataclass(frozen=True, slots=True)
class _Step:
    """The times of one."""

    seconds: float
    tokens: int
    methods: dict[str, float]
    kernels: dict[str, float]


class _Bench:
    """An engine under the load that is measured."""

    def __init__(self, config: EngineConfig, model_path: Path, load: StepLoad) -> None:
        self.worker = Worker(config, model_path)
        self.core = EngineCore(config, self.worker)
        self._load, self._config = load, config
        self._random, self._ids = random.Random(0), itertools.count(1)
        _check(config, self.worker, load)

    def fill(self) -> None:
        """Bring every row to its context, and the engine to its pace."""
        adapters = itertools.cycle((None, *self._config.named_adapters))
        length = max(1, self._load.context - _WARM)
        limit = self.worker.max_model_len - length
        shared = self._tokens(self._load.shared)
        rows = [self._prompt(shared, length, limit, next(adapters)) for _ in range(self._load.rows)]
        self._start(rows[:1])  # the others find what they share with it
        self._start(rows[1:])
        for _ in range(_WARM):
            self.step()

    def _start(self, rows: list[Submit]) -> None:
        """Compute prompts until each has its first token."""
        self.core.handle(rows)
        missing = {row.id for row in rows}
        while missing:
            out = self.core.step()
            if failed := next((message for message in out if isinstance(message, Failed)), None):
                raise ConfigError(f"A row could not be started: {failed.message}")
            missing -= {message.id for message in out if isinstance(message, TokenOut)}

    def step(self, encoded: Callable[[list[Message]], bytes] = encode) -> int:
        """One step of the load, with its answers as they would leave. Returns the tokens that it brought."""
        if self._load.prefill:
            self.core.handle([self._prompt(array("i"), self._load.prefill, 1, None)])
        out = self.core.step()
        encoded(out)
        return sum(len(message.tokens) for message in out if isinstance(message, TokenOut))

    def _tokens(self, count: int) -> array[int]:
        return array("i", (self._random.randrange(self.worker.vocab_size) for _ in range(count)))

    def _prompt(self, shared: array[int], length: int, answer: int, adapter: str | None) -> Submit:
        tokens = shared + self._tokens(max(1, length - len(shared)))
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        return Submit(next(self._ids), tokens, params, adapter)


def measure_steps(config: EngineConfig, model_path: Path, load: StepLoad) -> StepTimes:
    """See ``engine.profiling.step_report.measure``."""
    if choose_device(config).type != "cpu":
        raise ConfigError("bench step takes the times of the CPU's kernels: give it --device cpu.")
    bench = _Bench(config, model_path, load)
    model = bench.worker.model
    kv_dtype = choose_kv_dtype(config, model.config, model.device, model.dtype)
    rates = _measure_rates(model, kv_dtype)
    bench.fill()
    untimed = _faster_half([_timed_step(bench) for _ in range(load.steps)])
    with _watched() as clock:
        steps = _faster_half([_timed_step(bench, clock) for _ in range(load.steps)])
    bench.core.close()
    bounds = _bounds(model, load, kv_dtype, rates)
    parts = _parts(steps, bounds)
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
    if rows > config.max_num_seqs:
        raise ConfigError(f"--rows: {rows} sequences run at a time; --max-num-seqs is {config.max_num_seqs}.")
    if tokens > config.max_num_batched_tokens:
        raise ConfigError(
            f"--prefill: a step has {tokens} tokens; --max-num-batched-tokens is {config.max_num_batched_tokens}."
        )
    if longest >= worker.max_model_len or pages > worker.num_pages:
        raise ConfigError(
            f"--context and --steps: rows may come to {longest} tokens, {pages} pages in all; a sequence may have "
            f"{worker.max_model_len}, and there are {worker.num_pages} pages."
        )


@contextmanager
def _watched() -> Iterator[_Clock]:
    """Time the methods and native calls of the steps that are run inside."""
    clock = _Clock()
    with ExitStack() as stack:
        for cls, name, part in _METHODS:
            stack.enter_context(patch.object(cls, name, clock.around(part, getattr(cls, name))))
        stack.enter_context(ops.timed_calls(clock.hear))
        yield clock


def _timed_step(bench: _Bench, clock: _Clock | None = None) -> _Step:
    if clock is None:
        clock, encoded = _Clock(), encode
    else:
        clock.methods, clock.kernels = defaultdict(float), defaultdict(float)
        encoded = clock.around("encode", encode)
    begin = time.perf_counter()
    tokens = bench.step(encoded)
    return _Step(time.perf_counter() - begin, tokens, clock.methods, clock.kernels)


def _faster_half(steps: list[_Step]) -> list[_Step]:
    return sorted(steps, key=lambda step: step.seconds)[: (len(steps) + 1) // 2]


def _parts(steps: list[_Step], bounds: dict[str, float]) -> dict[str, Part]:
    """In the order of a step; the forward pass in its families, and what lies between its kernels."""
    methods: dict[str, float] = {part: fmean(s.methods.get(part, 0.0) for s in steps) for part in steps[0].methods}
    families = {name: fmean(s.kernels.get(name, 0.0) for s in steps) for name in _FAMILIES.values()}
    families = {name: seconds for name, seconds in families.items() if seconds}
    families["between kernels"] = methods.get("forward", 0.0) - sum(families.values())
    parts: dict[str, Part] = {}
    for name, seconds in methods.items():
        if name == "forward":
            parts |= {family: Part(took, bounds.get(family), True) for family, took in families.items()}
        else:
            parts[name] = Part(seconds, bounds.get(name), name == "head")
    return parts


class _Rates(NamedTuple):
    """What the machine does in a second: bytes read, products of linears, and those of attention."""

    reading: float
    products: float
    attention: float


def _measure_rates(model: DecoderModel, kv_dtype: torch.dtype) -> _Rates:
    packed = [part.packed for part in model.projections]
    of_bytes = any(isinstance(part, QuantisedLinear) and part.format is not Format.WIDENED for part in packed)
    kv_of_bytes = kv_dtype is int8_kv_layout.DTYPE
    products = {kind: machine_limits.products_rate(model.dtype, bytewise=kind) for kind in {of_bytes, kv_of_bytes}}
    return _Rates(machine_limits.reading_rate(), products[of_bytes], products[kv_of_bytes])


def _bounds(model: DecoderModel, load: StepLoad, kv_dtype: torch.dtype, rates: _Rates) -> dict[str, float]:
    """The least seconds of the parts that read much or multiply much: all bytes once, or all products.

    Behind its keys and values the last layer computes the tokens before a line of logits alone.
    """
    config = model.config
    tokens, lines = load.rows + load.prefill, load.rows + bool(load.prefill)
    context = load.context + load.steps
    token_bytes = bytes_per_page(config, 1, kv_dtype)
    cells = load.rows * (context - load.shared) + load.shared + load.prefill
    pairs = load.rows * context + load.prefill * (load.prefill + 1) // 2
    pairs_of_lines = load.rows * context + load.prefill
    attended = 2 * (pairs * (config.num_layers - 1) + pairs_of_lines) * config.num_heads * config.head_dim
    *inner, output, gate_up, down, head = (part.packed for part in model.projections)
    behind = output, gate_up, down
    products = tokens * sum(map(_products, inner)) + lines * sum(map(_products, behind))
    return {
        "linear": max(sum(map(_nbytes, (*inner, *behind))) / rates.reading, products / rates.products),
        "attention": max(cells * token_bytes / rates.reading, attended / rates.attention),
        "head": max(_nbytes(head) / rates.reading, lines * _products(head) / rates.products),
    }


def _products(layer: Linear) -> int:
    """For a token; of bytes where x is quantised."""
    planes = layer.planes if isinstance(layer, QuantisedLinear) else 1
    return layer.in_features * layer.out_features * planes


def _nbytes(layer: Linear) -> int:
    return layer.weight.nbytes + (layer.scales.nbytes if isinstance(layer, QuantisedLinear) else 0)
