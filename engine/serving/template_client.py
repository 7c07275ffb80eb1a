"""Engine template of the API process's side: engine processes forked from one that has loaded the weights."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ..config import EngineConfig
from ..machine.visible_gpus import torch_takes_gpus, visible_gpus
from .engine_spawn import EngineProcess, spawn_engine

FORK_SECONDS = 5.0
"""For a template to answer: it does nothing else."""

logger = logging.getLogger("rootgraft.fleet")


class ForkedProcess:
    """An engine process that is no child of this one. Its exit status is not known."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor: int | None = descriptor

    def kill(self) -> None:
        """Kill it. Does nothing if it has ended."""
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for its end. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        if self._descriptor is None:
            return
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("engine process", timeout or 0.0)
        os.close(self._descriptor)
        self._descriptor = None


class EngineTemplate:
    """A process with a model's weights, from which engine processes with the same options are forked.

    Where it cannot be had (a GPU, a system without ``pidfd_open``, a model that cannot be loaded) they are started in
    the plain way, and each loads the weights itself.

    Args:
        config, model_path: of the engine processes.
    """

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        self._config = config
        self._model_path = model_path
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._is_possible = hasattr(os, "pidfd_open") and config.device != "cuda" and not _has_gpu(config)

    async def start(self) -> None:
        """Start the process and wait until it has loaded the weights. Does nothing if it runs, or cannot be had."""
        async with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._drop()
            if self._is_possible and self._socket is None:
                await self._start()

    def spawn(self, fd: int, liveness: int, model_path: str, options: str) -> EngineProcess:
        """Fork an engine process, or start it in the plain way; arguments as of ``spawn_engine``."""
        if self._socket is not None:
            try:
                socket.send_fds(self._socket, [b"."], [fd, liveness])
                answer, descriptors, _, _ = socket.recv_fds(self._socket, 32, 1)
            except OSError as error:
                logger.warning("the process that replicas are forked from is given up: %s", error)
                self._drop()
            else:
                if descriptors:
                    return ForkedProcess(int(answer), descriptors[0])
        return spawn_engine(fd, liveness, model_path, options)

    def close(self) -> None:
        """End the process. Engine processes that were forked run on; ``start`` starts another one."""
        self._drop()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-P", "-m", "rootgraft.engine.core.engine_template", str(theirs.fileno())]
            command += [str(self._model_path), json.dumps(asdict(self._config))]
            # numpy would start threads as it is imported, which no forked process has.
            environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        self._socket = ours
        ours.setblocking(False)
        try:
            said = await asyncio.get_running_loop().sock_recv(ours, 32)
        except BaseException:
            self._drop()
            raise
        if not said:
            self._is_possible = False
            self._drop()
            return
        ours.settimeout(FORK_SECONDS)

    def _drop(self) -> None:
        """End the process, if there is one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _has_gpu(config: EngineConfig) -> bool:
    """Return whether the engine may choose a GPU, as far as can be known without torch."""
    return config.device == "auto" and torch_takes_gpus() and bool(visible_gpus())
