"""Long rows over gathered pages, beside others on the GPU's kernels in the interpreter, against the oracle."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.kernels.ragged_batches import RaggedBatch, assert_close, ragged_batch
from torch import Tensor

from rootgraft.kernels import gathered_attention, ops
from rootgraft.kernels.layouts import kv_forms
from rootgraft.kernels.triton import attention, shared_prefixes

CPU = torch.device("cpu")
LEAST = 8  # new tokens of a long row in these tests
MIXED = [(1, 1), (LEAST, LEAST), (1, 20), (10, 20), (LEAST - 1, 12)]


@pytest.fixture(autouse=True)
def low_gate(monkeypatch: pytest.MonkeyPatch, interpreted: None) -> None:
    monkeypatch.setattr(gathered_attention, "LEAST_NEW", LEAST)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of each call that are computed over gathered pages."""
    rows: list[int] = []
    attend = gathered_attention.attention

    def noted(*args: object) -> Tensor:
        rows.extend(row.number for row in args[5].rows)  # type: ignore[attr-defined]
        return attend(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(gathered_attention, "attention", noted)
    yield rows


def with_long_rows(batch: RaggedBatch) -> ops.PagedBatch:
    """The batch as the worker gives it to a step that is run op by op."""
    host = batch.page_table.numpy(), batch.query_start.diff().numpy(), batch.context_len.numpy()
    return replace(batch.args[3], long=ops.find_long_rows(*host, batch.k_cache.shape[2], CPU))


def compare(batch: RaggedBatch, **options: object) -> None:
    options = {"scale": 0.15, **options}
    params = ops.AttentionParams(**options)  # type: ignore[arg-type]
    assert_close(ops.attention(*batch.args[:3], with_long_rows(batch), params), batch.expected(**options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 16])
def test_long_rows_beside_others(dtype: torch.dtype, page_size: int, gathered: list[int]) -> None:
    compare(ragged_batch(MIXED, heads=6, kv_heads=2, page_size=page_size, dtype=dtype))
    assert gathered == [1, 3]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.integers(1, 30).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))), min_size=1, max_size=3
    ),
    group=st.integers(1, 3),
    dim=st.sampled_from([16, 64, 80]),
)
def test_any_rows_in_float32(rows: list[tuple[int, int]], group: int, dim: int) -> None:
    compare(ragged_batch(rows, heads=2 * group, kv_heads=2, head_dim=dim, dtype=torch.float32))


@pytest.mark.parametrize(
    "options", [{"window": 12}, {"chunk": 12}, {"soft_cap": 2.0}, {"sinks": torch.linspace(-1, 4, 2)}], ids=str
)
def test_what_torch_does_not_compute_is_the_kernels(options: dict[str, object], gathered: list[int]) -> None:
    compare(ragged_batch(MIXED, heads=2, kv_heads=1, dtype=torch.float32), **options)
    assert not gathered


def test_a_window_as_long_as_the_contexts_hides_nothing(gathered: list[int]) -> None:
    compare(ragged_batch(MIXED, heads=6, kv_heads=2, dtype=torch.float32), window=20)
    assert gathered == [1, 3]


def test_rows_of_8_bits_and_wide_heads_are_the_kernels(gathered: list[int]) -> None:
    compare(ragged_batch(MIXED, heads=4, kv_heads=2, dtype=torch.float32).in_rows(kv_forms.INT8))
    compare(ragged_batch(MIXED, heads=2, kv_heads=1, head_dim=256, dtype=torch.float32))
    assert not gathered


def test_others_share_their_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_SHARERS", 2)
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 16)
    monkeypatch.setattr(shared_prefixes, "LEAST_READS", 0)
    batch = ragged_batch([(LEAST, 9), (1, 40), (1, 37)], heads=2, kv_heads=1, dtype=torch.float32)
    batch.page_table[2, :2] = batch.page_table[1, :2]
    long = with_long_rows(batch).long
    assert long is not None and long.others is not None and long.others.shared is not None
    assert long.others.shared.count.tolist() == [1, 1]
    compare(batch)


def test_short_rows_and_very_long_contexts_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_long_rows(ragged_batch([(LEAST - 1, 30), (1, 9)], heads=2, kv_heads=1)).long is None
    monkeypatch.setattr(gathered_attention, "MOST_KEYS", 30)
    found = with_long_rows(ragged_batch([(LEAST, 31), (LEAST, 30)], heads=2, kv_heads=1)).long
    assert found is not None and [row.number for row in found.rows] == [1]


def test_batch_invariant_kernels_gather_nothing() -> None:
    table, lengths = np.zeros((1, 2), np.int32), np.full(1, LEAST, np.int32)
    assert ops.find_long_rows(table, lengths, lengths, 16, CPU) is not None
    ops.use_invariant(True)
    try:
        assert ops.find_long_rows(table, lengths, lengths, 16, CPU) is None
    finally:
        ops.use_invariant(False)


def test_a_gpu_below_the_kernels_gathers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "takes", lambda *_: False)
    compare(ragged_batch(MIXED, heads=6, kv_heads=2, dtype=torch.float32))


def test_a_process_without_a_gpu_imports_no_compiler_of_torch() -> None:
    """Which would double the import of each engine's process, and take 160 MiB of its memory."""
    code = "import sys; from rootgraft.engine.executor import worker; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
