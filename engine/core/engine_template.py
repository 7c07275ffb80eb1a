"""The engine template: a process with the engine imported and the weights loaded, which forks engine processes.

    python -P -m rootgraft.engine.core.engine_template FD PATH OPTIONS

FD: its end of a socketpair of ``SOCK_SEQPACKET``. PATH, OPTIONS: as of ``engine_process``.

It says ``READY`` once all is loaded. Each message then brings the two descriptors of an engine process, and is answered
by that process's number and a descriptor of it. Engine processes share the memory of the weights: nobody writes to it.
It exits when its socket closes, and says nothing where it cannot load: an engine process that is started in the plain
way says why.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from pathlib import Path

from .engine_process import EXIT_SOFTWARE, parse_config, run, set_up_process

READY = b"ready"


def main(arguments: list[str]) -> int:
    """Run the template. Returns its exit code."""
    set_up_process()
    fd, path, options = arguments
    config, end = parse_config(options), socket.socket(fileno=int(fd))
    try:
        from ..executor.worker import load_weights

        weights = load_weights(config, Path(path))
    except Exception:
        return EXIT_SOFTWARE
    if weights is None or _num_threads() > 1:  # a forked process has no other threads, whatever waits for them
        return EXIT_SOFTWARE
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system buries the dead
    gc.collect()
    gc.freeze()
    end.send(READY)
    while True:
        _, fds, _, _ = socket.recv_fds(end, 1, 2)
        if len(fds) != 2:
            return 0
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            end.close()
            os._exit(_leave(run(fds[0], fds[1], config, Path(path), weights)))
        _answer(end, pid)
        for each in fds:
            os.close(each)


def _answer(end: socket.socket, pid: int) -> None:
    """Tell which process was forked; one that has ended by now is none."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        end.send(b"0")
        return
    socket.send_fds(end, [str(pid).encode()], [descriptor])
    os.close(descriptor)


def _leave(code: int) -> int:
    """Write out what was printed, as ``os._exit`` does not."""
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
