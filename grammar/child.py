"""A worker process, seen from the service."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from grammar.vocabulary import Vocabulary
from grammar.worker import MAX_FRAME, READY, STARTED, encode_vocabulary, write_frame

START_SECONDS = 120.0
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[1]); from grammar.worker import main; main()"
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
            env={**os.environ, "OMP_NUM_THREADS": "1"},
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
            ChildTimeout: if it takes longer than `seconds` from when the worker has started on it.
            ChildDied: if the worker ends.
        """
        self._send(job)
        if self._receive(time.monotonic() + START_SECONDS) != STARTED:
            raise ChildDied
        return self._receive(time.monotonic() + seconds)

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
