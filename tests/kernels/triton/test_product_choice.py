"""Products of few rows: each way interpreted, and the choice among them by times that a test gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.measure import launches
from rootgraft.kernels import ops
from rootgraft.kernels.triton import invariant_linear, product_choice
from rootgraft.kernels.triton.product_choice import Way


@pytest.fixture(autouse=True)
def nothing_chosen(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_choice, "CHOSEN", {})


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """Seconds of each way, those of a machine with a GPU."""
    by_name = {"torch": 1.0, "cublaslt": 1.0, "few rows": 1.0}

    def another_library(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    monkeypatch.setattr(product_choice, "WAYS", {**product_choice.WAYS, "cublaslt": another_library})
    names = {way: name for name, way in product_choice.WAYS.items()}

    def seconds(way: Way, *_: Tensor | None) -> float:
        return by_name[names[way]]

    monkeypatch.setattr(product_choice, "seconds", seconds)
    yield by_name


def product(rows: int, dtype: torch.dtype = torch.bfloat16, *, biased: bool = False) -> tuple[Tensor, ops.PackedLinear]:
    g = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 272, generator=g).to(dtype), torch.randn(80, 272, generator=g).to(dtype)
    bias = torch.randn(80, generator=g).to(dtype) if biased else None
    return x, ops.PackedLinear(272, 80, weight, bias, kernels=None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "biased"), [(1, False), (5, True), (33, False)])
def test_tiles_of_few_rows(dtype: torch.dtype, rows: int, biased: bool) -> None:
    x, layer = product(rows, dtype, biased=biased)
    found = invariant_linear.few_row_linear(x, layer.weight, layer.bias)
    bias = None if layer.bias is None else layer.bias.float()
    expected = functional.linear(x.float(), layer.weight.float(), bias).to(dtype)
    torch.testing.assert_close(found, expected, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


def measure(rows: int) -> None:
    with product_choice.measuring():
        ops.linear(*product(rows))


def launched(rows: int) -> bool:
    """Whether a product of so many rows is the kernel's."""
    x, layer = product(rows)
    with launches() as names:
        ops.linear(x, layer)
    return "_invariant_linear" in names


def test_the_fastest_way_is_taken_for_each_shape(times: dict[str, float]) -> None:
    times["few rows"] = 0.5
    assert not launched(4), "nothing is measured by a step that serves"
    measure(4)
    assert launched(4) and not launched(5)
    times["few rows"] = 2.0
    measure(4)
    measure(5)
    assert launched(4), "once measured, always the same"
    assert not launched(5)
    times["few rows"] = 0.5
    measure(product_choice.MOST_ROWS + 1)
    assert not launched(product_choice.MOST_ROWS + 1), "many rows are left to torch"


def test_ranks_of_one_model_measure_nothing(times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would choose for itself, and what every rank has whole must be the same on all."""
    times["few rows"] = 0.5
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    measure(4)
    assert not launched(4)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    measure(4)
    assert launched(4)


def test_torchs_own_choice_stays_where_the_others_are_hardly_faster(times: dict[str, float]) -> None:
    x, layer = product(3)
    times["cublaslt"] = 0.99
    assert product_choice.fastest(x, layer.weight, None) == "torch"
    times["cublaslt"] = 0.9
    assert product_choice.fastest(x, layer.weight, None) == "cublaslt"


def test_a_way_that_is_wrong_is_never_taken(times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias) * 1.5

    monkeypatch.setattr(product_choice, "WAYS", {**product_choice.WAYS, "few rows": wrong})
    times["few rows"] = 0.1
    x, layer = product(3)
    assert product_choice.fastest(x, layer.weight, None) == "torch"


def test_a_way_that_this_torch_lacks_is_never_taken(times: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_choice, "WAYS", {**product_choice.WAYS, "cublaslt": product_choice.by_cublaslt})
    x, layer = product(3)
    with pytest.raises(RuntimeError, match="cuBLASLt"):
        product_choice.by_cublaslt(x, layer.weight, None)
    assert product_choice.fastest(x, layer.weight, None) == "torch"


def test_without_memory_to_measure_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Tensor | Way | None) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(product_choice, "seconds", full)
    x, layer = product(3)
    assert product_choice.fastest(x, layer.weight, None) == "torch"
