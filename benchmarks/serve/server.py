"""A server of a benchmark: started, waited for, stopped; and the machine that it ran on."""

from __future__ import annotations

import contextlib
import ctypes
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
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from rootgraft.api.cli.remote_server import RemoteError

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1  # Constant of prctl(2).
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


class Server:
    """A server to start and stop, or one that runs already.

    Args:
        command: its words, with ``{port}`` where the port belongs; None if it runs already.
        url: where it answers, if it runs already.
    """

    def __init__(self, command: str | None, url: str | None = None) -> None:
        self._command = command
        self._url = url
        self._log: Path | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[tuple[str, subprocess.Popen[bytes] | None]]:
        """Start the server for the time of a block: its address and its first process, None for one that runs already.

        Raises:
            OSError: the command does not exist.
        """
        if self._command is None:
            yield str(self._url), None
            return
        port = free_port()
        command = shlex.split(self._command.format(port=port))
        with tempfile.NamedTemporaryFile() as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=partial(_end_with_benchmark, os.getpid()),
            )
            self._log = Path(log.name)
            try:
                yield f"http://127.0.0.1:{port}/v1", process
            except RemoteError:
                sys.stderr.write(self.log_tail())
                raise
            finally:
                self._log = None
                _stop(process)

    def log_tail(self, size: int = 3000) -> str:
        """Return the last characters that the server has written, "" for one that this has not started."""
        return self._log.read_text(errors="replace")[-size:] if self._log else ""


def _end_with_benchmark(benchmark: int) -> None:
    """Ask the kernel to end this process when the benchmark ends, killed or not: its own session hears no Ctrl-C."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != benchmark:  # it has ended before
        os._exit(0)


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
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _processor("model name") or platform.processor(),
        "instructions": [name for name in INSTRUCTION_SETS if name in _processor("flags").split()],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit.stdout.strip() or None,
    }


def _processor(key: str) -> str:
    """Return a value of the first core in /proc/cpuinfo, "" without one."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == key), "")


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
