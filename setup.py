"""The packages of ``rootgraft``: the repository's root is the package, and each product folder a package inside it.

Its long description is README.md with addresses of the repository in place of relative ones, which a package index
cannot follow.

A build compiles the CPU kernels into the package for the CPU level of the build machine. With ``ROOTGRAFT_KERNELS=all``
it compiles them for all levels, and fails if that is not possible.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

FOLDERS = ("engine", "radix", "lora", "grammar", "kernels", "fleet", "api", "programs", "tenancy")
WANTED = os.environ.get("ROOTGRAFT_KERNELS", "")
if WANTED not in ("", "all"):
    raise SystemExit(f"ROOTGRAFT_KERNELS is {WANTED!r}: it can be 'all', or not be set for this machine's level.")
ALL_LEVELS = WANTED == "all"
ROOT = Path(__file__).resolve().parent


class KernelDistribution(Distribution):
    """A distribution that is for one platform once compiled kernels are part of it."""

    has_kernels = False

    def has_ext_modules(self) -> bool:
        return self.has_kernels


class BuildWithKernels(build_py):
    """Compile the CPU kernels, and leave this file out of the package, whose folder it lies in."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
        else:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # files of an earlier build would become part of this one
            super().run()
            self.distribution.has_kernels = self._compile_kernels()

    def _compile_kernels(self) -> bool:
        """Compile by the copied package, which needs nothing to be installed; returns whether there are kernels."""
        package = Path(self.build_lib).resolve()
        cache = Path(self.get_finalized_command("build").build_base).resolve() / "kernels"
        command = [sys.executable, "-P", "-m", "rootgraft.kernels.cpu.portable_build", "--cache", str(cache)]
        command += ["--all"] if ALL_LEVELS else []
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(package)}, check=ALL_LEVELS)
        return done.returncode == 0

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package as (package, module, path)."""
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [module for module in found if module[:2] != ("rootgraft", "setup")]


class KernelWheel(bdist_wheel):
    """A wheel of any Python, as kernels are loaded by ctypes, and of one platform if it holds kernels."""

    def run(self) -> None:
        self.run_command("build")
        self.root_is_pure = not self.distribution.has_kernels
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        tag: tuple[str, str, str] = super().get_tag()
        return tag if self.root_is_pure else (self.python_tag, "none", tag[2])


def long_description() -> str:
    """README.md whose relative links and pictures are those of the version's tag in ``project.urls.Source``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

    def absolute(link: re.Match[str]) -> str:
        folder = f"{project['urls']['Source']}/{'raw' if link['mark'] else 'blob'}/v{project['version']}"
        return f"{link['mark']}[{link['text']}]({folder}/{link['path']})"

    relative = re.compile(r"(?P<mark>!?)\[(?P<text>[^]]*)\]\((?P<path>(?![a-z]+:|#)[^)\s]+)\)")
    return relative.sub(absolute, (ROOT / "README.md").read_text("utf-8"))


setup(
    long_description=long_description(),
    long_description_content_type="text/markdown",
    packages=[
        "rootgraft",
        *(f"rootgraft.{name}" for name in find_packages(include=[p for f in FOLDERS for p in (f, f"{f}.*")])),
    ],
    package_dir={"rootgraft": ".", **{f"rootgraft.{name}": name for name in FOLDERS}},
    include_package_data=False,
    package_data={
        "rootgraft": ["py.typed"],
        "rootgraft.kernels": ["cpu/src/*/*.cpp", "cpu/src/*/*.h"],
        "rootgraft.api": ["ui/*"],
        "rootgraft.api.protocol": ["*.toml"],
        "rootgraft.api.rpc": ["*.binpb", "*.proto"],
        "rootgraft.engine": ["*.toml"],
        "rootgraft.engine.checkpoint": ["*.toml", "*.jsonl"],
        "rootgraft.engine.offline": ["*.toml"],
    },
    distclass=KernelDistribution,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": KernelWheel},
)
