"""Visible GPUs: which NVIDIA GPUs a process may use, found without torch and without a driver call."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs that CUDA shows this process, each as ``CUDA_VISIBLE_DEVICES`` names it.

    Args:
        devices: folder of the device files, which are listed if the variable is not set.
    """
    named = os.environ.get(VARIABLE)
    if named is None:
        return tuple(str(number) for number in range(sum(1 for _ in devices.glob("nvidia[0-9]*"))))
    found = []
    for name in map(str.strip, named.split(",")):
        if not name or name.startswith("-"):  # CUDA sees none from the first invalid one on
            break
        found.append(name)
    return tuple(found)


def torch_takes_gpus() -> bool:
    """Return whether the installed torch is not the one that is built for CPUs alone."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False


def takes_gpu(device: str) -> bool:
    """Return whether an engine with this ``--device`` computes on a GPU, as far as that is known without torch."""
    return device == "cuda" or (device == "auto" and torch_takes_gpus() and bool(visible_gpus()))
