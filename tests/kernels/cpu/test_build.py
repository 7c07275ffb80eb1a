"""The library is built once for each machine, by any number of processes, and torch serves where it cannot be."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from support.kernels.cpu_levels import WITHOUT_AMX, load_level
from support.kernels.ragged_batches import assert_close, instruction_sets, ragged_batch
from support.machine.waits import wait_until

from rootgraft.kernels import ops, reference
from rootgraft.kernels.cpu import build, portable_build
from rootgraft.kernels.cpu.native_library import NativeLibrary
from rootgraft.kernels.cpu.native_ops import Kernels
from rootgraft.kernels.cpu.portable_build import LEVELS, CpuLevel

ROOT = Path(__file__).parents[3]


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in no time instead of ours."""
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "one.cpp").write_text('#include "one.h"\nextern "C" int one() { return ONE; }\n')
    (tmp_path / "one.h").write_text("#define ONE 1\n")
    (tmp_path / "simd").mkdir()
    (tmp_path / "simd" / "simd.h").touch()
    return tmp_path


pytestmark = pytest.mark.usefixtures("kernels")


def test_builds_once_and_again_when_anything_changes(small_library, capfd):
    cache = small_library / "cache" / "kernels"
    assert build.load_library(cache).one() == 1
    assert "Compiling the CPU kernels" in capfd.readouterr().err
    assert build.load_library(cache).one() == 1
    assert capfd.readouterr().err == ""
    (small_library / "one.h").write_text("#define ONE 2\n")
    assert build.load_library(cache).one() == 2
    assert len(list(cache.glob("*.so"))) == 2
    assert cache.stat().st_mode & 0o077 == 0


def test_a_source_that_does_not_compile_is_named(small_library):
    (small_library / "one.h").write_text("#define ONE nothing\n")
    cache = small_library / "cache"
    with pytest.raises(build.BuildError, match=r"compiler failed: .*nothing"):
        build.load_library(cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_library_that_does_not_load_is_named(small_library):
    (small_library / "one.h").write_text("int missing();\n#define ONE missing()\n")
    with pytest.raises(build.BuildError, match=r"undefined symbol.*missing"):
        build.load_library(small_library / "cache")


def test_a_cache_that_cannot_be_written_is_named(small_library):
    (small_library / "file").touch()
    with pytest.raises(build.BuildError, match="file"):
        build.load_library(small_library / "file" / "cache")


def has_living_process(group: int) -> bool:
    """Return whether a process of a group has not ended."""
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == group:
                return True
    return False


def test_compilers_end_with_the_wait_for_them(small_library, monkeypatch):
    compiler = small_library / "compiler"
    # Its own child holds the output, as that of g++ does; the sources never compile.
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo $$ >>{small_library}/begun; sleep 600;; esac\n')
    compiler.chmod(0o700)
    (small_library / "two.cpp").write_text("int two;\n")
    monkeypatch.setattr(build, "_TIMEOUT", 1)
    with pytest.raises(build.BuildError, match="timed out"):
        build.load_library(small_library / "cache", compiler=str(compiler))
    begun = [int(number) for number in (small_library / "begun").read_text().split()]
    assert len(begun) == min(2, len(os.sched_getaffinity(0)))
    # They were killed; on a busy machine they are still there for a moment.
    wait_until(lambda: not any(map(has_living_process, begun)))


def test_a_library_of_other_arguments_is_refused(small_library):
    (small_library / "one.cpp").write_text(
        'extern "C" const char* instruction_set() { return ""; }\n'
        'extern "C" int rms_norm(void*) { return 0; }\n'
        'extern "C" long rms_norm_size() { return 8; }\n'
    )
    with pytest.raises(build.BuildError, match="rms_norm expects 8 bytes of arguments, not 96"):
        Kernels(NativeLibrary(build.load_library(small_library / "cache")))


def test_two_processes_at_once(small_library, tmp_path_factory):
    cache = tmp_path_factory.mktemp("kernels")  # not among the sources, whose names and contents are hashed
    program = (
        "import sys; from pathlib import Path; from rootgraft.kernels.cpu import build;"
        "build.SOURCES = Path(sys.argv[1]);"
        "sys.exit(build.load_library(Path(sys.argv[2])).one() - 1)"
    )
    command = [sys.executable, "-c", program, str(small_library), str(cache)]
    running = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) for _ in range(3)]
    said = b"".join(process.communicate()[1] for process in running)
    assert [process.returncode for process in running] == [0, 0, 0], said
    assert said.count(b"Compiling the CPU kernels") == 1, "the others wait for it"
    assert len(list(cache.glob("*.so"))) == 1


