"""One thread for small ops, and the native kernels where they can be built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rootgraft.kernels import backend, ops
from rootgraft.kernels.cpu.build import BuildError
from rootgraft.kernels.cpu.native_ops import Kernels


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    native = ops.native_kernels()
    before = torch.get_num_threads() if native is None else native.library.num_threads
    ops.set_threads(1)
    with torch.inference_mode():
        yield
    ops.set_threads(before)


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    loaded = backend.LIBRARY.native
    if isinstance(loaded, BuildError):
        pytest.skip(str(loaded))
    return loaded
