"""Recorded kernel calls, run again by a program for another CPU under QEMU's user mode emulation."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rootgraft.kernels.cpu.build import FLAGS, SOURCES
from rootgraft.kernels.cpu.native_library import Recording

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", ("qemu-aarch64-static", "qemu-aarch64")
_FUNCTIONS = ("linear", "attention", "quantised_linear")  # in the order of replay.cpp
_FOLDERS = ("simd", "gemm", "attention", "gguf", "int8")
_WORD = 8


@dataclass(frozen=True, slots=True)
class EmulatedKernels:
    """A program that holds the products and attention of the CPU kernels.

    Attributes:
        program: statically linked.
        emulator: that runs it.
    """

    program: Path
    emulator: str

    def run(self, recording: Recording, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run recorded calls on copies of tensors, and return the copies. All addresses must lie in the tensors."""
        regions = [each.contiguous().view(torch.uint8).numpy().reshape(-1) for each in tensors]
        words: list[int | bytes] = [len(regions)]
        for region in regions:
            words += [region.size, region.tobytes().ljust(-(-region.size // _WORD) * _WORD, b"\0")]
        words.append(len(recording.calls))
        for call in recording.calls:
            fields = np.frombuffer(call.arguments, np.int64).tolist()
            places = [place for index, field in enumerate(fields) for place in _places(index, field, tensors)]
            words += [_FUNCTIONS.index(call.name), len(fields), *fields, len(places) // 3, *places]
        source, result = self.program.with_suffix(".in"), self.program.with_suffix(".out")
        source.write_bytes(b"".join(each if isinstance(each, bytes) else _integer(each) for each in words))
        subprocess.run([self.emulator, "-cpu", "max", self.program, source, result], check=True, timeout=300)
        return _read(result.read_bytes(), tensors)


def _integer(value: int) -> bytes:
    return value.to_bytes(_WORD, "little", signed=True)


def _places(index: int, field: int, tensors: Sequence[Tensor]) -> list[int]:
    """Return a field's index with the tensor in whose memory it points and the offset there; nothing for a number."""
    for number, each in enumerate(tensors):
        if 0 <= field - each.data_ptr() < max(1, each.nbytes):
            return [index, number, field - each.data_ptr()]
    return []


def _read(memory: bytes, tensors: Sequence[Tensor]) -> list[Tensor]:
    found, at = [], 0
    for each in tensors:
        values = torch.frombuffer(bytearray(memory[at : at + each.nbytes]), dtype=each.dtype)
        found.append(values.reshape(each.shape))
        at += -(-each.nbytes // _WORD) * _WORD
    assert at == len(memory)
    return found


def build(folder: Path, arch: str) -> EmulatedKernels:
    """Compile the kernels for an ``-march`` of ARM. The test is skipped without a cross compiler or an emulator."""
    compiler = shutil.which(COMPILER)
    emulator = next(filter(None, map(shutil.which, EMULATOR)), None)
    if compiler is None or emulator is None:
        pytest.skip(f"needs {COMPILER} and {EMULATOR[0]} (Debian: g++-aarch64-linux-gnu, qemu-user-static)")
    sources = [path for each in _FOLDERS for path in sorted((SOURCES / each).glob("*.cpp"))]
    sources.append(Path(__file__).with_name("replay.cpp"))
    command = [compiler, *FLAGS, "-O1", f"-march={arch}", f"-I{SOURCES}"]

    def compile_source(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        subprocess.run([*command, "-c", source, "-o", target], check=True)
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_source, sorted(sources, key=lambda path: -path.stat().st_size)))
    subprocess.run([*command, "-static", *objects, "-o", folder / "replay"], check=True)
    return EmulatedKernels(folder / "replay", emulator)
