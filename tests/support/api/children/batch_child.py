"""A server with files and batches in a process of its own, to be killed: ``batch_child.py FOLDER ASKED [MOST]``.

Each request that reaches the engine adds its text as a line to ASKED. As the last of MOST arrives, it stops, as by
SIGSTOP: whoever kills it meanwhile finds it in the middle.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import Any

from rootgraft.api.batches.batch_service import BatchService
from rootgraft.api.config import ServerConfig
from support.api.api_live import make_state, serve


def main(folder: str, asked: str, most: str = "0") -> None:
    left = int(most)
    state: Any = make_state(ServerConfig(batch_dir=folder))
    state.stores.batches = BatchService(Path(folder), 1 << 30, state.limits.caller_named)

    def say(request: Any, index: int) -> str:
        nonlocal left
        with open(asked, "a") as file:
            file.write(bytes(token for token in request.tokens if token < 256).decode().split("\n")[0] + "\n")
        left -= 1
        if left == 0:
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # this thread, so at once
        return "answer" * 4

    state.engine.async_engine.say = say
    for live in serve(state):
        live.loop.call_soon_threadsafe(state.stores.batches.resume, state.stores.internal_client)
        print(live.url, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
