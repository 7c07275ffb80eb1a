"""Watched process: starts, watches, describes and ends the process of an engine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

import psutil

from ..config import EngineConfig
from ..machine.visible_gpus import takes_gpu
from .engine_spawn import EngineProcess, SpawnEngine, fault_of_start
from .process_watch import ProcessWatch
from .watchdog import Watchdog

SOCKET_BUFFER = 4 << 20
"""Size of a channel's send buffer in bytes."""
_END_SECONDS = 10.0


class WatchedProcess(ABC):
    """An engine process on this machine or another one; no process exists before ``start``. Belongs to one event loop.

    Args:
        heartbeat_timeout, watchdog_timeout: see ``Watchdog``.

    Attributes:
        process: the child of this process; None before ``start``, and if the engine process is not a child.
        watch: reads the signs of life of the process, and reports if the process hangs or has ended.
    """

    def __init__(self, heartbeat_timeout: float, watchdog_timeout: float) -> None:
        self.process: EngineProcess | None = None
        watchdog = Watchdog(heartbeat_timeout, watchdog_timeout, self._processor_seconds)
        self.watch = ProcessWatch(watchdog, self._has_main_ended)

    @property
    @abstractmethod
    def place(self) -> str:
        """Place where the engine runs, as text for log and error messages."""

    @abstractmethod
    async def start(self) -> tuple[socket.socket, BinaryIO]:
        """Start the process. Returns this side's ends of the message channel and of the liveness pipe.

        Raises EngineDead.
        """

    @abstractmethod
    def fault_of_start(self) -> str:
        """Return how the process ended before its model was loaded.

        May wait for its end; this blocks no request yet.
        """

    @abstractmethod
    def kill(self) -> None:
        """Kill the process. Does nothing if it has ended."""

    @abstractmethod
    def reap(self) -> None:
        """Wait for the end of a child process. Blocks."""

    @abstractmethod
    def _has_main_ended(self) -> bool:
        """Return whether the process's main thread has ended."""

    @abstractmethod
    def _processor_seconds(self) -> float | None:
        """Return the seconds of processor time that the process has used; None if they are not known."""


class ChildProcess(WatchedProcess):
    """An engine process that is a child of this process.

    Args:
        spawn: starts the process.
        heartbeat_timeout, watchdog_timeout: see ``Watchdog``.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        spawn: SpawnEngine,
        heartbeat_timeout: float,
        watchdog_timeout: float,
    ) -> None:
        super().__init__(heartbeat_timeout, watchdog_timeout)
        self._config = config
        self._model_path = model_path
        self._spawn = spawn

    async def start(self) -> tuple[socket.socket, BinaryIO]:
        """Start the process. Returns this side's ends of the message channel and of the liveness pipe."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        reader, writer = os.pipe()
        liveness = open(reader, "rb", buffering=0)  # noqa: SIM115
        with theirs, open(writer, "wb", buffering=0) as signs:
            options = json.dumps(asdict(self._config))
            self.process = self._spawn(theirs.fileno(), signs.fileno(), str(self._model_path), options)
        return ours, liveness

    @property
    def place(self) -> str:
        """Place where the engine runs, as text for log and error messages."""
        return "no process" if self.process is None else f"process {self.process.pid}"

    def fault_of_start(self) -> str:
        """Return how the process ended before its model was loaded. Waits for its end; this blocks no request yet."""
        assert self.process is not None
        return fault_of_start(self.process, on_gpu=takes_gpu(self._config.device))

    def kill(self) -> None:
        """Kill the process. Does nothing if it has ended."""
        if self.process is not None:
            self.process.kill()

    def reap(self) -> None:
        """Wait at most ten seconds for the end of the process, then kill it. Blocks."""
        if self.process is None:
            return
        try:
            self.process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _has_main_ended(self) -> bool:
        """Return whether the process's main thread has ended."""
        assert self.process is not None
        try:
            return psutil.Process(self.process.pid).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False

    def _processor_seconds(self) -> float | None:
        """Return the seconds of processor time that the process has used; None if they are not known."""
        assert self.process is not None
        try:
            times = psutil.Process(self.process.pid).cpu_times()
        except psutil.Error:
            return None
        return float(times.user + times.system)
