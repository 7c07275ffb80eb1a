"""A fixture for tests that turn the native kernels off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def native_kernels_again() -> Iterator[None]:
    """The choice is the process's: leave it to the tests that follow as it was."""
    yield
    # Not at the top: tests that need no torch are spared its import.
    from rootgraft.kernels import ops

    ops.use_native(True)
