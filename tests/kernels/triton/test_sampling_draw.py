"""The GPU's sampling kernels, interpreted, against the definitions in torch: token for token."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from benchmarks.gpu.measure import launches
from rootgraft.engine.sampling import top_k_top_p
from rootgraft.engine.sampling.top_k_top_p import exponentials, num_noise, uniforms
from rootgraft.kernels import ops, sampling_ops
from rootgraft.kernels.layouts.draw_params import COLUMNS, DrawParams, DrawTable
from rootgraft.kernels.triton import sampling_draw

pytestmark = pytest.mark.usefixtures("interpreted")

PHASES = (Phase.explicit, Phase.generate)  # an example takes a second: shrinking one would take minutes
CPU = torch.device("cpu")
ROW = np.dtype([*((name, str(dtype).removeprefix("torch.")) for name, dtype in COLUMNS.items()), ("seed", np.uint64)])
KERNELS = {"_stats", "_deviations", "_sums", "_levels", "_pick", "_draw"}


def probabilities(logits: torch.Tensor, best: torch.Tensor, draws: DrawParams) -> torch.Tensor:
    """Softmax after temperature with the sums of the kernels: of chunks, then of their sums."""
    below = (logits - best).numpy()
    if draws.top_n_sigma is not None:
        below = np.where((logits < top_k_top_p._least_within(logits, best, draws.top_n_sigma)).numpy(), -np.inf, below)
    exps = np.exp(below / draws.temperature.numpy())
    size = sampling_draw.CHUNK
    rows = []
    for line in exps:
        chunks = [np.pad(line[at : at + size], (0, max(0, size - len(line[at:])))) for at in range(0, len(line), size)]
        sums = [chunk.sum() for chunk in chunks]
        rows.append(line / np.pad(sums, (0, -len(sums) % 16)).astype(np.float32).sum())
    return torch.from_numpy(np.stack(rows))


def by_definition(logits: torch.Tensor, rows: Any, positions: list[int]) -> list[int]:
    """The tokens that ``top_k_top_p`` defines."""
    tokens, seeds = [], rows["seed"]
    for line, values in enumerate(rows):
        own = logits[line : line + 1]
        best = own.amax(1, keepdim=True)
        at = np.array(positions[line : line + 1], np.uint64)
        if not torch.isfinite(best).all():
            tokens.append(-1)
        elif values["temperature"] <= 0:
            tokens.append(int(own.argmax()))
        else:
            seed = seeds[line : line + 1]
            noise = torch.from_numpy(exponentials(seed, at, num_noise(logits.shape[1])))
            of_line = {name: rows[name][line : line + 1] for name in COLUMNS}
            draws = DrawParams.of(
                of_line, lambda each: torch.from_numpy(each[:, None].copy()), uniforms(seed, at), noise
            )
            padded = top_k_top_p.pad(own)
            ranked = values["top_k"] > 0 or values["top_p"] < 1
            with mock.patch.object(top_k_top_p, "_probabilities", probabilities):
                drawn = (
                    top_k_top_p.draw_kept(padded, best, draws)
                    if ranked
                    else top_k_top_p.draw_any(padded, best, draws, bool(values["min_p"] > 0))
                )
            tokens.append(int(drawn))
    return tokens


def by_kernel(logits: torch.Tensor, rows: Any, positions: list[int]) -> list[int]:
    """Of a table in which the rows lie in another order, with a line that pads the launch."""
    table = DrawTable(len(rows) + 1, CPU)
    places = np.arange(len(rows), 0, -1)
    table.write(places, rows)
    lines = torch.tensor([*zip(places.tolist(), positions, strict=True), (-1, 0)])
    tokens = sampling_ops.draw_lines(torch.cat([logits, logits[:1]]), table.rows, lines).tolist()
    assert tokens.pop() == -1
    return tokens


def row(**options: Any) -> Any:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "top_n_sigma": 0.0, "seed": 0, **options}
    return np.array([tuple(values.values())], ROW)


rows_of_draws = st.lists(
    st.builds(
        row,
        temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 1.75]),
        top_k=st.sampled_from([0, 0, 1, 2, 7, 50, 1000]),
        top_p=st.sampled_from([1.0, 1e-9, 0.0, 0.5, 0.9, 0.999999]) | st.floats(0.01, 1.0),
        min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
        top_n_sigma=st.sampled_from([0.0, 0.0, -1.0, 0.5, 2.0]),
        seed=st.integers(0, (1 << 64) - 1),
    ),
    min_size=1,
    max_size=2,
)


@settings(max_examples=5, deadline=None, phases=PHASES)
@example([row(top_p=0.0, seed=3), row(temperature=1e-6, top_p=0.0)], 64, 2, 1, 0)  # several likeliest, top_p 0
@given(
    rows=rows_of_draws,
    vocab=st.sampled_from([3, 64, 200, 1300, 2500]),
    spread=st.sampled_from([0, 2, 8, 40]),
    seed=st.integers(0, 1 << 32),
    position=st.integers(0, 1 << 40),
)
def test_the_token_that_is_defined(rows: list[Any], vocab: int, spread: int, seed: int, position: int) -> None:
    """Logits in quarters tie often."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-spread, spread + 1, (len(rows), vocab)).astype(np.float32) / 4)
    joined, positions = np.concatenate(rows), [position + line for line in range(len(rows))]
    with mock.patch.object(sampling_draw, "CHUNK", 2048), launches() as launched:
        actual = by_kernel(logits, joined, positions)
        expected = by_definition(logits, joined, positions)
    assert actual == expected
    assert launched == KERNELS


