"""Libraries for lesser levels of CPUs, run on this one: products of bf16 without instructions for them."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch
from support.kernels.cpu_levels import WITHOUT_AMX, load_level
from support.kernels.ragged_batches import instruction_sets

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor.device import choose_dtype
from rootgraft.engine.machine.kernel_state import kernel_state
from rootgraft.kernels.backend import LIBRARY
from rootgraft.kernels.cpu import portable_build
from rootgraft.kernels.cpu.build import BuildError, default_cache
from rootgraft.kernels.cpu.native_library import NativeLibrary
from rootgraft.kernels.cpu.native_ops import Kernels

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86")

SHAPES = [(2, 1), (18, 33), (70, 50), (576, 192)]  # in, out: odd numbers of words, panels that are not full
ROWS = (1, 2, 3, 4, 6, 7, 11, 12, 13, 25, 37, 130)  # about the edges of tiles, and more rows than are widened at once


@instruction_sets("avx2", "avx512", "x86-64", WITHOUT_AMX)
@pytest.mark.parametrize(("width", "columns"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_bf16_products(arch, width, columns, biased):
    """Sums of exact products in fp32, whose bits depend neither on other rows nor on threads."""
    kernels = Kernels(load_level(arch))
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, width, generator=generator).bfloat16() for n in (max(ROWS), columns))
    bias = torch.randn(columns, generator=generator).bfloat16() if biased else None
    layer = kernels.pack_linear(weight, bias)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    whole = kernels.linear(x, layer, torch.float32)
    torch.testing.assert_close(whole.double(), exact, atol=2e-5 * width**0.5, rtol=2e-6)
    rounded = kernels.linear(x, layer, torch.bfloat16)
    assert torch.equal(rounded, whole.bfloat16())
    for threads in (1, 2):
        kernels.library.num_threads = threads
        for rows in ROWS:
            assert torch.equal(kernels.linear(x[:rows], layer, torch.float32), whole[:rows])
            found = kernels.largest_linear(x[-rows:], layer)
            assert torch.equal(found.value, whole[-rows:].amax(1))
            assert torch.equal(found.column, whole[-rows:].argmax(1))


@pytest.mark.heavy
def test_avx2_and_avx512_give_the_same_bits():
    """Both sum products in the order of K with one rounding each."""
    narrow, wide = (Kernels(load_level(level)) for level in ("avx2", "avx512"))
    x, weight = torch.randn(40, 576).bfloat16(), torch.randn(100, 576).bfloat16()
    sums = [kernels.linear(x, kernels.pack_linear(weight, None), torch.float32) for kernels in (narrow, wide)]
    assert torch.equal(*sums)


@pytest.mark.parametrize(("held", "says"), [("avx2", "AVX2"), ("x86-64", "")])
def test_a_cpu_is_held_down_to_a_level(held: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The library, what doctor tells of it, and the format of weights are those of the lesser CPU."""
    load_level(held)
    monkeypatch.setattr(portable_build, "FOLDER", tmp_path)
    monkeypatch.setenv("ROOTGRAFT_CPU_LEVEL", held)
    assert portable_build.own_level() == (None if held == "x86-64" else held)
    library = NativeLibrary(portable_build.load_best(default_cache()))
    assert library.instruction_set == load_level(held).instruction_set
    assert says in library.instruction_set and "AVX-512" not in library.instruction_set
    assert kernel_state().status == "built" and kernel_state().instruction_set == library.instruction_set
    monkeypatch.setitem(LIBRARY.__dict__, "native", Kernels(library))
    config = EngineConfig(model="x", device="cpu")
    assert choose_dtype(config, torch.device("cpu")) == (torch.bfloat16 if held == "avx2" else torch.float32)
    monkeypatch.setitem(LIBRARY.__dict__, "native", BuildError("none"))
    assert choose_dtype(config, torch.device("cpu")) == torch.float32


def test_a_level_that_this_cpu_does_not_reach_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROOTGRAFT_CPU_LEVEL", raising=False)
    flags = portable_build._usable_flags(None)
    own = portable_build.own_level()
    if own is None:
        pytest.skip("this CPU is none of the levels")
    for held in portable_build.LEVELS:
        monkeypatch.setenv("ROOTGRAFT_CPU_LEVEL", held)
        assert portable_build._usable_flags(None) <= flags
        if list(portable_build.LEVELS).index(held) <= list(portable_build.LEVELS).index(own):
            assert portable_build.own_level() == own


def test_a_level_that_there_is_not_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOTGRAFT_CPU_LEVEL", "avx3")
    message = "ROOTGRAFT_CPU_LEVEL must be one of avx512-bf16, .*, avx2, x86-64, not 'avx3'"
    with pytest.raises(BuildError, match=message):
        portable_build.load_best(default_cache())
    with pytest.raises(ConfigError, match=message):
        choose_dtype(EngineConfig(model="x", device="cpu"), torch.device("cpu"))
    assert "must be one of" in kernel_state().fault
