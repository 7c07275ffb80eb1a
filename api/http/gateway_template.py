"""The gateway template: a process with a gateway's modules imported, which forks gateways for ``ForkedGateways``.

    python -P -m rootgraft.api.http.gateway_template FD

FD: its end of a ``ForkServer``. It has no options, no model and no thread.
"""

from __future__ import annotations

import socket
import sys

from ...engine.serving.fork_server import serve_forks
from .gateway_process import run, set_up_process

if __name__ == "__main__":
    set_up_process()
    sys.exit(serve_forks(socket.socket(fileno=int(sys.argv[1])), run))
