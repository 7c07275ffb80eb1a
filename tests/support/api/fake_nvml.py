"""NVML as ``pynvml`` speaks it, for GPUs that are not there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rootgraft.api.observe.gpu_usage import GpuCollector


class NVMLError(Exception):
    """Root of ``pynvml``'s errors."""


class FakeNvml:
    """Two GPUs; the second is of a kind that tells no power.

    Attributes:
        fails: NVML itself cannot be used.
        lost: numbers of devices that have left the bus.
    """

    NVMLError = NVMLError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self) -> None:
        self.fails = False
        self.lost: set[int] = set()

    def nvmlInit(self) -> None:
        if self.fails:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, device: int) -> str:
        return f"GPU-{device}f3a-11"

    def nvmlDeviceGetUtilizationRates(self, device: int) -> Any:
        self._check(device)
        return SimpleNamespace(gpu=25 + device, memory=0)

    def nvmlDeviceGetMemoryInfo(self, device: int) -> Any:
        self._check(device)
        return SimpleNamespace(used=1 << 30, total=1 << 34)

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        if device:
            raise NVMLError("Not Supported")
        self._check(device)
        return 61_500

    def nvmlDeviceGetTemperature(self, device: int, sensor: int) -> int:
        self._check(device)
        return 48

    def _check(self, device: int) -> None:
        if device in self.lost:
            raise NVMLError("GPU is lost")


def fake_gpus() -> GpuCollector:
    return GpuCollector(FakeNvml(), {"0": 0})
