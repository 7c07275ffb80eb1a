"""The packages of ``rootgraft``: the repository's root is the package, and each product folder a package inside it."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = ("engine", "radix", "lora", "grammar", "kernels", "api", "programs")


class BuildWithoutSetup(build_py):
    """Leave this file out of the package, whose folder it lies in."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """The modules of a package as (package, module, path)."""
        found: list[tuple[str, str, str]] = super().find_package_modules(package, package_dir)
        return [module for module in found if module[:2] != ("rootgraft", "setup")]


setup(
    packages=[
        "rootgraft",
        *(f"rootgraft.{name}" for name in find_packages(include=[p for f in FOLDERS for p in (f, f"{f}.*")])),
    ],
    package_dir={"rootgraft": ".", **{f"rootgraft.{name}": name for name in FOLDERS}},
    package_data={
        "rootgraft": ["py.typed"],
        "rootgraft.kernels": ["cpu/src/*/*.cpp", "cpu/src/*/*.h"],
        "rootgraft.api": ["ui/*"],
        "rootgraft.api.protocol": ["*.toml"],
        "rootgraft.engine": ["*.toml"],
    },
    cmdclass={"build_py": BuildWithoutSetup},
)
