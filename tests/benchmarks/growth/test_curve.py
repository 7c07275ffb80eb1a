"""Growth curves: their statistics, their picture, and a quick form of those that need no server."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine.thoroughness import taking_turns
from support.models.tiny_llama import save_tiny_llama

from benchmarks.growth.__main__ import CURVES, main, table
from benchmarks.growth.curve import Curve
from benchmarks.growth.growth_chart import growth_svg
from benchmarks.growth.machine_bounds import MachineBounds
from benchmarks.growth.random_engine import SMALL, random_engine
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.kernels import machine_limits, ops


def curve(y: list[float], exponent: float = 1.0, **fields: Any) -> Curve:
    return Curve("c", "Step, ms", "rows", [10**at for at in range(len(y))], y, exponent, "why", **fields)


@given(st.floats(0.01, 100), st.floats(0, 2), st.integers(2, 6))
def test_the_exponent_of_a_power_is_found_and_bends_nowhere(factor: float, power: float, count: int) -> None:
    straight = curve([factor * 10 ** (power * at) for at in range(count)], power)
    assert straight.fitted_exponent() == pytest.approx(power, abs=1e-6)
    assert straight.bends() == [] and straight.is_within


@given(st.lists(st.floats(0.001, 1e6), min_size=2, max_size=7), st.floats(0, 2))
def test_a_point_bends_if_an_earlier_one_allows_less(y: list[float], power: float) -> None:
    found = curve(y, power)
    for at, x in enumerate(found.x):
        steepest = max((y[at] / y[i] / 10 ** (power * (at - i)) for i in range(at)), default=0.0)
        if not math.isclose(steepest, 1.25, rel_tol=1e-9):
            assert (x in found.bends()) == (steepest > 1.25)


def test_slow_growth_adds_up_to_a_bend() -> None:
    assert curve([1.0, 1.2, 1.4], 0.0).bends() == [100]
    assert curve([1.0, 1.1, 12.0], 1.0).bends() == []


def test_a_curve_may_be_so_far_from_its_limit() -> None:
    near, far = (curve([1.0, top], limit=[1.0, 2.0], most=1.3) for top in (2.5, 2.7))
    assert near.ratio() == 1.25 and near.is_within and not far.is_within
    assert curve([1.0, 2.7], limit=[1.0, 2.0]).is_within and curve([1.0]).ratio() is None
    assert far.worst() == (1.35, 10) and near.worst() == (1.25, 10) and curve([1.0]).worst() is None
    assert curve([3.0, 2.7], limit=[1.0, 2.0]).worst() == (3.0, 1)


def test_the_picture_and_the_table_name_bends() -> None:
    curves = [curve([1.0, 30.0]), curve([1.0, 2.0], limit=[0.5, 1.5], most=1.3), *[curve([2.0, 2.0], 0.0)] * 3]
    svg = growth_svg(curves)
    root = ET.fromstring(svg)
    texts = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "x^1.48, allowed x^1, bends at 10" in texts and "x^0.30, allowed x^1" in texts
    assert texts.count("limit") == texts.count("ours") == 1 and texts.count("rows") == 5
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 6
    rows = table(curves).splitlines()
    assert rows[2] == "| Step, ms, by rows | 1 to 10 | 1, 30 | 1.48 | 1: why |  | 10 |"
    assert rows[3].endswith("| 1.33 (at most 1.3), 2.00 at 1 |  |")


def test_bounds_are_bytes_and_products(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_limits, "reading_rate", lambda: 1e9)
    monkeypatch.setattr(machine_limits, "products_rate", lambda dtype: 1e12)
    model = read_model_config(save_tiny_llama(tmp_path))  # 3 layers, 48 wide, 6 heads over 2 of 16, inner 80, 97 tokens
    bounds = MachineBounds.measure(model)
    layer = 48 * 96 + 2 * 48 * 32 + 96 * 48 + 3 * 48 * 80
    assert (bounds.weights, bounds.head, bounds.token) == (3 * layer, 48 * 97, 3 * 2 * 2 * 16 * 2)
    weights = 3 * layer + 48 * 97
    assert bounds.decode(1, 100) == pytest.approx((2 * weights + 100 * 384) / 1e9)
    assert bounds.decode(10_000, 1) == pytest.approx(10_000 * weights / 1e12 + 10_000 * 384 / 1e9)
    attention = (1 + 2 + 3) * 2 * 96 * 3
    assert bounds.prefill(3) == pytest.approx((3 * 3 * layer + attention + 48 * 97) / 1e12)


def test_bounds_measured_again_take_the_better_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"reading": [1e9, 2e9, 1e9], "products": [3e12, 1e12, 4e12]}
    monkeypatch.setattr(machine_limits, "reading_rate", lambda: rates["reading"].pop(0))
    monkeypatch.setattr(machine_limits, "products_rate", lambda dtype: rates["products"].pop(0))
    bounds = MachineBounds.measure(read_model_config(save_tiny_llama(tmp_path))).measured_again()
    assert (bounds.reading, bounds.products) == (2e9, 3e12)
    again = bounds.measured_again()
    assert (again.reading, again.products, again.weights) == (2e9, 4e12, bounds.weights)


def test_limits_are_measured_with_the_threads_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine leaves torch one thread; limits that took their number from torch left the engine one, too."""
    kernels = ops.native_kernels()
    if kernels is None:
        pytest.skip("native kernels cannot be built here")
    seen, before = list[int](), kernels.library.num_threads

    def rate(*_: object) -> float:
        seen.append(kernels.library.num_threads)
        return 1e9

    monkeypatch.setattr(machine_limits, "reading_rate", rate)
    monkeypatch.setattr(machine_limits, "products_rate", rate)
    with random_engine(SMALL, max_model_len=256, kv_cache_memory=0.05, threads=2) as engine:
        MachineBounds.measure(engine.model)
        assert seen == [2, 2] and kernels.library.num_threads == 2
    ops.set_threads(before)


