"""Compiles the GPU's kernels for devices that are not there, and tells what each needs.

Run as a program, by a process whose environment has no ``TRITON_INTERPRET``; writes JSON to standard output:

    python tests/support/kernels/triton_offline.py                 every variant of every module, for every architecture
    python tests/support/kernels/triton_offline.py --few           the first variant of each kernel
    python tests/support/kernels/triton_offline.py --for 90        for this architecture alone, sm_90 (or several)
    python tests/support/kernels/triton_offline.py --only lora     of the modules whose name begins so
    python tests/support/kernels/triton_offline.py --latent        of these, latent attention in bfloat16
    python tests/support/kernels/triton_offline.py --write-golden  also enter the results in triton_golden.json
    python tests/support/kernels/triton_offline.py --missing       of these, what triton_golden.json has not
    python tests/support/kernels/triton_offline.py --seconds 240   begin no further variant after so long

Triton keeps what it compiled by source and options, so only what has changed takes time. An architecture takes half an
hour or more from the beginning; with --missing, --seconds and --write-golden a run goes on where the last one ended.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

import rootgraft.kernels.triton
from rootgraft.kernels.triton import launch as launch_module
from rootgraft.kernels.triton.launch import Launch

GOLDEN = Path(__file__).with_name("triton_golden.json")
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes that a program may have, by architecture."""
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)")

Need = dict[str, int]  # registers, spills (bytes of stack and local memory), shared (bytes)


class OfflineDriver:
    """Stands in for the driver of a device, as far as compiling asks for one."""

    def __init__(self, architecture: int) -> None:
        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return self._target.arch  # a cache of compiled kernels of its own

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def all_variants(only: str) -> Iterator[tuple[str, Launch]]:
    """Every variant of every kernel module, by a unique name: kernel, slash, choice."""
    for info in sorted(pkgutil.iter_modules(rootgraft.kernels.triton.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"rootgraft.kernels.triton.{info.name}")
        if info.name.startswith(only) and hasattr(module, "variants"):
            yield from module.variants()


def first_of_each(variants: Iterator[tuple[str, Launch]]) -> Iterator[tuple[str, Launch]]:
    """The first variant of each kernel."""
    seen: set[str] = set()
    for name, launch in variants:
        if (kernel := name.partition("/")[0]) not in seen:
            seen.add(kernel)
            yield name, launch


def missing(variants: Iterator[tuple[str, Launch]], architecture: int) -> Iterator[tuple[str, Launch]]:
    """The variants whose needs on this architecture are not in the golden file."""
    known = json.loads(GOLDEN.read_text())["needs"].get(f"sm_{architecture}", {})
    return ((name, launch) for name, launch in variants if name not in known)


def needs(compiled: Any, folder: Path) -> Need:
    """What a compiled kernel takes of the device."""
    (file := folder / "kernel.cubin").write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    found = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True)
    usage = _USAGE.search(found.stdout + found.stderr)
    assert usage is not None, found
    registers, stack, local = map(int, usage.groups())
    return {"registers": registers, "spills": stack + local, "shared": compiled.metadata.shared}


def compile_all(
    choose: Callable[[int], Iterable[tuple[str, Launch]]], architectures: tuple[int, ...], seconds: float = math.inf
) -> dict[str, dict[str, Need]]:
    """The needs of every variant, by architecture and name; tiles are chosen by the shared memory of each.

    Args:
        choose: the variants of an architecture.
        seconds: no compilation begins after so long.
    """
    end = time.monotonic() + seconds
    result: dict[str, dict[str, Need]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for architecture in architectures:
            triton.runtime.driver.set_active(OfflineDriver(architecture))
            launch_module.OFFLINE_SHARED = SHARED_LIMIT[architecture]
            variants = list(choose(architecture))
            assert len({name for name, _ in variants}) == len(variants), "names of variants are unique"
            found = result.setdefault(f"sm_{architecture}", {})
            for name, launch in variants:
                if time.monotonic() >= end:
                    break
                found[name] = needs(launch.compile(), Path(folder))
    return result


def _lines(found: dict[str, Need]) -> str:
    """One line for each kernel, so that a change of one is a change of one line."""
    return ",\n".join(f'      "{name}": {json.dumps(need)}' for name, need in sorted(found.items()))


def write_golden(result: dict[str, dict[str, Need]], *, whole: bool) -> None:
    """Enter the results, in place of those of the same names, or, of ``whole`` architectures, of all there were."""
    kept = json.loads(GOLDEN.read_text())["needs"]
    entered = {arch: {**({} if whole else kept.get(arch, {})), **found} for arch, found in result.items()}
    needs = {f"sm_{arch}": {**kept, **entered}.get(f"sm_{arch}", {}) for arch in ARCHITECTURES}
    body = ",\n".join(f'    "{arch}": {{\n{_lines(found)}\n    }}' for arch, found in needs.items())
    GOLDEN.write_text(f'{{\n  "triton": "{triton.__version__}",\n  "needs": {{\n{body}\n  }}\n}}\n')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--for", dest="architectures", type=int, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--only", default="")
    parser.add_argument("--latent", action="store_true")
    parser.add_argument("--write-golden", action="store_true")
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("--seconds", type=float, default=math.inf)
    options = parser.parse_args()

    def choose(architecture: int) -> Iterator[tuple[str, Launch]]:
        variants = (each for each in all_variants(options.only) if "bf16-latent" in each[0] or not options.latent)
        chosen = first_of_each(variants) if options.few else variants
        return missing(chosen, architecture) if options.missing else chosen

    result = compile_all(choose, tuple(options.architectures), options.seconds)
    if options.write_golden:
        partial = options.only or options.few or options.latent or options.missing or options.seconds < math.inf
        write_golden(result, whole=not partial)
    json.dump({"triton": triton.__version__, "needs": result}, sys.stdout)


if __name__ == "__main__":
    main()
