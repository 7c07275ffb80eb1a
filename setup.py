"""The packages of ``rootgraft``: the repository's root is the package, and each product folder a package inside it."""

from setuptools import find_packages, setup

FOLDERS = ("engine", "radix", "lora", "grammar", "kernels", "api", "programs")

setup(
    packages=[
        "rootgraft",
        *(f"rootgraft.{name}" for name in find_packages(include=[p for f in FOLDERS for p in (f, f"{f}.*")])),
    ],
    package_dir={"rootgraft": ".", **{f"rootgraft.{name}": name for name in FOLDERS}},
    package_data={"rootgraft": ["py.typed"], "rootgraft.kernels": ["cpu/*.cpp", "cpu/*.h"], "rootgraft.api": ["ui/*"]},
)
