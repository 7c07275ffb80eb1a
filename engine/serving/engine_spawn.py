"""Engine spawn: starts an engine process for a model, or starts one in advance that receives its model later."""

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
    """Interface of an engine process. It need not be a child of this process."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the process.

        Returns its exit status, or None if that is not known. Raises subprocess.TimeoutExpired.
        """
        ...


_LAST_SECONDS = 2.0  # Seconds to wait for the end of a process that has closed its socket.

SpawnEngine = Callable[[int, int, str, str], EngineProcess]
"""Type of a function with the arguments of ``spawn_engine``."""


def spawn_engine(
    fd: int, liveness: int, model_path: str, options: str, gpu: str | None = None
) -> subprocess.Popen[bytes]:
    """Start an engine process. The process inherits its ends of the message channel and of the liveness pipe.

    Args:
        fd: descriptor of the process's end of the message channel.
        liveness: descriptor of the process's end of the pipe for signs of life.
        options: an ``EngineConfig`` as JSON.
        gpu: the GPU or GPUs that the process may use, in the form of ``CUDA_VISIBLE_DEVICES``; None for all GPUs that
            this process may use.
    """
    environment = None if gpu is None else os.environ | {VARIABLE: gpu}
    arguments = (str(fd), str(liveness), model_path, options)
    return _start(*arguments, pass_fds=[fd, liveness], stdin=subprocess.DEVNULL, env=environment)


class EnginePreload:
    """Engine process that is started before its model and options are known, because importing the engine takes
    seconds.

    Use it as a context manager: on exit, a process that was not used is killed.
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
        """Send the model and the options to the waiting process.

        If it was used or has ended, start a new one. See ``spawn_engine``.
        """
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
    """Start an engine process.

    The terminal's signals are blocked until the process ignores them: its parent handles them.
    """
    # -P leaves the working directory out of the module search path: the user may have an `engine/` or `http.py` there.
    command = [sys.executable, "-P", "-m", "rootgraft.engine.core.engine_process", str(os.getpid())]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        return subprocess.Popen([*command, *arguments], **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def fault_of_start(process: EngineProcess, *, on_gpu: bool = False) -> str:
    """Return how a process ended before its model was loaded. Waits for its end; this blocks no request yet.

    Args:
        on_gpu: whether the model was to run on a GPU. If memory ran out, the message advises fewer adapters on a GPU,
            and quantized weights on a CPU.
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
            f"Use a smaller model, or less memory for {'adapters' if on_gpu else 'KV'}. Try: rootgraft serve {less}"
        )
    if status is None:
        return f"{fault}; its lines above give the reason. Try: rootgraft doctor"
    how = f"by signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"with exit status {status}"
    return f"{fault}, {how}; its lines above give the reason. Try: rootgraft doctor"
