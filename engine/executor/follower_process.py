"""The process of a follower: a rank other than rank 0, which computes its part of the steps that rank 0 sends.

    python -P -m rootgraft.engine.executor.follower_process FD LIFE PAGES PARENT ENGINE

FD: file descriptor of the link for messages; the first line on it is JSON with the rank and its options.
LIFE: file descriptor of the link for signs of life.
PAGES: file descriptor of the link on which rank 0 reads this rank's parts of pages of KV.
PARENT: process id of rank 0.
ENGINE: process id of rank 0 if it is an engine's process, which this process may kill; else 0.

The process ends when rank 0 ends, whatever it is doing. It kills rank 0 if rank 0 gives no sign of life. Exit codes: 0
after END or when rank 0 is gone, 70 after an error.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...grammar.parent_death import end_with_parent
from ..config import config_of_json
from ..error_stream import write_last_line
from ..errors import EngineError
from .rank_link import SignsOfLife, read_line, receive
from .rank_messages import Kind, RankMessage, unpack_batch, unpack_numbers

if TYPE_CHECKING:
    from .rank_pages import PageServer
    from .rank_workers import FollowWorker

EXIT_SOFTWARE = 70


def main(arguments: list[str]) -> int:
    """Run a follower. Returns its exit code."""
    *links, parent, engine = map(int, arguments)
    end_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    link, life, pages = (socket.socket(fileno=each) for each in links)
    signs = SignsOfLife({0: life}, {0: parent}, lambda _, reason: _end_all(engine, reason))
    try:
        return _run(link, signs, pages)
    except ConnectionError:
        return 0
    except Exception:
        write_last_line(traceback.format_exc())
        return EXIT_SOFTWARE


def _run(link: socket.socket, signs: SignsOfLife, pages: socket.socket) -> int:
    hello: dict[str, Any] = json.loads(read_line(link))
    from ...kernels.collectives import ProcessGroup
    from .followers import COLLECTIVE_SECONDS
    from .rank_workers import FollowWorker
    from .tensor_parallel import identity, rank_device

    path = Path(hello["path"])
    try:
        device = rank_device(hello["device"])
        difference = _difference(hello["identity"], identity(config_of_json(hello["config"]), path))
    except EngineError as error:
        difference = f"cannot start: {' '.join(str(error).split())}"
    link.sendall(f"{difference or 'ready'}\n".encode())
    if difference:
        return 0
    signs.started()
    config, store = config_of_json(hello["config"]), Path(hello["store"])
    width = config.tensor_parallel_size
    group = ProcessGroup(hello["rank"], hello["size"], store, device, COLLECTIVE_SECONDS, width)
    try:
        worker = FollowWorker(config, path, group)
    except EngineError as error:
        link.sendall(f"Rank {hello['rank']} of {hello['size']}: {' '.join(str(error).split())}\n".encode())
        return EXIT_SOFTWARE
    serve(worker, link, worker.serve_pages(pages))
    os._exit(0)  # nothing is left to do, and an orderly end of the interpreter takes a second


def serve(worker: FollowWorker, link: socket.socket, pages: PageServer) -> None:
    """Process the messages of rank 0 in order, until END.

    Raises:
        ConnectionError: rank 0 is gone.
        ValueError: a message is not the next one in order, so this rank would compute another step than the others.
    """
    number = 0
    while True:
        message = receive(link, number)
        number = message.number
        if message.kind is Kind.END:
            return
        _do(worker, message)
        pages.done(number)


def _do(worker: FollowWorker, message: RankMessage) -> None:
    if message.kind is Kind.STEP:
        worker.follow_step(unpack_batch(message.content))
    elif message.kind in (Kind.LOGITS, Kind.BEST):
        worker.follow_head(unpack_numbers(message.content), best=message.kind is Kind.BEST)
    elif message.kind is Kind.INSTALL:
        worker.follow_install(message.content)
    elif message.kind is Kind.CLEAR:
        worker.follow_clear(*unpack_numbers(message.content))
    elif message.kind is Kind.LOAD:
        worker.follow_load(unpack_batch(message.content))


def _difference(expected: list[str], found: list[str]) -> str:
    """Return how this rank's program or files differ from those of rank 0, "" if they are the same."""
    for theirs, ours in zip(expected, found, strict=True):
        if theirs != ours:
            return f"has {ours} where rank 0 has {theirs}"
    return ""


def _end_all(engine: int, reason: str) -> None:
    """End this process because rank 0 is silent or gone; kill rank 0 too if it is the engine process ``engine``."""
    write_last_line(f"Rank 0 {reason}: ending all ranks")
    with suppress(ProcessLookupError):
        if os.getppid() == engine:
            os.kill(engine, signal.SIGKILL)
    os._exit(EXIT_SOFTWARE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
