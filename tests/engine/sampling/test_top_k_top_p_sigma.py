"""top_n_sigma against the plain formula in numpy: what is kept, with masks, temperature and the other filters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from support.engine.sampler_oracle import Request, kept, packed, step

from rootgraft.engine.sampling import sampler as sampler_module
from rootgraft.engine.sampling.sampler import Sampler
from rootgraft.engine.sampling.top_k_top_p import kept_weights
from rootgraft.engine.types import SamplingParams
from rootgraft.kernels.layouts.draw_params import COLUMNS, DrawParams

CPU = torch.device("cpu")
WIDTHS = (2, 65, 300, 5000)


def within_sigma(logits: np.ndarray, n: float) -> np.ndarray:
    """llama.cpp's formula: the deviation is that of the logits that are not -inf."""
    finite = logits[logits > -np.inf].astype(np.float64)
    return logits >= finite.max() - n * finite.std() if n > 0 else logits > -np.inf


def generated(width: int, seed: int, n: float) -> np.ndarray:
    """Logits of which a third is masked, and none is so near the threshold that rounding decides."""
    draw = np.random.default_rng(seed)
    logits = (draw.standard_normal(width) * draw.choice([0.1, 3.0, 40.0])).astype(np.float32)
    logits[draw.random(width) < 0.3] = -np.inf
    logits[draw.integers(width)] = 5.0
    if n <= 0:
        return logits
    for _ in range(100):
        finite = logits[logits > -np.inf].astype(np.float64)
        near = np.abs(logits.astype(np.float64) - (finite.max() - n * finite.std())) < 1e-4 * np.ptp(finite)
        if not (near & (logits != finite.max())).any():
            return logits
        logits[near & (logits != finite.max())] = -np.inf
    raise AssertionError("no such logits")


def columns(params: SamplingParams) -> DrawParams:
    values = {name: np.array([[getattr(params, name)]], str(dtype)[6:]) for name, dtype in COLUMNS.items()}
    return DrawParams.of(values, torch.from_numpy, np.zeros((1, 1)))


@pytest.mark.parametrize(
    "others", [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 40, "top_p": 0.6}], ids=str
)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n", [-1.0, 0.0, 0.05, 1.0, 2.5, 1000.0])
def test_what_is_kept_is_what_the_formula_says(width: int, n: float, others: dict[str, float]) -> None:
    for seed in range(4):
        logits = generated(width, seed, n)
        for temperature in (0.2, 1.0, 1.9):
            params = SamplingParams(temperature=temperature, top_n_sigma=n, **others)
            weights = kept_weights(torch.from_numpy(logits[None]), columns(params))[0].numpy()
            left = np.where(within_sigma(logits, n), logits, -np.inf).astype(np.float32)
            expected = kept(left, params, params.top_p, params.min_p)
            shares = np.exp((left - left.max()).astype(np.float64) / temperature)
            shares /= shares.sum()
            found = set(np.flatnonzero(weights).tolist())
            # Rounding may decide at the edge of top_p and min_p, and what has no weight is never drawn.
            edge = [token for token in found ^ set(expected) if shares[token] > 2e-12]
            assert len(edge) <= bool(others.keys() & {"top_p", "min_p"}), (seed, temperature, edge)
            assert not found & set(np.flatnonzero(~within_sigma(logits, n)).tolist())
            assert np.allclose(weights[expected] / 2.0**40, shares[expected], atol=1e-6) or edge


def sampled(logits: np.ndarray, requests: list[Request], native: bool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(sampler_module, "draws_tokens", sampler_module.draws_tokens if native else lambda _: False)
    sampler = Sampler(len(requests), logits.shape[1], CPU)
    sampler.start([request.start(row) for row, request in enumerate(requests)])
    masks = packed([request.allowed for request in requests], logits.shape[1])
    results = sampler.sample(torch.from_numpy(logits.copy()), [step(row, 0) for row in range(len(requests))], masks)
    monkeypatch.undo()
    return [result.tokens[0] for result in results]


@pytest.mark.parametrize("width", [65, 5000])
def test_kernel_and_torch_draw_the_same_whatever_the_other_rows_ask_for(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [
        SamplingParams(top_n_sigma=1.0),
        SamplingParams(top_n_sigma=0.5, temperature=1.7, top_k=9),
        SamplingParams(),
        SamplingParams(top_n_sigma=-1.0),
        SamplingParams(top_n_sigma=1.5, top_p=0.9, min_p=0.01),
        SamplingParams(top_n_sigma=1.0, temperature=0.0),
    ]
    for seed in range(20):
        logits = np.stack([generated(width, 10 * seed + row, kind.top_n_sigma) for row, kind in enumerate(kinds)])
        requests = [Request(kind, seed=seed * 100 + row) for row, kind in enumerate(kinds)]
        tokens = sampled(logits, requests, True, monkeypatch)
        assert tokens == sampled(logits, requests, False, monkeypatch)
        for row, (kind, token) in enumerate(zip(kinds, tokens, strict=True)):
            assert within_sigma(logits[row], kind.top_n_sigma)[token]
            assert sampled(logits[row : row + 1], requests[row : row + 1], True, monkeypatch) == [token]
        off = [replace(request, params=replace(request.params, top_n_sigma=0.0)) for request in requests]
        assert sampled(logits, off, True, monkeypatch)[2:4] == tokens[2:4]


def test_the_deviation_is_that_of_what_the_mask_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = np.array([[10.0, 9.0, 8.0, 7.0, -90.0, -90.0, -90.0, 50.0]], np.float32)
    allowed = (True, True, True, True, False, False, False, False)
    for native in (True, False):
        params = SamplingParams(top_n_sigma=1.0, temperature=2.0)
        asked = [Request(params, seed=seed, allowed=allowed) for seed in range(60)]
        drawn = set(sampled(logits.repeat(60, 0), asked, native, monkeypatch))
        assert drawn == {0, 1}  # the deviation is 1.118
