"""Engine spawn: starts an engine process with the descriptors that it talks through."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol

from ..machine.visible_gpus import VARIABLE


class EngineProcess(Protocol):
    """An engine process, which may be no child of this one."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end. Returns its exit status; None where it is not known. Raises subprocess.TimeoutExpired."""
        ...


SpawnEngine = Callable[[int, int, str, str], EngineProcess]
"""As ``spawn_engine``."""


def spawn_engine(
    fd: int, liveness: int, model_path: str, options: str, gpu: str | None = None
) -> subprocess.Popen[bytes]:
    """Start an engine process with its ends of the channel and of the stream for signs of life.

    Args:
        options: an ``EngineConfig`` as JSON.
        gpu: the only one that it sees, as ``CUDA_VISIBLE_DEVICES`` names it; None for all that this process sees.
    """
    # -P: without the working directory on its path, which may hold an `engine/` or `http.py` of the user's own.
    command = [sys.executable, "-P", "-m", "rootgraft.engine.core.engine_process", str(fd), str(liveness)]
    command += [model_path, options]
    environment = None if gpu is None else os.environ | {VARIABLE: gpu}
    return subprocess.Popen(command, pass_fds=[fd, liveness], stdin=subprocess.DEVNULL, env=environment)