def test_a_file_system_without_locks_takes_the_library(small_library, monkeypatch):
    monkeypatch.setattr(build.fcntl, "flock", mock.Mock(side_effect=OSError("no locks available")))
    assert build.load_library(small_library / "cache").one() == 1


def test_torch_serves_without_a_compiler(tmp_path):
    program = (
        "import pathlib, sys, torch; from rootgraft.kernels.cpu import portable_build;"
        "portable_build.FOLDER = pathlib.Path(sys.argv[1]);"
        "from rootgraft.kernels import ops; print(ops.native_status());"
        "layer = ops.pack_linear(torch.eye(4)); assert layer.kernels is None;"
        "assert torch.equal(ops.linear(torch.ones(2, 4), layer), torch.ones(2, 4));"
        "assert ops.rms_norm(torch.ones(2, 4), torch.ones(4), 0.0).shape == (2, 4)"
    )
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "CPU kernels: plain torch, because no C++ compiler (g++ or c++) was found"


def test_the_cache_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert build.default_cache() == Path("/elsewhere/rootgraft/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.default_cache() == Path.home() / ".cache/rootgraft/kernels"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 instruction sets")
@instruction_sets("avx2", "x86-64", "avx512", WITHOUT_AMX)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lesser_instruction_sets(arch, dtype):
    """What other machines would compile, run on this one."""
    kernels = Kernels(load_level(arch))
    assert kernels.library.instruction_set != ""
    for options in ({}, {"window": 20}, {"soft_cap": 5.0}):
        batch = ragged_batch([(1, 300), (40, 90), (7, 7)], dtype=dtype)
        params = ops.AttentionParams(0.125, **options)
        out = kernels.attention(*batch.args, params)
        assert_close(out, batch.expected(scale=0.125, **options))
        alone = kernels.attention(*batch.pick(1, 8, 9).args, params)
        assert torch.equal(alone[0], out[9])
    x, weight = torch.randn(9, 70).to(dtype), torch.randn(50, 70).to(dtype)
    layer = kernels.pack_linear(weight, None)
    assert_close(kernels.linear(x, layer, dtype) / 8, reference.linear(x, weight, None) / 8)
    assert torch.equal(kernels.linear(x[:1], layer, dtype)[0], kernels.linear(x, layer, dtype)[0])
    gated = kernels.pack_linear(torch.randn(64, 70).to(dtype), None)
    activated = kernels.activation(kernels.linear(x, gated, dtype), "silu", gated=True)
    assert torch.equal(kernels.gated_linear(x, gated, "silu"), activated)
    norm = torch.randn(70).to(dtype)
    assert_close(kernels.rms_norm(x, None, norm, 1e-5, 1.0, dtype), reference.rms_norm(x, norm, 1e-5, 1.0))
    for kind in ("silu", "gelu_tanh"):
        assert_close(kernels.activation(x * 8, kind, gated=True), reference.gated_activation(x * 8, kind))
    qkv, caches, table = torch.randn(4, 5 * 64).to(dtype), torch.zeros(2, 2, 1, 4, 64).to(dtype), torch.randn(9, 48)
    where, expected = torch.tensor([0, 3, 5, 7]), caches.clone()
    params = ops.RopeParams(3, 1, table)
    q = kernels.rope_store_kv(qkv, where, where, *caches, params)
    assert_close(q, reference.rope_store_kv(qkv, where, where, *expected, params))
    assert_close(caches, expected)


def test_the_status_names_the_instruction_set(kernels):
    assert ops.native_status() == f"CPU kernels: native, {kernels.library.instruction_set}, 1 thread"


def write_cpuinfo(path: Path, flags: Iterable[str]) -> None:
    path.write_text(f"processor: 0\nflags : {' '.join(sorted(flags))} other\n")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86")
