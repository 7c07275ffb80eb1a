"""Worker handle: starts, feeds, times and kills one worker process: of grammars, or of other untrusted programs."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Event

from ..vocabulary import Vocabulary
from .compile_worker import MAX_FRAME, NICE, READY, STARTED, encode_vocabulary

# Limit on the processor time that a worker takes to get ready, or to read or write a frame. No limit is one of elapsed
# time, because on a busy machine any worker could exceed it.
START_SECONDS = 120.0
# A worker that uses no processor time at all for so many seconds counts as hanging.
STUCK_SECONDS = 120.0
# Signals by which a process ends itself: after a failed allocation, a stack overflow or a bug.
_OWN_SIGNALS = frozenset((signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))
# A worker that yields is starved if it gets less than `FEWEST_SECONDS` of processor time in `HUNGRY_SECONDS`.
FEWEST_SECONDS, HUNGRY_SECONDS = 0.01, 0.2
# Limit on the seconds that count between two checks of a worker. If more have passed, this process did not run, for
# example because the container or the machine was paused, and perhaps the worker did not run either.
MOST_BETWEEN_LOOKS = 1.0
# The worker lowers its priority before it imports anything. It is not started in a session of its own: if the kernel
# groups processes by session (autogroup), a scheduling class has an effect only within a session.
_YIELD = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
_STEADY = f"import os; os.nice({NICE})"
_SERVE = "from rootgraft.grammar.compile.compile_worker import main; main({is_first})"
CAN_YIELD = hasattr(os, "SCHED_IDLE")


class WorkerDied(Exception):
    """The worker process was ended from outside, or hangs."""


class WorkerCrashed(WorkerDied):
    """The worker process ended itself, as by an abort when its memory was used up."""


class WorkerTimeout(Exception):
    """The worker used up its processor time."""


class WorkerStarved(Exception):
    """A worker that yields gets hardly any processor time: all cores are busy."""


class WorkerProcess:
    """One worker process, ready for jobs. It is killed when the thread that started it ends.

    Attributes:
        yields: whether the worker yields, see `WorkerHandle`.
        num_jobs: number of jobs begun so far.
    """

    yields = False

    def __init__(self, code: str, hello: bytes, *, ending: Event | None = None) -> None:
        """Start a worker and wait until it is ready.

        Args:
            code: Python statements that the process runs.
            hello: body of the first frame, which the process answers with `READY`.
            ending: event that ends all waits for the worker with `WorkerDied`; None for no such event.

        Raises:
            WorkerDied: the worker does not start.
        """
        self._ending = ending or Event()
        self.num_jobs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            # One malloc arena: an arena per thread would reserve address space, which counts against the limit.
            env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        assert self._process.stdin is not None
        # Our end alone does not block.
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            self._send(hello, starves=False)
            if self._receive(START_SECONDS, starves=False) != READY:
                raise WorkerDied
        except (WorkerDied, WorkerTimeout):
            self.kill()
            raise WorkerDied from None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(self, job: bytes, seconds: float) -> bytes:
        """Send a job to the worker, and return the body of its answer.

        Raises:
            WorkerTimeout: the worker takes more than `seconds` of processor time after it has started the job.
            WorkerDied: the worker ends or hangs.
            WorkerStarved: the worker yields (see `WorkerHandle`) and gets hardly any processor time.
        """
        self.num_jobs += 1
        self._send(job, starves=self.yields)
        if self._receive(START_SECONDS, starves=self.yields) != STARTED:
            raise WorkerDied
        return self._receive(seconds, starves=self.yields)

    def kill(self) -> None:
        """Kill the process and reap it."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                stream.close()
        self._process.wait()

    def _wait(self, seconds: float, *, starves: bool, writes: bool = False) -> None:
        """Wait until the worker has written output or has ended; with `writes`, until it can take more input.

        Args:
            seconds: limit on the worker's processor time during the wait.
            starves: whether to raise WorkerStarved, as for a worker that yields.
            writes: whether to wait for room in the worker's input, instead of for its output.

        Raises:
            WorkerStarved: with `starves`, if the worker gets hardly any processor time for `HUNGRY_SECONDS`.
            WorkerTimeout: the worker used more than `seconds` of processor time.
            WorkerDied: the worker got no processor time for `STUCK_SECONDS`, or the event `ending` was set.
        """
        stream = self._process.stdin if writes else self._process.stdout
        assert stream is not None
        read, write = ([], [stream]) if writes else ([stream], [])
        looked, before = time.monotonic(), self._processor_seconds()
        waited, checked, advanced, used, used_before = 0.0, 0.0, 0.0, 0.0, 0.0
        while used < seconds:
            if self._ending.is_set() or waited - advanced >= STUCK_SECONDS:
                raise WorkerDied
            if waited - checked >= HUNGRY_SECONDS:
                if starves and used - used_before < FEWEST_SECONDS:
                    raise WorkerStarved
                checked, used_before = waited, used
            if any(select.select(read, write, [], min(seconds - used, HUNGRY_SECONDS))):
                return
            used_last, used = used, self._processor_seconds() - before
            waited += min((now := time.monotonic()) - looked, MOST_BETWEEN_LOOKS)
            looked = now
            if used > used_last:
                advanced = waited
        raise WorkerTimeout

    def _processor_seconds(self) -> float:
        """Return the worker's processor time so far; infinite once it has ended."""
        try:
            times = Path(f"/proc/{self._process.pid}/stat").read_text("ascii").rpartition(")")[2].split()
        except OSError:
            return float("inf")
        return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")

    def _send(self, body: bytes, *, starves: bool) -> None:
        """Write a frame. Raises WorkerDied too if the worker leaves the pipe full."""
        assert self._process.stdin is not None
        rest = memoryview(len(body).to_bytes(4, "little") + body)
        try:
            while rest:
                self._wait(START_SECONDS, starves=starves, writes=True)
                rest = rest[os.write(self._process.stdin.fileno(), rest) :]
        except (BrokenPipeError, ValueError, WorkerTimeout):
            raise WorkerDied from None

    def _receive(self, seconds: float, *, starves: bool) -> bytes:
        """Read a frame that takes the worker at most so many seconds of processor time to begin."""
        self._wait(seconds, starves=starves)
        size = int.from_bytes(self._read(4), "little")
        if size > MAX_FRAME:
            raise WorkerDied
        return self._read(size)

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        source = self._process.stdout.fileno()
        data = bytearray()
        while len(data) < size:
            self._wait(START_SECONDS, starves=False)
            chunk = os.read(source, size - len(data))
            if not chunk:
                raise self._end()
            data += chunk
        return bytes(data)

    def _end(self) -> Exception:
        """Return what has ended a worker that has closed its output."""
        try:
            ended_by = -self._process.wait(STUCK_SECONDS)
        except subprocess.TimeoutExpired:
            return WorkerDied()
        # The kernel enforced the limit of processor time before this process noticed.
        if ended_by == signal.SIGXCPU:
            return WorkerTimeout()
        return WorkerCrashed() if ended_by <= 0 or ended_by in _OWN_SIGNALS else WorkerDied()


