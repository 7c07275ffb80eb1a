"""What all tests share: the small real model, one torch thread, and Hypothesis without deadlines."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from engine.source import resolve_model

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Tiny models gain nothing from threads, and two test processes may share the cores.

    Test modules that need torch were imported before the first fixture runs; the others are spared its import.
    """
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's GGUF file, downloaded into the user's cache at first use."""
    return resolve_model(None).path
