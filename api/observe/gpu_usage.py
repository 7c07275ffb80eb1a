"""GPU usage: reads it from NVML with the optional package ``nvidia-ml-py``.

Without package, driver or GPU, it is empty.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from ...engine.metric_tables import OWN_PREFIX

ANSWER_SECONDS = 1.0
"""Seconds within which a device has to answer a probe."""

logger = logging.getLogger(__name__)

# Name and help text of each metric, and the function that reads it from a device.
_GAUGES: tuple[tuple[str, str, Callable[[Any, Any], float]], ...] = (
    (
        "gpu_utilization_ratio",
        "Fraction of the last sampling period in which the GPU ran kernels, from 0 to 1.",
        lambda nvml, device: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
    ),
    (
        "gpu_memory_used_bytes",
        "GPU memory in use, including other processes.",
        lambda nvml, device: nvml.nvmlDeviceGetMemoryInfo(device).used,
    ),
    (
        "gpu_memory_total_bytes",
        "Memory of the GPU.",
        lambda nvml, device: nvml.nvmlDeviceGetMemoryInfo(device).total,
    ),
    (
        "gpu_power_watts",
        "Power that the GPU draws.",
        lambda nvml, device: nvml.nvmlDeviceGetPowerUsage(device) / 1000,
    ),
    (
        "gpu_temperature_celsius",
        "Temperature of the GPU.",
        lambda nvml, device: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
    ),
)


def open_gpus() -> GpuCollector | None:
    """Return a collector of the GPUs that this process may use; None if NVML finds no such GPU."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        found = {str(index): device for index, device in enumerate(devices) if _is_visible(pynvml, index, device)}
    except pynvml.NVMLError as error:
        logger.debug("metrics without GPU usage: %s", error)
        return None
    return GpuCollector(pynvml, found) if found else None


def _is_visible(nvml: Any, index: int, device: Any) -> bool:
    """Return whether ``CUDA_VISIBLE_DEVICES`` includes a device, by its number or the beginning of its UUID."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return True
    uuid = nvml.nvmlDeviceGetUUID(device)
    names = [name.strip() for name in visible.split(",")]
    return any(name == str(index) or (name.startswith("GPU-") and uuid.startswith(name)) for name in names)


class GpuCollector:
    """Yields a metric family for each quantity. The label ``gpu`` is the device's number.

    Quantities that a device does not report are left out.

    Args:
        nvml: the module ``pynvml``.
        devices: NVML's handles by number.
    """

    def __init__(self, nvml: Any, devices: dict[str, Any]) -> None:
        self._nvml = nvml
        self._devices = devices
        self._asked: asyncio.Future[bool] | None = None

    async def answers(self) -> bool:
        """Return whether the driver answers for every device within ``ANSWER_SECONDS``. Belongs to one event loop.

        If the driver hangs, the thread of the call stays occupied. So the driver is not called again before it has
        answered.
        """
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(asyncio.to_thread(self._all_answer))
        try:
            return await asyncio.wait_for(asyncio.shield(self._asked), ANSWER_SECONDS)
        except TimeoutError:
            return False

    def _all_answer(self) -> bool:
        try:
            for device in self._devices.values():
                self._nvml.nvmlDeviceGetMemoryInfo(device)
        except self._nvml.NVMLError:
            return False
        return True

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families that have a value."""
        for name, text, read in _GAUGES:
            family = GaugeMetricFamily(OWN_PREFIX + name, text, labels=("gpu",))
            for number, device in self._devices.items():
                try:
                    family.add_metric((number,), read(self._nvml, device))
                except self._nvml.NVMLError:  # The device does not support this quantity, or the device is lost.
                    continue
            if family.samples:
                yield family