WITHOUT_SERVER = (("tree", "scheduler"), ("context", "batch", "adapters"))


def test_quick_forms_run_and_join_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(machine_limits, "reading_rate", lambda: 1e9)
    monkeypatch.setattr(machine_limits, "products_rate", lambda dtype: 1e12)
    output, chart = tmp_path / "growth.json", tmp_path / "growth.svg"
    argv = ["--quick", "--output", str(output), "--chart", str(chart), "--curves"]
    for names in WITHOUT_SERVER:
        main([*argv, *names])
    found = {each["name"]: each for each in json.loads(output.read_text())["curves"]}
    parts = {
        "tree": ("match", "miss", "evict", "enter"),
        "scheduler": ("running", "waiting"),
        "context": ("decode", "ttft"),
    }
    expected = [f"{curve}-{part}" for curve, names in parts.items() for part in names]
    expected += ["batch", *(f"adapters-{name}" for name in ("registered", "load", "swap", "active"))]
    assert list(found) == expected
    assert all(len(each["y"]) == len(each["x"]) and min(each["y"]) > 0 for each in found.values())
    assert len(list(ET.parse(chart).iter("{http://www.w3.org/2000/svg}g"))) == len(found)
    assert capsys.readouterr().out.count("| Decode step, ms, by tokens of context |") == 2


@pytest.mark.heavy
def test_the_quick_form_of_other_curves_runs(tmp_path: Path, capsys: Any) -> None:
    """Half of them, in turns."""
    output = tmp_path / "growth.json"
    others = taking_turns(sorted(set(CURVES).difference(*WITHOUT_SERVER)), 2)
    main(["--quick", "--output", str(output), "--curves", *others])
    names = {each["name"].split("-")[0] for each in json.loads(output.read_text())["curves"]}
    assert names == set(others)
