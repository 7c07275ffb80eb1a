"""GPU use: what NVML tells, the devices that are left to the process, and nothing where there is nothing."""

from __future__ import annotations

import asyncio
import sys
import threading
from importlib.util import find_spec

import pytest
from support.api.fake_nvml import FakeNvml
from support.machine.waits import HANG_SECONDS

from rootgraft.api.observe import gpu_usage
from rootgraft.api.observe.gpu_usage import GpuCollector, open_gpus


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def told(gpus: GpuCollector | None) -> dict[str, dict[str, float]]:
    assert gpus is not None
    return {
        family.name.removeprefix("rootgraft:gpu_"): {each.labels["gpu"]: each.value for each in family.samples}
        for family in gpus.collect()
    }


def test_what_a_gpu_tells(nvml: FakeNvml) -> None:
    assert told(open_gpus()) == {
        "utilization_ratio": {"0": 0.25, "1": 0.26},
        "memory_used_bytes": {"0": 1 << 30, "1": 1 << 30},
        "memory_total_bytes": {"0": 1 << 34, "1": 1 << 34},
        "power_watts": {"0": 61.5},
        "temperature_celsius": {"0": 48, "1": 48},
    }


def test_a_lost_gpu_is_left_out(nvml: FakeNvml) -> None:
    gpus = open_gpus()
    nvml.lost = {0, 1}
    assert told(gpus) == {}
    nvml.lost = {0}
    assert told(gpus)["temperature_celsius"] == {"1": 48}


@pytest.mark.parametrize(
    ("visible", "expected"),
    [("0", {"0"}), ("1", {"1"}), ("1,0", {"0", "1"}), ("GPU-1f3a", {"1"}), ("", set()), ("-1", set()), ("7", set())],
)
def test_devices_that_are_hidden_are_not_told(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str, expected: set[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus = open_gpus()
    assert (set() if gpus is None else set(told(gpus)["temperature_celsius"])) == expected


def test_without_a_driver_there_is_nothing(nvml: FakeNvml) -> None:
    nvml.fails = True
    assert open_gpus() is None


def test_without_the_package_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpus() is None


@pytest.mark.skipif(find_spec("pynvml") is None, reason="nvidia-ml-py is not installed")
def test_the_package_has_what_is_called() -> None:
    import pynvml

    for name in (name for name in vars(FakeNvml) if not name.startswith("_")):
        assert hasattr(pynvml, name), name
    gpus = open_gpus()
    assert gpus is None or told(gpus)["memory_total_bytes"]


def test_a_lost_gpu_does_not_answer(nvml: FakeNvml) -> None:
    async def job() -> None:
        gpus = open_gpus()
        assert gpus is not None and await gpus.answers()
        nvml.lost = {1}
        assert not await gpus.answers()
        nvml.lost = set()
        assert await gpus.answers()

    asyncio.run(job())


def test_a_driver_that_hangs_is_asked_once(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, let = [], threading.Event()

    def hang(device: int) -> None:
        asked.append(device)
        let.wait(HANG_SECONDS)

    async def job() -> None:
        gpus = open_gpus()
        assert gpus is not None
        monkeypatch.setattr(gpu_usage, "ANSWER_SECONDS", 0.01)
        with monkeypatch.context() as patch:
            patch.setattr(nvml, "nvmlDeviceGetMemoryInfo", hang)
            assert [await gpus.answers() for _ in range(5)] == [False] * 5
            assert asked == [0]
            let.set()
            monkeypatch.setattr(gpu_usage, "ANSWER_SECONDS", HANG_SECONDS)
            assert await gpus.answers()

    asyncio.run(job())
