"""Dependencies: lower bounds and locked versions have no known fault, and every locked file has a hash."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[3]
LOCK = (ROOT / "deploy" / "requirements.lock").read_text("utf-8")
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
OF_TORCH = {"torch", "triton"}


def audit() -> Any:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "deploy" / "audit.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_known_advisory_applies() -> None:
    assert audit().main() == 0


def test_old_versions_are_found() -> None:
    advisories = [{"package": "aiohttp", "fixed": "3.14.1", "ids": ["A", "B"]}]
    bounds, lock = [("aiohttp", Version("3.12")), ("other", Version("1"))], {"aiohttp": Version("3.14.0")}
    assert audit().faults(advisories, bounds, lock) == [
        "pyproject.toml allows aiohttp 3.12: A, B is fixed in 3.14.1.",
        "deploy/requirements.lock has aiohttp 3.14.0: A, B is fixed in 3.14.1.",
    ]
    assert audit().faults(advisories, [("aiohttp", Version("3.14.1"))], {"aiohttp": Version("3.15")}) == []


def test_the_lock_has_every_dependency_in_a_version_that_is_taken_with_hashes() -> None:
    locked = audit().locked(LOCK)
    extras = PROJECT["optional-dependencies"]
    for requirement in map(Requirement, (*PROJECT["dependencies"], *extras["otel"], *extras["ebnf"])):
        if requirement.name not in OF_TORCH:
            assert requirement.name in locked, f"{requirement.name} is not locked: run make lock"
            assert requirement.specifier.contains(locked[requirement.name]), f"{requirement}: run make lock"
    entries = re.split(r"(?m)^(?=[a-z0-9-]+==)", LOCK)[1:]
    assert len(entries) == len(locked) and all("--hash=sha256:" in entry for entry in entries)
    assert not OF_TORCH & locked.keys(), "torch is of the image's own index"
    assert "index-url" not in LOCK and "file:" not in LOCK


def test_the_images_install_what_is_locked_and_copy_what_they_need() -> None:
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text("utf-8")
    installs = "RUN pip install --no-deps --require-hashes -r deploy/requirements.lock"
    assert dockerfile.count(installs) == 2
    kept = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text("utf-8").split()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert {f"!{name}" for name in packages} <= set(kept) and "!deploy/requirements.lock" in kept
