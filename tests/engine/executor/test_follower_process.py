"""A follower ends with rank 0, also where that has ended before the follower has begun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from support.machine.waits import HANG_SECONDS


def test_a_follower_whose_parent_is_gone_ends() -> None:
    """And does not wait for what rank 0 tells it, whose end of the links may live on in another process."""
    links = [socket.socketpair() for _ in range(2)]
    numbers = [link.fileno() for _, link in links]
    command = [sys.executable, "-P", "-m", "rootgraft.engine.executor.follower_process", *map(str, numbers)]
    other = str(os.getppid())  # not the process that starts it
    done = subprocess.run([*command, other, "0"], pass_fds=numbers, timeout=HANG_SECONDS, check=False)
    for pair in links:
        for link in pair:
            link.close()
    assert done.returncode == 0


def test_a_follower_can_end_before_it_has_imported_torch() -> None:
    """Which takes seconds of a busy machine, in which it would not hear that rank 0 is gone."""
    code = "import sys; from rootgraft.engine.executor import follower_process; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
