"""``rootgraft run``: downloads a model, serves it for the duration of the chat, and chats with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ....engine.errors import EngineError
from ....grammar.parent_death import end_with_parent
from ...http.run_record import RunRecord, running_servers
from ..options import ChatOptions, RemoteOptions, RunOptions, SamplingOptions
from ..pull import fetch_model
from ..terminal import in_terminal, print_dim
from .chat_command import hold_chat
from .question_input import state_folder

_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_TO_END = 20.0
_MOST_LOG_BYTES = 4096


class ServerStartError(EngineError):
    """The server of ``rootgraft run`` ended before it was ready."""


def run(options: RunOptions, sampling: SamplingOptions, answers: ChatOptions) -> int:
    """Chat with a model, on one of the user's running servers if it serves the model, else on a new server.

    Returns the exit code of the chat.

    Raises:
        ModelError: the model does not exist, or cannot be downloaded.
        ServerStartError: the model cannot be served; the message is the server's.
    """
    path = os.path.realpath(fetch_model(options.model, options.revision).path)
    served = [each for each in running_servers({os.getuid()}) if each.status == "ready" and path == each.path]
    if served:
        if in_terminal():
            print_dim(f"Using a running server that has the model; it keeps running after this chat: {served[0].url}")
        return _talk(served[0], sampling, answers)
    with _own_server(options) as record:
        return _talk(record, sampling, answers)


def _talk(server: RunRecord, sampling: SamplingOptions, answers: ChatOptions) -> int:
    return hold_chat(RemoteOptions(f"{server.url}/v1", model=server.models[0]), sampling, answers, "rootgraft run")


@contextmanager
def _own_server(options: RunOptions) -> Iterator[RunRecord]:
    """Context manager: start a server on a free port of this machine, and wait until it is ready."""
    command = [sys.executable, "-m", "rootgraft", "serve", "--port", "0"]
    command += [] if options.model is None else ["--model", options.model]
    command += [] if options.revision is None else ["--revision", options.revision]
    with _log_file() as log:
        if in_terminal():
            print_dim(f"Loading the model ... Ctrl-C cancels. The server's log: {log.name}")
        # The server has its own process group, so that Ctrl-C stops an answer and not the server.
        ends_with_this = partial(end_with_parent, os.getpid())
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0, preexec_fn=ends_with_this
        )
        try:
            yield _ready(server, log)
        finally:
            server.terminate()
            try:
                server.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _ready(server: subprocess.Popen[bytes], log: BinaryIO) -> RunRecord:
    """Return the server's record once the server is ready. Raises ServerStartError if the server ends before that."""
    while server.poll() is None:
        for record in running_servers({os.getuid()}):
            if record.pid == server.pid and record.status == "ready":
                return record
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    log.seek(max(0, log.seek(0, os.SEEK_END) - _MOST_LOG_BYTES))
    lines = log.read().decode(errors="replace").strip().splitlines()
    last = lines[-1].removeprefix("rootgraft serve: ") if lines else f"the server exited with code {server.returncode}."
    raise ServerStartError(f"{last} The server's log: {log.name}")


@contextmanager
def _log_file() -> Iterator[BinaryIO]:
    """Context manager: open the log file of the server, emptied for each run.

    Raises OSError if it cannot be written.
    """
    path: Path = state_folder() / "run.log"
    with open(path, "w+b", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as log:
        yield log
