"""Fork server: a process that has imported and loaded what others need, and from which these are forked.

    ForkServer --two descriptors--> serve_forks --fork--> run(descriptors)
               <--number, descriptor of the process--

The two sides share a socketpair of ``SOCK_SEQPACKET``. The process says ``READY`` once all is loaded. Each message then
brings the descriptors of a process to fork, and is answered by that process's number and a descriptor of it. What was
loaded is in memory once. When its socket closes the process that needs the others is gone: it waits for these to end by
themselves, kills those that do not, and exits.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ...grammar.parent_death import outlive_parent

ORPHAN_SECONDS = 3.0
"""For forked processes to end by themselves when the process that needs them is gone."""
FORK_SECONDS = 5.0
"""For the process to answer: it does nothing else."""
READY = b"ready"
NUM_DESCRIPTORS = 2
EXIT_UNABLE = 70
"""Exit code of one from which nothing can be forked."""

logger = logging.getLogger("rootgraft.fleet")


class ForkedProcess:
    """A process that is no child of this one. Its exit status is not known."""

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
            raise subprocess.TimeoutExpired("forked process", timeout or 0.0)
        os.close(self._descriptor)
        self._descriptor = None


class ForkServer:
    """The side of who needs the processes. Belongs to one event loop.

    Args:
        module: name of the module to run, which ends in ``serve_forks``. It is given the number of its socket, this
            process's, and then ``arguments``.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._is_possible = hasattr(os, "pidfd_open")

    async def start(self) -> None:
        """Start the process and wait until it is ready. Does nothing if it runs, or has said that it is unable."""
        async with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.close()
            if self._is_possible and self._socket is None:
                await self._start()

    def fork(self, descriptors: Sequence[int]) -> ForkedProcess | None:
        """Fork a process with these ``NUM_DESCRIPTORS`` descriptors; None if there is nothing to fork from."""
        if self._socket is None:
            return None
        try:
            socket.send_fds(self._socket, [b"."], descriptors)
            answer, own, _, _ = socket.recv_fds(self._socket, 32, 1)
        except OSError as error:
            logger.warning("the process that others are forked from is given up: %s", error)
            self.close()
            return None
        return ForkedProcess(int(answer), own[0]) if own else None

    def close(self) -> None:
        """End the process; ``start`` starts another one. Those that were forked run on."""
        # Killed before the socket ends, whose end it takes for that of the process that needs the others.
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = (str(theirs.fileno()), str(os.getpid()), *self._arguments)
            command = [sys.executable, "-P", "-m", self._module, *words]
            # numpy would start threads as it is imported, which no forked process has.
            environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment
            )
        self._socket = ours
        ours.setblocking(False)
        try:
            said = await asyncio.get_running_loop().sock_recv(ours, len(READY))
        except BaseException:
            self.close()
            raise
        if not said:
            self._is_possible = False
            self.close()
            return
        ours.settimeout(FORK_SECONDS)


def serve_forks(end: socket.socket, run: Callable[[int, int], int]) -> int:
    """Fork processes until the socket closes. Returns the exit code.

    Args:
        end: the socket.
        run: called in each forked process with its descriptors; returns its exit code.
    """
    # A forked process has no other threads, and whatever waits for one would hang.
    if len(os.listdir("/proc/self/task")) > 1:
        return EXIT_UNABLE
    # The system reaps the forked processes.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    # The end of the socket tells the parent of this process's death.
    outlive_parent()
    end.send(READY)
    forked: list[int] = []
    while True:
        descriptors = _next_descriptors(end)
        forked = _running(forked)
        if len(descriptors) != NUM_DESCRIPTORS:
            _end_all(forked)
            return 0
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end.close()
            for each in forked:
                os.close(each)
            os._exit(_leave(run(*descriptors)))
        forked += _answer(end, pid)
        for each in descriptors:
            os.close(each)


def _next_descriptors(end: socket.socket) -> list[int]:
    """Return the descriptors of the next process to fork; none at the socket's end."""
    try:
        _, descriptors, _, _ = socket.recv_fds(end, 1, NUM_DESCRIPTORS)
    except OSError:
        return []
    return list(descriptors)


def _answer(end: socket.socket, pid: int) -> list[int]:
    """Tell which process was forked; one that has ended by now is none. Returns its descriptor."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        end.send(b"0")
        return []
    # The next message shows that the other side is gone.
    with suppress(OSError):
        socket.send_fds(end, [str(pid).encode()], [descriptor])
    return [descriptor]


def _running(forked: list[int], seconds: float = 0.0) -> list[int]:
    """Return the processes of these that run, and close the descriptors of the others.

    Args:
        seconds: seconds to wait until none of the processes runs.
    """
    until = time.monotonic() + seconds
    while forked:
        poll = select.poll()
        for each in forked:
            poll.register(each, select.POLLIN)
        ended = {each for each, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000)}
        for each in ended:
            os.close(each)
        forked = [each for each in forked if each not in ended]
        if not ended:
            break
    return forked


def _end_all(forked: list[int]) -> None:
    """Wait for processes to end, and kill those that do not."""
    for each in _running(forked, ORPHAN_SECONDS):
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(each, signal.SIGKILL)


def _leave(code: int) -> int:
    """Write out what was printed, as ``os._exit`` does not."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    return code
