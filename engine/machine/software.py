"""Installed packages, torch as a process of its own finds it, and the GPU's driver. Imports none of them."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

PACKAGES = (
    *("torch", "triton", "numpy", "tokenizers", "safetensors", "llguidance", "xgrammar", "huggingface-hub", "jinja2"),
    *("fastapi", "uvicorn", "uvloop", "pydantic", "orjson"),
)
_OTHER_NAMES = {("dnf", "g++"): "gcc-c++", ("zypper", "g++"): "gcc-c++", ("pacman", "g++"): "gcc"}
_SECONDS = 180  # Time to import torch from a slow disk.
_PROBE = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
    usable = torch.cuda.is_available()
    facts = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "devices": [[each.name, each.total_memory, f"{each.major}.{each.minor}"] for each in devices] if usable else [],
    }
facts["warnings"] = [str(each.message).splitlines()[0] for each in caught if "CUDA" in str(each.message)]
print(json.dumps(facts))
"""


@dataclass(frozen=True, slots=True)
class TorchProbe:
    """torch, as it can be imported here.

    Attributes:
        fault: last line of the import's error; empty if the import succeeded.
        version: version of torch.
        cuda: version of CUDA that it was built for; empty for a build without.
        devices: name, bytes of memory and compute capability of each usable GPU.
        warnings: what torch warns about CUDA.
    """

    fault: str
    version: str = ""
    cuda: str = ""
    devices: tuple[tuple[str, int, str], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver and the GPUs that it shows; ``fault`` says why its tool does not run."""

    version: str
    gpus: tuple[str, ...]
    fault: str = ""


def probe_torch(python: str = sys.executable) -> TorchProbe:
    """Import torch in a process of its own, which a broken build may kill."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", _PROBE], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else {}
    except subprocess.TimeoutExpired:
        return TorchProbe(f"its import takes more than {_SECONDS} seconds")
    except (OSError, ValueError, IndexError) as error:
        return TorchProbe(f"{type(error).__name__}: {error}")
    if not facts:
        lines = done.stderr.strip().splitlines()
        return TorchProbe(lines[-1] if lines else f"its import ended with exit status {done.returncode}")
    devices = tuple((str(name), int(size), str(capability)) for name, size, capability in facts["devices"])
    return TorchProbe("", facts["version"], facts["cuda"], devices, tuple(facts["warnings"]))


def driver(root: Path = Path("/")) -> Driver | None:
    """Return the NVIDIA driver, None without one."""
    query = ["nvidia-smi", "--query-gpu=driver_version,name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        if not (root / "proc/driver/nvidia/version").exists():
            return None
        return Driver("", (), f"nvidia-smi does not run: {error}")
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 2]
    if done.returncode or not rows:
        lines = (done.stdout + done.stderr).strip().splitlines()
        return Driver("", (), lines[0] if lines else f"nvidia-smi ended with exit status {done.returncode}")
    return Driver(rows[0][0], tuple(f"{name} ({memory})" for _, name, memory in rows))


def installed(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Return the versions of packages by name; an empty string for one that is missing."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ""
    return found


def requirement(name: str, package: str = "rootgraft") -> str:
    """Return a requirement of the package as pip takes it; the name alone for a checkout without metadata."""
    with suppress(PackageNotFoundError):
        for text in requires(package) or ():
            wanted = text.partition(";")[0].strip()
            if wanted.startswith(name) and not wanted[len(name) :].startswith("-"):
                return wanted
    return name


def unmet_requirements(package: str = "rootgraft") -> list[str]:
    """Return what the package asks for and is not there, as pip takes it; nothing for a checkout without metadata."""
    unmet: list[str] = []
    with suppress(PackageNotFoundError, ImportError):
        from packaging.requirements import Requirement

        for text in requires(package) or ():
            wanted = Requirement(text)
            if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
                continue
            have = installed((wanted.name,))[wanted.name]
            if not have or not wanted.specifier.contains(have, prereleases=True):
                unmet.append(f"{wanted.name}{wanted.specifier}")
    return unmet


def system_name(root: Path = Path("/")) -> str:
    """Return the name of the operating system from ``os-release``."""
    with suppress(OSError):
        for line in (root / "etc/os-release").read_text().splitlines():
            if line.startswith("PRETTY_NAME="):
                return line.partition("=")[2].strip().strip('"')
    return sys.platform


def install_command(package: str, root: Path = Path("/")) -> str:
    """Return the command that installs a system package, by the system's own package manager."""
    names = {"apk": "apk add", "dnf": "sudo dnf install", "zypper": "sudo zypper install", "pacman": "sudo pacman -S"}
    for manager, command in names.items():
        if (root / "usr/bin" / manager).exists() or (root / "sbin" / manager).exists():
            return f"{command} {_OTHER_NAMES.get((manager, package), package)}"
    return f"sudo apt-get install {package}"
