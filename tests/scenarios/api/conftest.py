"""What is collected of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out by default what takes seconds to collect, as requests are made from the document then."""
    left_out = collection_path.name == "test_openapi_fuzz.py" and config.getoption("markexpr") == "not heavy"
    return left_out or None
