"""Fork server: a process that has imported modules and loaded data once, and from which other processes are forked.

    ForkServer --two descriptors--> serve_forks --fork--> run(descriptors)
               <--number, descriptor of the process--

The two sides share a socketpair of ``SOCK_SEQPACKET``. The server process sends ``READY`` when all is loaded. Each
message to the server process contains the descriptors for one process to fork. The answer is the id of the forked
process and a descriptor (pidfd) of it. All forked processes share the memory of the loaded data. When the process that
uses the forked processes ends, the socket closes. Then the server process waits for the forked processes to end, kills
those that do not end in time, and exits.
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
"""Seconds that forked processes have to end by themselves after the process that uses them has ended."""
FORK_SECONDS = 5.0
"""Seconds that the server process has to answer. It has no other work, so it normally answers at once."""
READY = b"ready"
NUM_DESCRIPTORS = 2
EXIT_UNABLE = 70
"""Exit code of a server process that cannot fork; the caller then starts processes directly."""

logger = logging.getLogger("rootgraft.fleet")


class ForkedProcess:
    """A process that is not a child of this process, so its exit status is not known."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor: int | None = descriptor

    def kill(self) -> None:
        """Kill the process. Does nothing if it has ended."""
        if self._descriptor is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the process. Raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        if self._descriptor is None:
            return
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise subprocess.TimeoutExpired("forked process", timeout or 0.0)
        os.close(self._descriptor)
        self._descriptor = None


class ForkServer:
    """Client of a server process that forks other processes. Belongs to one event loop.

    Args:
        module: name of the module that the server process runs. The module must end with a call of ``serve_forks``. Its
            command-line arguments are the descriptor of its socket, the id of this process, and ``arguments``.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._module = module
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._lock = asyncio.Lock()
        self._is_possible = hasattr(os, "pidfd_open")

    async def start(self) -> None:
        """Start the server process and wait until it is ready.

        Does nothing if it runs, or if it has reported that it cannot fork.
        """
        async with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.close()
            if self._is_possible and self._socket is None:
                await self._start()

    def fork(self, descriptors: Sequence[int]) -> ForkedProcess | None:
        """Fork a process that inherits ``NUM_DESCRIPTORS`` descriptors. Returns None if no server process runs."""
        if self._socket is None:
            return None
        try:
            socket.send_fds(self._socket, [b"."], descriptors)
            answer, own, _, _ = socket.recv_fds(self._socket, 32, 1)
        except OSError as error:
            logger.warning("the process that others are forked from has failed and is not used any more: %s", error)
            self.close()
            return None
        return ForkedProcess(int(answer), own[0]) if own else None

    def close(self) -> None:
        """End the server process; ``start`` starts another one. The forked processes continue."""
        # The process is killed before the socket closes. Otherwise the process would end the forked processes when it
        # sees the socket close.
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
            # This setting keeps numpy from starting threads at import, because threads do not exist in a forked
            # process.
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
    """Fork processes until the socket closes. Returns the exit code of the server process.

    Args:
        end: the server process's end of the socket.
        run: called in each forked process with its descriptors; returns the exit code of that process.
    """
    # A fork copies only the calling thread. Code in the forked process that waits for another thread would hang.
    if len(os.listdir("/proc/self/task")) > 1:
        return EXIT_UNABLE
    # With this setting, the kernel reaps forked processes that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()
    # This process may outlive its parent, because the closed socket tells it that the parent has ended.
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
    """Return the descriptors for the next process to fork; empty if the socket has closed."""
    try:
        _, descriptors, _, _ = socket.recv_fds(end, 1, NUM_DESCRIPTORS)
    except OSError:
        return []
    return list(descriptors)


def _answer(end: socket.socket, pid: int) -> list[int]:
    """Send the id and the descriptor of the forked process.

    Returns the descriptor in a list, which is empty if the process has ended.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        end.send(b"0")
        return []
    # An error is ignored here: if the other side is gone, the next read shows that.
    with suppress(OSError):
        socket.send_fds(end, [str(pid).encode()], [descriptor])
    return [descriptor]


def _running(forked: list[int], seconds: float = 0.0) -> list[int]:
    """Return the descriptors of the processes that still run, and close the descriptors of the others.

    Args:
        seconds: longest time in seconds to wait for the end of all processes.
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
    """Wait for the processes to end, and kill those that do not end within ``ORPHAN_SECONDS``."""
    for each in _running(forked, ORPHAN_SECONDS):
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(each, signal.SIGKILL)


def _leave(code: int) -> int:
    """Flush the output streams, which ``os._exit`` does not do, and return ``code``."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    return code
