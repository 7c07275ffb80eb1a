"""The library is built once for each machine, by any number of processes, and torch serves where it cannot be."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from support.kernels.ragged_batches import assert_close, instruction_sets, ragged_batch, skip_unless_lesser

from rootgraft.kernels import ops, reference
from rootgraft.kernels.cpu import build, portable_build
from rootgraft.kernels.cpu.native_library import NativeLibrary
from rootgraft.kernels.cpu.native_ops import Kernels

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in no time instead of ours."""
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    (tmp_path / "one.cpp").write_text('#include "one.h"\nextern "C" int one() { return ONE; }\n')
    (tmp_path / "one.h").write_text("#define ONE 1\n")
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
    assert len(begun) == 2
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):  # it ended just now
            assert process.info["status"] == psutil.STATUS_ZOMBIE or os.getpgid(process.pid) not in begun


def test_a_library_of_other_arguments_is_refused(small_library):
    (small_library / "one.cpp").write_text(
        'extern "C" const char* instruction_set() { return ""; }\n'
        'extern "C" int rms_norm(void*) { return 0; }\n'
        'extern "C" long rms_norm_size() { return 8; }\n'
    )
    with pytest.raises(build.BuildError, match="rms_norm expects 8 bytes of arguments, not 96"):
        Kernels(NativeLibrary(build.load_library(small_library / "cache")))


def test_two_processes_at_once(small_library):
    program = (
        "import sys; from pathlib import Path; from rootgraft.kernels.cpu import build;"
        "build.SOURCES = Path(sys.argv[1]);"
        "sys.exit(build.load_library(build.SOURCES / 'cache').one() - 1)"
    )
    command = [sys.executable, "-c", program, str(small_library)]
    running = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) for _ in range(3)]
    said = b"".join(process.communicate()[1] for process in running)
    assert [process.returncode for process in running] == [0, 0, 0], said
    assert said.count(b"Compiling the CPU kernels") == 1, "the others wait for it"
    assert len(list((small_library / "cache").glob("*.so"))) == 1


def test_a_file_system_without_locks_takes_the_library(small_library, monkeypatch):
    monkeypatch.setattr(build.fcntl, "flock", mock.Mock(side_effect=OSError("no locks available")))
    assert build.load_library(small_library / "cache").one() == 1


def test_torch_serves_without_a_compiler(tmp_path):
    program = (
        "import torch; from rootgraft.kernels import ops; print(ops.native_status());"
        "layer = ops.pack_linear(torch.eye(4)); assert layer.kernels is None;"
        "assert torch.equal(ops.linear(torch.ones(2, 4), layer), torch.ones(2, 4));"
        "assert ops.rms_norm(torch.ones(2, 4), torch.ones(4), 0.0).shape == (2, 4)"
    )
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "CPU kernels: plain torch, because no C++ compiler (g++ or c++) was found"


def test_the_cache_follows_xdg(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert build.default_cache() == Path("/elsewhere/rootgraft/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build.default_cache() == Path.home() / ".cache/rootgraft/kernels"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 instruction sets")
@instruction_sets("haswell", "x86-64")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_lesser_instruction_sets(arch, dtype):
    """What other machines would compile, run on this one."""
    skip_unless_lesser(arch)
    kernels = Kernels(NativeLibrary(build.load_library(build.default_cache(), arch)))
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
    assert ops.native_status() == f"CPU kernels: native, {kernels.library.instruction_set}, 1 threads"


LEVEL_FLAGS = {level: set(needs) for level, (_, needs) in portable_build.LEVELS.items()}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86")
def test_a_portable_library_is_the_best_one_that_this_cpu_runs(small_library, tmp_path, monkeypatch):
    folder, cpuinfo = tmp_path / "portable", tmp_path / "cpuinfo"
    monkeypatch.setattr(portable_build, "FOLDER", folder)
    built = portable_build.build_portable(folder)
    assert [path.name.rpartition("-")[0] for path in built] == list(portable_build.LEVELS)
    for flags, best in (
        (set(), None),
        (LEVEL_FLAGS["avx2"], built[2]),
        (LEVEL_FLAGS["avx2"] | LEVEL_FLAGS["avx512"], built[1]),
        (LEVEL_FLAGS["avx2"] | LEVEL_FLAGS["avx512-bf16"], built[0]),
    ):
        cpuinfo.write_text(f"processor: 0\nflags : {' '.join(sorted(flags))} other\n")
        assert portable_build.find_portable(folder, cpuinfo) == best
    (small_library / "one.h").write_text("#define ONE 2\n")
    assert portable_build.find_portable(folder, cpuinfo) is None  # they are of other sources


def test_without_a_compiler_a_portable_library_is_loaded(small_library, tmp_path, monkeypatch):
    built = tmp_path / "best.so"
    build.compile_library(build.find_compiler(), build.FLAGS, built)
    monkeypatch.setattr(portable_build, "find_portable", lambda: built)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert portable_build.load_best(tmp_path / "cache").one() == 1
    monkeypatch.setattr(portable_build, "find_portable", lambda: None)
    with pytest.raises(build.BuildError, match="no C"):
        portable_build.load_best(tmp_path / "cache")
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"no library")
    monkeypatch.setattr(portable_build, "find_portable", lambda: damaged)
    with pytest.raises(build.BuildError, match=r"damaged\.so"):
        portable_build.load_best(tmp_path / "cache")