def test_a_packaged_library_is_the_best_one_that_this_cpu_runs(small_library, tmp_path, monkeypatch):
    folder, cpuinfo = tmp_path / "portable", tmp_path / "cpuinfo"
    levels = portable_build.LEVELS
    built = dict(zip(levels, portable_build.build_portable(folder, tmp_path / "cache", list(levels)), strict=True))
    assert [path.name.rpartition("-")[0] for path in built.values()] == list(levels)
    newest, older = levels["avx512-bf16"].needs, levels["avx512-vnni"].needs
    for flags, best, own in (
        (set(), None, None),
        ({"sse4_2"}, None, None),
        *((level.needs, name, name) for name, level in levels.items()),
        (newest | {"amx_tile"}, "avx512-bf16", "avx512-bf16"),
        (newest - {"avx512vbmi"}, "avx512-vnni", None),  # bf16 goes to waste
        (older - {"avx512dq"}, "avx2", None),
        (older - {"f16c"}, None, None),
    ):
        write_cpuinfo(cpuinfo, flags)
        assert portable_build.own_level(cpuinfo) == own
        assert portable_build.find_portable(folder, cpuinfo) == built.get(best)
        assert portable_build.find_fitting(folder, cpuinfo) == built.get(own)
    write_cpuinfo(cpuinfo, newest)
    (small_library / "one.h").write_text("#define ONE 2\n")
    assert portable_build.find_portable(folder, cpuinfo) is portable_build.find_fitting(folder, cpuinfo) is None


@pytest.fixture
def packaged(small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package holds a library for AVX2, and one more CPU is described in the file that is returned."""
    folder, cpuinfo = tmp_path / "portable", tmp_path / "cpuinfo"
    monkeypatch.delenv(portable_build.LEVEL_VARIABLE, raising=False)
    monkeypatch.setattr(portable_build, "FOLDER", folder)
    monkeypatch.setattr(portable_build, "CPUINFO", cpuinfo)
    monkeypatch.setattr(portable_build, "LEVELS", {**portable_build.LEVELS, "avx2": CpuLevel((), LEVELS["avx2"].needs)})
    portable_build.build_portable(folder, tmp_path / "cache", ["avx2"])
    write_cpuinfo(cpuinfo, LEVELS["avx2"].needs)
    return cpuinfo


def test_a_packaged_library_of_this_level_is_loaded_and_nothing_is_compiled(packaged, tmp_path, monkeypatch, capfd):
    capfd.readouterr()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert portable_build.load_best(tmp_path / "none").one() == 1
    assert not (tmp_path / "none").exists() and capfd.readouterr().err == ""


def test_a_cpu_with_more_than_the_package_knows_has_a_library_of_its_own(packaged, tmp_path, monkeypatch, capfd):
    write_cpuinfo(packaged, LEVELS["avx512"].needs)
    capfd.readouterr()
    assert portable_build.load_best(tmp_path / "own").one() == 1
    assert len(list((tmp_path / "own").glob("*.so"))) == 1 and "Compiling" in capfd.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    assert portable_build.load_best(tmp_path / "none").one() == 1, "without a compiler the lesser one serves"
    shutil.rmtree(tmp_path / "portable")
    with pytest.raises(build.BuildError, match="no C"):
        portable_build.load_best(tmp_path / "none")


def test_a_library_compiled_for_this_very_cpu_comes_first(packaged, tmp_path, monkeypatch):
    cache, opened = tmp_path / "own", []
    monkeypatch.setattr(portable_build, "open_library", lambda path: opened.append(path.parent.name))
    portable_build.load_best(cache)
    assert portable_build.main(["--native", "--cache", str(cache)]) == 0
    portable_build.load_best(cache)
    assert opened == ["portable", "own"]


def test_a_packaged_library_that_does_not_load_is_named(packaged, tmp_path, monkeypatch, capfd):
    (damaged,) = (tmp_path / "portable").iterdir()
    damaged.write_bytes(b"no library")
    assert portable_build.load_best(tmp_path / "own").one() == 1
    assert damaged.name in capfd.readouterr().err
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match="no C"):
        portable_build.load_best(tmp_path / "none")
    write_cpuinfo(packaged, LEVELS["avx512"].needs)
    with pytest.raises(build.BuildError, match=damaged.name):
        portable_build.load_best(tmp_path / "none")


def test_what_a_build_cannot_compile_is_said(packaged, monkeypatch, capsys):
    write_cpuinfo(packaged, ())
    assert portable_build.main([]) == 1
    assert "no level is exactly what this CPU has. They are compiled at the first start" in capsys.readouterr().err
