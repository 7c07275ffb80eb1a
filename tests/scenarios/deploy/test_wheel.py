"""A build of the package compiles kernels into its wheel, says for which machines that is, and succeeds without."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.kernels.cpu_levels import find_library

from rootgraft.kernels.cpu.portable_build import LEVELS, own_level

ROOT = Path(__file__).parents[3]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
LIBRARIES = "rootgraft/kernels/cpu/portable/"


def copy_sources(tree: Path) -> None:
    """Copy what a package is built from, as an image's build does."""
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    for name in (line[1:] for line in lines if line.startswith("!")):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "portable"))
        else:
            shutil.copy(ROOT / name, tree)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Our sources, with C++ that compiles in no time in place of ours."""
    tree = tmp_path_factory.mktemp("tree")
    copy_sources(tree)
    sources = tree / "kernels" / "cpu" / "src"
    shutil.rmtree(sources)
    (sources / "ops").mkdir(parents=True)
    (sources / "simd").mkdir()
    (sources / "simd" / "simd.h").touch()
    write_source(tree, 1)
    return tree


def write_source(tree: Path, number: int) -> None:
    (tree / "kernels/cpu/src/ops/one.cpp").write_text(f'extern "C" int one() {{ return {number}; }}\n')


def build(tree: Path, hook: str = "build_wheel", **environment: str) -> tuple[Path, str]:
    """Build into a folder of its own. Returns the wheel and what was said."""
    out = tree / "out"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-c", BUILD, hook, str(out)]
    output = {"capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, cwd=tree, env=os.environ | environment, **output)  # type: ignore[call-overload]
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return next(out.glob("*.whl")), said


def libraries(wheel: zipfile.ZipFile) -> list[str]:
    return sorted(name.removeprefix(LIBRARIES) for name in wheel.namelist() if name.startswith(LIBRARIES))


def metadata(wheel: zipfile.ZipFile) -> dict[str, str]:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/WHEEL"))
    return dict(line.split(": ", 1) for line in wheel.read(name).decode().splitlines() if line)


@pytest.mark.skipif(own_level() is None, reason="no level is exactly what this CPU has")
def test_a_wheel_holds_the_kernels_of_this_machine(tree: Path, tmp_path: Path) -> None:
    path, said = build(tree)
    assert path.name == "rootgraft-0.1.0-py3-none-linux_x86_64.whl"
    assert "absent from the `packages`" not in said
    with zipfile.ZipFile(path) as wheel:
        (name,) = libraries(wheel)
        assert name.rpartition("-")[0] == own_level()
        about = metadata(wheel)
        assert (about["Root-Is-Purelib"], about["Tag"]) == ("false", "py3-none-linux_x86_64")
        assert {"rootgraft/kernels/cpu/src/ops/one.cpp", "rootgraft/py.typed"} <= set(wheel.namelist())
        assert "rootgraft/setup.py" not in wheel.namelist()
        assert ctypes.CDLL(wheel.extract(LIBRARIES + name, tmp_path)).one() == 1


@pytest.mark.skipif(own_level() is None, reason="no level is exactly what this CPU has")
def test_a_wheel_of_all_levels_holds_no_library_of_an_earlier_build(tree: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(build(tree)[0]) as wheel:
        before = libraries(wheel)
    write_source(tree, 2)
    with zipfile.ZipFile(build(tree, ROOTGRAFT_KERNELS="all")[0]) as wheel:
        names = libraries(wheel)
        assert sorted(name.rpartition("-")[0] for name in names) == sorted(LEVELS) and not {*names} & {*before}
        own = next(name for name in names if name.rpartition("-")[0] == own_level())
        assert ctypes.CDLL(wheel.extract(LIBRARIES + own, tmp_path)).one() == 2


def test_a_build_without_a_compiler_is_for_any_machine_and_says_what_follows(tree: Path, tmp_path: Path) -> None:
    path, said = build(tree, PATH=str(tmp_path))
    assert path.name == "rootgraft-0.1.0-py3-none-any.whl"
    assert re.search(r"The package holds no compiled CPU kernels: .*\. They are compiled at the first start", said)
    with zipfile.ZipFile(path) as wheel:
        assert not libraries(wheel) and metadata(wheel)["Root-Is-Purelib"] == "true"
    for wanted, fault in (("all", "no C++ compiler"), ("avx2", "ROOTGRAFT_KERNELS is 'avx2'")):
        with pytest.raises(AssertionError, match=re.escape(fault)):
            build(tree, PATH=str(tmp_path), ROOTGRAFT_KERNELS=wanted)


def test_an_editable_installation_compiles_at_its_first_start(tree: Path) -> None:
    shutil.rmtree(tree / "build", ignore_errors=True)
    path, _ = build(tree, "build_editable")
    assert path.name == "rootgraft-0.1.0-0.editable-py3-none-any.whl"
    assert not (tree / "build" / "kernels").exists()


@pytest.mark.heavy
@pytest.mark.skipif(own_level() is None, reason="no level is exactly what this CPU has")
def test_a_wheel_is_for_any_linux_that_torch_is_for(tmp_path: Path) -> None:
    """auditwheel reads which versions of glibc and libstdc++ have the symbols that the kernels need."""
    copy_sources(tmp_path)
    level = own_level()
    assert level is not None
    # Compiled once for this test and those of the levels, or by the build of this very package.
    kernels = tmp_path / "build" / "kernels"
    kernels.mkdir(parents=True)
    shutil.copy(find_library(LEVELS[level].target), kernels)
    path, _ = build(tmp_path)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(tmp_path / "dist"), str(path)]
    subprocess.run(command, env=environment, check=True)
    (repaired,) = (tmp_path / "dist").iterdir()
    found = re.fullmatch(r"rootgraft-0\.1\.0-py3-none-manylinux_2_(\d+)_x86_64\.whl", repaired.name)
    assert found is not None and int(found[1]) <= 28, repaired.name