@pytest.mark.heavy
@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
def test_flat_and_peaked_lines(spread: float) -> None:
    """More listed tokens than one block, few ties, several levels and lines."""
    logits = spread * torch.randn(6, 3000, generator=torch.Generator().manual_seed(0))
    rows = np.concatenate(
        [
            row(top_p=1 - 1e-12, seed=1),
            row(top_k=900, temperature=1.3, seed=2),
            row(top_p=0.9, seed=3),
            row(top_p=0.5, top_k=2000, min_p=0.2, seed=4),
            row(top_n_sigma=1.0, top_p=0.95, seed=5),
            row(seed=6, min_p=0.01),
        ]
    )
    positions = list(range(6))
    assert by_kernel(logits, rows, positions) == by_definition(logits, rows, positions)


def test_few_tokens_of_a_level_are_searched() -> None:
    """The levels of a flat line are apart: no search looks at all that is listed."""
    logits = torch.randn(1, 12_000, generator=torch.Generator().manual_seed(1))
    table = DrawTable(1, CPU)
    table.write(np.array([0]), row(top_p=0.9, seed=1))
    *before, _ = made = list(
        sampling_draw._launches(logits, table.rows, torch.tensor([[0, 0]]), torch.zeros(1, dtype=torch.int64))
    )
    for launch in before:
        launch.run()
    counts = made[3].args[10]
    down_to = counts.sum(1)[0]
    assert down_to[-1] > 9_000
    assert int(down_to.diff(prepend=torch.zeros(1)).max()) < 2800


def test_both_zeros_are_one_logit() -> None:
    logits = torch.tensor([[0.0, -0.0] * 32])
    rows = np.concatenate([row(top_k=3, top_p=0.7, seed=seed) for seed in range(4)])
    assert by_kernel(logits.repeat(4, 1), rows, [0] * 4) == by_definition(logits.repeat(4, 1), rows, [0] * 4)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
@pytest.mark.parametrize(
    ("bad", "where"),
    [(torch.nan, slice(7, 8)), (torch.inf, slice(7, 8)), (-torch.inf, slice(7, 8)), (-torch.inf, slice(None))],
)
def test_a_broken_line_leaves_its_neighbour_alone(bad: float, where: slice) -> None:
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    rows = np.concatenate([row(top_p=0.9, top_k=5), row(top_p=0.9, top_k=5), row(), row(temperature=0.0)])
    whole = by_kernel(logits, rows, [0] * 4)
    logits[[0, 2], where] = bad
    broken = by_kernel(logits, rows, [0] * 4)
    assert [broken[1], broken[3]] == [whole[1], whole[3]]
    is_whole = bad == -torch.inf and where != slice(None)
    assert is_whole == (broken[0] >= 0) == (broken[2] >= 0)


@pytest.mark.parametrize("vocab", [32, 50, 1100, 2048])
def test_mask(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    words = torch.from_numpy(rng.integers(-(1 << 31), 1 << 31, (2, -(-vocab // 32))).astype(np.int32)).clone()
    logits = torch.randn(4, vocab)
    actual, expected = logits.clone(), logits.clone()
    with launches() as launched:
        sampling_ops.mask_logits(actual, torch.tensor([3, 1]), words)
    assert launched == {"_mask"}
    with mock.patch.object(ops, "on_triton", return_value=False):
        sampling_ops.mask_logits(expected, torch.tensor([3, 1]), words)
    assert torch.equal(actual, expected)
    assert torch.isinf(actual[[1, 3]]).any() and torch.equal(actual[[0, 2]], logits[[0, 2]])


def test_a_kernel_is_for_rows_that_it_knows() -> None:
    assert sampling_ops.has_kernel(torch.zeros(2, 64))
    assert not sampling_ops.has_kernel(torch.zeros(2, 128)[:, ::2])
