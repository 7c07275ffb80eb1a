"""One thread for small ops, and the native kernels where they can be built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rootgraft.kernels import backend, ops
from rootgraft.kernels.cpu import thread_count
from rootgraft.kernels.cpu.build import BuildError
from rootgraft.kernels.cpu.native_ops import Kernels


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = thread_count.count()
    ops.set_threads(1)
    with torch.inference_mode():
        yield
    ops.set_threads(before)


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    loaded = backend.load()
    if isinstance(loaded, BuildError):
        pytest.skip(str(loaded))
    return loaded
