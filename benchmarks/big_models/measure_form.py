"""Measure one form of a model in this process: its load, and its steps against the rates of the machine."""

from __future__ import annotations

import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.big_models.model_forms import ModelForm
from benchmarks.growth.random_engine import RandomEngine
from benchmarks.serve.make_adapters import RANKS, random_factors, write_adapter
from rootgraft.engine.checkpoint.model_config import ModelConfig
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.executor.device import choose_kv_dtype
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.profiling.step_profiler import StepRates, fastest_layer_rate, least_times, measure_rates
from rootgraft.engine.profiling.step_report import StepLoad
from rootgraft.kernels import machine_limits, ops

ROWS, PROMPT, ANSWER = 32, 100, 128  # of W2
CHUNK = 511  # tokens of a prompt whose step has 512 positions at most
_CONTEXT = 128  # of one stream
_PROMPTS = 5  # of which medians are taken
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class FormTimes:
    """What a form takes. Seconds, and shares of the machine's rates: 1 is the limit.

    Attributes:
        load: until the first step could run.
        peak_memory: most GiB of this process until it was loaded, mapped files included.
        loading: what of that came with the model, over its weights: libraries are left out.
        weights: GiB of packed weights, the embedding included.
        reading: GB/s of the machine.
        products: of the form, 10^9/s: of the fastest of the model's own layers, 512 rows, again and again.
        plain_products: the same of the model's largest layer in bfloat16.
        decode: a step of one stream.
        decode_share: the time of reading its weights and KV, over its own.
        prefill: a prompt of ``CHUNK`` tokens, first token included.
        prefill_share: the time of its products over its own, at the rate of the form right before; a median.
        prefill_speed: the same at the rate of bfloat16, so that forms can be compared.
        batch: a step of ``ROWS`` streams.
        batch_share: the time of its bytes or products, over its own.
        with_adapters: what W2 reaches with eight adapters, over W2 without.
    """

    load: float
    peak_memory: float
    loading: float
    weights: float
    reading: float
    products: float
    plain_products: float
    decode: float
    decode_share: float
    prefill: float
    prefill_share: float
    prefill_speed: float
    batch: float
    batch_share: float
    with_adapters: float | None


def measure_form(path: Path, form: ModelForm, adapters: Path | None, steps: int) -> FormTimes:
    """Load a form and measure it.

    Args:
        adapters: folder of ``write_form_adapters``; None to leave them out.
        steps: of which a median is taken.
    """
    options: dict[str, Any] = (
        {"enable_lora": True, "max_loras": len(RANKS), "max_lora_rank": max(RANKS)} if adapters else {}
    )
    config = EngineConfig(
        model=str(path),
        device="cpu",
        dtype="bfloat16",
        quantization=form.quantization,
        kv_cache_dtype=form.kv,
        max_model_len=2048,
        kv_cache_memory=1.0,
        speculative_config='{"method": "off"}',
        target_itl_ms="0",
        **options,
    )
    before = _peak_bytes()
    begin = time.perf_counter()
    engine = RandomEngine(config, path)
    load = time.perf_counter() - begin
    try:
        return _measure(engine, config, load, (before, _peak_bytes()), adapters, steps)
    finally:
        engine.close()


def _measure(
    engine: RandomEngine, config: EngineConfig, load: float, peaks: tuple[int, int], adapters: Path | None, steps: int
) -> FormTimes:
    model = engine.worker.model
    assert isinstance(model, DecoderModel)
    kv_dtype = choose_kv_dtype(config, model.config, model.device, model.dtype)

    def least(rates: StepRates, rows: int, context: int, prefill: int) -> float:
        return sum(least_times(model, StepLoad(rows, context, 0, prefill, 0), kv_dtype, rates).values())

    rates = measure_rates(model, kv_dtype)
    plain = rates._replace(products=_plain_rate(model))
    engine.start([engine.prompt(_CONTEXT)])
    decode = engine.step_seconds(steps)
    engine.stop()
    prefill, prefill_shares = [], []
    for _ in range(_PROMPTS):  # each right after the rate that it is compared with: machines change by the minute
        products = fastest_layer_rate(model, budget=0.1)
        prefill.append(engine.start([engine.prompt(CHUNK)]))
        prefill_shares.append(least(rates._replace(products=products), 0, 0, CHUNK) / prefill[-1])
        engine.stop()
    filling, batch = _batch(engine, (None,), steps)
    ratio = None
    if adapters is not None:
        for number in range(len(RANKS)):
            engine.load_adapter(f"a{number}", adapters / f"a{number}")
        with_filling, with_step = _batch(engine, (None, *(f"a{number}" for number in range(len(RANKS)))), steps)
        ratio = (filling + ANSWER * batch) / (with_filling + ANSWER * with_step)
    weights, (before, peak) = sum(tensor.nbytes for tensor in _tensors(model)), peaks
    return FormTimes(
        load=load,
        peak_memory=peak / _GIB,
        loading=(peak - before) / weights,
        weights=weights / _GIB,
        reading=rates.reading / 1e9,
        products=rates.products / 1e9,
        plain_products=plain.products / 1e9,
        decode=decode,
        decode_share=least(rates, 1, _CONTEXT, 0) / decode,
        prefill=statistics.median(prefill),
        prefill_share=statistics.median(prefill_shares),
        prefill_speed=least(plain, 0, 0, CHUNK) / statistics.median(prefill),
        batch=batch,
        batch_share=least(rates, ROWS, PROMPT, 0) / batch,
        with_adapters=ratio,
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _batch(engine: RandomEngine, adapters: tuple[str | None, ...], steps: int) -> tuple[float, float]:
    """Return the seconds until all prompts of W2 have a first token, and of a step behind them."""
    filling = engine.start([engine.prompt(PROMPT) for _ in range(ROWS)], adapters)
    step = engine.step_seconds(steps)
    engine.stop()
    return filling, step


def _plain_rate(model: DecoderModel) -> float:
    """Products of bfloat16 a second, of a weight in the shape of the largest layer."""
    *inner, _ = (part.packed for part in model.projections)
    largest = max(inner, key=lambda layer: layer.in_features * layer.out_features)
    weight = torch.randn(largest.out_features, largest.in_features, dtype=torch.bfloat16)
    return machine_limits.layer_rate(ops.pack_linear(weight), torch.bfloat16)


def _tensors(model: DecoderModel) -> list[Tensor]:
    """Return the tensors of all matrices; a head may share that of the embedding."""
    found: dict[int, Tensor] = {}
    for part in (*model.weights, model.embedding):
        for tensor in (part,) if isinstance(part, Tensor) else (part.weight, getattr(part, "scales", None)):
            if tensor is not None:
                found[tensor.data_ptr()] = tensor
    return list(found.values())


def write_form_adapters(folder: Path, model: ModelConfig) -> None:
    """Write eight random adapters, ``a0`` to ``a7``; see ``benchmarks.serve.make_adapters``."""
    for number, rank in enumerate(RANKS):
        if not (path := folder / f"a{number}").exists():
            write_adapter(path, random_factors(model, rank, everywhere=number % 2 == 0, seed=number), rank)
