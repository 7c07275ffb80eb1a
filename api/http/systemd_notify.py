"""systemd notification: a service of ``Type=notify`` counts as started when the model is loaded.

With ``WatchdogSec``, systemd restarts the service if it gives no sign of life.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def notify(state: str) -> None:
    """Send a state such as ``READY=1`` or ``STOPPING=1`` to the socket in ``NOTIFY_SOCKET``, if the variable is set."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(state.encode(), address.replace("@", "\0", 1) if address[0] == "@" else address)


def notify_watchdog() -> None:
    """Send a sign of life to systemd if the service has ``WatchdogSec``."""
    if os.environ.get("WATCHDOG_USEC") and os.environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
        notify("WATCHDOG=1")
