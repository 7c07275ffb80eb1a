from __future__ import annotations

import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing it
    import peft  # noqa: F401


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tiny base models are saved."""
    return tmp_path_factory.mktemp("bases")
