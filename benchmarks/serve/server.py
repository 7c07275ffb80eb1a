"""A server of a benchmark: started, waited for, stopped; and the machine that it ran on."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from rootgraft.api.cli.remote_server import RemoteError

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """A server to start and stop, or one that runs already."""

    def __init__(self, command: str | None, url: str | None = None) -> None:
        self._command = command
        self._url = url

    @contextlib.contextmanager
    def running(self) -> Iterator[tuple[str, subprocess.Popen[bytes] | None]]:
        if self._command is None:
            yield str(self._url), None
            return
        port = free_port()
        command = shlex.split(self._command.format(port=port))
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            try:
                yield f"http://127.0.0.1:{port}/v1", process
            except RemoteError:
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace")[-3000:])
                raise
            finally:
                _stop(process)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group: politely, then for good."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)


def machine() -> dict[str, Any]:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit.stdout.strip() or None,
    }


def memory_mib(process: subprocess.Popen[bytes]) -> float:
    """Proportional set size of a server: all processes of its group, pages that several share counted once."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == process.pid:
                lines = stat.with_name("smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def processor_seconds(process: subprocess.Popen[bytes]) -> dict[str, float]:
    """Return the processor time that a server's first process and all those that it has started have used so far."""
    first = psutil.Process(process.pid)
    times = {"first": sum(first.cpu_times()[:2]), "others": 0.0}
    for child in first.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times["others"] += sum(child.cpu_times()[:2])
    return times
