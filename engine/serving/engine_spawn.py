"""Engine spawn: starts an engine process with the descriptors that it talks through, or one ahead of these."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Protocol, Self

from ..machine.visible_gpus import VARIABLE


class EngineProcess(Protocol):
    """An engine process, which may be no child of this one."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for its end. Returns its exit status; None where it is not known. Raises subprocess.TimeoutExpired."""
        ...


_LAST_SECONDS = 2.0  # seconds that a process which has closed its socket gets to end

SpawnEngine = Callable[[int, int, str, str], EngineProcess]
"""As ``spawn_engine``."""


def spawn_engine(
    fd: int, liveness: int, model_path: str, options: str, gpu: str | None = None
) -> subprocess.Popen[bytes]:
    """Start an engine process with its ends of the channel and of the stream for signs of life.

    Args:
        options: an ``EngineConfig`` as JSON.
        gpu: the only one that it sees, or those of its ranks, as ``CUDA_VISIBLE_DEVICES`` names them; None for all
            that this process sees.
    """
    environment = None if gpu is None else os.environ | {VARIABLE: gpu}
    arguments = (str(fd), str(liveness), model_path, options)
    return _start(*arguments, pass_fds=[fd, liveness], stdin=subprocess.DEVNULL, env=environment)


class EnginePreload:
    """An engine process that imports the engine, which takes seconds, before its model and options are known.

    A context manager: at its end a process that was not used is killed.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process: subprocess.Popen[bytes] | None = _start(stdin=theirs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def spawn(self, fd: int, liveness: int, model_path: str, options: str) -> EngineProcess:
        """Let the process go on with these, or start another where it was used or has ended; as ``spawn_engine``."""
        process, self._process = self._process, None
        if process is not None:
            try:
                socket.send_fds(self._socket, [json.dumps([model_path, options]).encode()], [fd, liveness])
            except OSError:
                process.kill()
                process.wait()
            else:
                return process
        return spawn_engine(fd, liveness, model_path, options)


def _start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start an engine process, which takes no signals of a terminal until it ignores them: they are for its parent."""
    # -P: without the working directory on its path, which may hold an `engine/` or `http.py` of the user's own.
    command = [sys.executable, "-P", "-m", "rootgraft.engine.core.engine_process", str(os.getpid())]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        return subprocess.Popen([*command, *arguments], **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def fault_of_start(process: EngineProcess, *, on_gpu: bool = False) -> str:
    """Return how a process ended before its model was loaded. Waits for it, while nothing is served yet.

    Args:
        on_gpu: whether the model was to compute there, where weights have one form.
    """
    try:
        status = process.wait(_LAST_SECONDS)
    except subprocess.TimeoutExpired:
        return "The engine process has closed its connection while it was loading the model."
    fault = "The engine process ended while it was loading the model"
    if status == -signal.SIGKILL:
        less = "--max-cpu-loras 8" if on_gpu else "--quantization int8_weight_only --kv-cache-memory 0.5"
        return (
            f"{fault}: it was killed, as the system does when memory runs out{' (of the host)' if on_gpu else ''}. "
            f"Take a smaller model, or less of it for {'adapters' if on_gpu else 'KV'}. Try: rootgraft serve {less}"
        )
    if status is None:
        return f"{fault}; its own lines above say why. Try: rootgraft doctor"
    how = f"by signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"with exit status {status}"
    return f"{fault}, {how}; its own lines above say why. Try: rootgraft doctor"