class WorkerHandle(WorkerProcess):
    """One worker process, ready to compile.

    A worker that *yields* has the scheduling class SCHED_IDLE: it runs only on cores that are otherwise idle, and is
    preempted at once. A worker of any other class delays a step of the engine by a time slice of 4 ms whenever the
    scheduler gives it its share of a core. If no core is ever idle, a worker that yields makes no progress; then
    `WorkerStarved` is raised.
    """

    def __init__(
        self, vocabulary: Vocabulary, *, yields: bool = False, is_first: bool = False, ending: Event | None = None
    ) -> None:
        """Start a worker and wait until it is ready, which may take long if it yields.

        Args:
            is_first: whether this is the first worker, without which nothing can be compiled. If it does not yield, it
                gets ready at the engine's priority.
            ending: event that ends all waits for the worker with `WorkerDied`; None for no such event.

        Raises:
            WorkerDied: the worker does not start.
        """
        self.yields = yields
        priority = _YIELD if yields else "pass" if is_first else _STEADY
        code = f"{priority}; {_SERVE.format(is_first=is_first and not yields)}"
        super().__init__(code, encode_vocabulary(vocabulary), ending=ending)

    def compile(self, job: bytes, seconds: float) -> bytes:
        """Return the answer to a job. Raises as `run`."""
        return self.run(job, seconds)
