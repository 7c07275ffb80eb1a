"""A worker process, seen from the service."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from grammar.vocabulary import Vocabulary
from grammar.worker import MAX_FRAME, NICE, READY, STARTED, encode_vocabulary, write_frame

START_SECONDS = 120.0
PATIENCE = 20
# Nice before anything is imported. The child stays in the session of its parent: niceness only acts between processes
# of one session where the kernel groups them by session (autogroup).
_PROGRAM = f"import os, sys; os.nice({NICE}); sys.path.insert(0, sys.argv[1]); from grammar.worker import main; main()"
_ROOT = str(Path(__file__).resolve().parent.parent)


class ChildDied(Exception):
    """The process ended by itself."""


class ChildTimeout(Exception):
    """No answer came in time."""


class Child:
    """One worker, ready to compile."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Start it and wait until it is ready.

        Raises:
            ChildDied: if it does not start.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, _ROOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # One malloc arena: another one, of a thread, reserves address space, which counts against the limit.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
        )
        try:
            self._send(encode_vocabulary(vocabulary))
            if self._receive(time.monotonic() + START_SECONDS) != READY:
                raise ChildDied
        except (ChildDied, ChildTimeout):
            self.kill()
            raise ChildDied from None

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def compile(self, job: bytes, seconds: float) -> bytes:
        """The answer to a job, as the worker sent it.

        Raises:
            ChildTimeout: if the worker takes more than `seconds` of processor time from when it has started on it, or
                `PATIENCE` times as long by the clock: on a busy machine it has to wait for its turn.
            ChildDied: if the worker ends.
        """
        self._send(job)
        if self._receive(time.monotonic() + START_SECONDS) != STARTED:
            raise ChildDied
        self._wait(seconds)
        return self._receive(time.monotonic() + START_SECONDS)

    def kill(self) -> None:
        """End the process at once and collect it."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue  # what was still in the buffer has no reader any more
        self._process.wait()

    def _wait(self, seconds: float) -> None:
        """Wait until the worker answers or ends."""
        assert self._process.stdout is not None
        last, before = time.monotonic() + PATIENCE * seconds, self._processor_seconds()
        left = seconds
        while left > 0 and (now := time.monotonic()) < last:
            ready, _, _ = select.select([self._process.stdout], [], [], min(left, last - now))
            if ready:
                return
            left = seconds - (self._processor_seconds() - before)
        raise ChildTimeout

    def _processor_seconds(self) -> float:
        """Processor time that the worker has had so far; infinite once it has ended."""
        try:
            times = Path(f"/proc/{self._process.pid}/stat").read_text("ascii").rpartition(")")[2].split()
        except OSError:
            return float("inf")
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")

    def _send(self, body: bytes) -> None:
        assert self._process.stdin is not None
        try:
            write_frame(self._process.stdin, body)  # type: ignore[arg-type]
        except (BrokenPipeError, ValueError):
            raise ChildDied from None

    def _receive(self, deadline: float) -> bytes:
        size = int.from_bytes(self._read(4, deadline), "little")
        if size > MAX_FRAME:
            raise ChildDied
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        data = bytearray()
        while len(data) < size:
            ready, _, _ = select.select([source], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ChildTimeout
            chunk = os.read(source, size - len(data))
            if not chunk:
                raise ChildDied
            data += chunk
        return bytes(data)
