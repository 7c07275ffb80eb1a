"""Times of sampling at the vocabulary of Llama 3: the kernels against their floors, and a whole step of the sampler."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Iterator

import torch

from benchmarks.gpu.measure import Ceilings, Line, Machine, seconds, synchronize
from rootgraft.engine.batch import Row, RowStart
from rootgraft.engine.sampling.sampler import DeviceMasks, Sampler
from rootgraft.engine.types import SamplingParams
from rootgraft.kernels.layouts.draw_params import COLUMNS
from rootgraft.kernels.sampling_ops import draw_lines, mask_logits

VOCAB, TINY_VOCAB = 128_256, 512
REQUESTS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "greedy, penalties": SamplingParams(temperature=0, repetition_penalty=1.1),
    "greedy, logprobs 5": SamplingParams(temperature=0, logprobs=5),
}

DRAWS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_n_sigma 1": SamplingParams(temperature=0.8, top_n_sigma=1.0),
}


def run(machine: Machine, ceilings: Ceilings) -> Iterator[Line]:
    """Microseconds. The floor of a draw is to read its logits once, that of a mask to write what it bans."""
    vocab = TINY_VOCAB if machine.tiny else VOCAB
    for rows in (2,) if machine.tiny else (1, 32, 128):
        yield from _draws(machine, ceilings, rows, vocab)
        yield _mask(machine, ceilings, rows, vocab)
        yield from steps(machine, rows, vocab)


def _logits(machine: Machine, rows: int, vocab: int, peaked: bool) -> torch.Tensor:
    """Flat ones have a nucleus of thousands of tokens; peaked ones, as models give them, of about ten."""
    logits = machine.randn(rows, vocab, dtype=torch.float32) * 3
    if peaked:
        logits[:, :10] += 20
    return logits


def _draws(machine: Machine, ceilings: Ceilings, rows: int, vocab: int) -> Iterator[Line]:
    for shape in ("peaked", "flat"):
        logits = _logits(machine, rows, vocab, shape == "peaked")
        floor = logits.nbytes / ceilings.read
        for name, params in DRAWS.items():
            table, lines = _table(machine, rows, params)
            took = seconds(machine, [functools.partial(draw_lines, logits, table, lines)])
            yield _line(f"draw, {name}, {rows} rows, {shape}", took, floor)
        took = seconds(machine, [functools.partial(_by_sorting, logits)])
        yield _line(f"draw, top_p 0.9, {rows} rows, {shape}, by sorting", took, floor)


def _by_sorting(logits: torch.Tensor) -> object:
    """The part of a draw by rank without kernels that takes most of its time."""
    return torch.softmax(torch.sort(logits, dim=1, descending=True).values, 1).cumsum(1)


def _table(machine: Machine, rows: int, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """The table of so many rows with the same parameters, and a line of each."""
    columns = [float(getattr(params, name)) for name in COLUMNS]
    table = torch.tensor([[*columns, 0.0]] * rows, dtype=torch.float64, device=machine.device)
    lines = torch.tensor([[row, 0] for row in range(rows)], dtype=torch.int64, device=machine.device)
    return table, lines


def _mask(machine: Machine, ceilings: Ceilings, rows: int, vocab: int) -> Line:
    logits = _logits(machine, rows, vocab, True)
    masks = _half_masks(machine, rows, vocab)
    took = seconds(machine, [lambda: mask_logits(logits, masks.positions, masks.words)])
    moved = masks.words.nbytes + logits.nbytes / 2
    return _line(f"mask, {rows} rows, half banned", took, moved / ceilings.copy)


def _half_masks(machine: Machine, rows: int, vocab: int) -> DeviceMasks:
    words = machine.ints([0x0F0F0F0F]).expand(rows, -(-vocab // 32)).contiguous()
    return DeviceMasks(machine.ints(list(range(rows)), torch.int64), words)


def steps(machine: Machine, rows: int, vocab: int) -> Iterator[Line]:
    """Time from logits to results on the host, including all Python code."""
    logits = _logits(machine, rows, vocab, True)
    cases: dict[str, tuple[SamplingParams, DeviceMasks | None]]
    cases = {name: (params, None) for name, params in REQUESTS.items()}
    cases["greedy, mask"] = (REQUESTS["greedy"], _half_masks(machine, rows, vocab))
    for name, (params, masks) in cases.items():
        sampler = Sampler(rows, vocab, machine.device)
        sampler.start([RowStart(row, params, list(range(100)), 100, (), seed=row) for row in range(rows)])
        plan = [Row(row, 0, (), 0, (), draws=True, num_generated=0) for row in range(rows)]
        times = []
        for _ in range(2 if machine.tiny else 12):
            mine = logits.clone()
            synchronize(machine)
            begin = time.perf_counter()
            sampler.sample(mine, plan, masks)
            times.append(time.perf_counter() - begin)
        yield _line(f"step of {rows} rows, {name}", statistics.median(times[1:]), None)


def _line(name: str, took: float, floor: float | None) -> Line:
    return Line("sampling", name, took * 1e6, "us", None if floor is None else floor * 1e6)
