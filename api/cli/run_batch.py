"""``rootgraft run-batch``: answers a file of requests with a running server or with a new engine."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import uvloop
from tqdm import tqdm

from ...engine.config import EngineConfig
from ...engine.errors import ConfigError, EngineDead
from ...grammar.parent_death import end_with_parent
from ..batches.batch_files import BatchOutput, BatchRequest, BatchResponse, answer_line, read_requests
from ..batches.batch_work import answer_all
from ..config import ServerConfig
from .options import RemoteOptions, RunBatchOptions
from .remote_server import RemoteError, RemoteServer

_POLL_SECONDS = 0.1  # seconds between two checks of an engine that is starting
_STOP_SECONDS = 20.0  # seconds within which the server must end


def run_batch(options: RunBatchOptions, engine: EngineConfig) -> int:
    """Answer the requests that have no answer in the output file. Returns 0 if all answers are successes, else 1.

    Raises:
        ConfigError: a line of the input is not a valid request, or a file cannot be used.
        RemoteError: the connection is lost; the output has the answers so far, and the same command resumes.
    """
    if options.url is not None and engine != EngineConfig():
        raise ConfigError("--url uses a running server: engine options cannot be used with it.")
    source, target = Path(options.input_file), Path(options.output_file)
    if source.exists() and target.exists() and source.samefile(target):
        raise ConfigError(f"--output-file {target} is the input file: name another file for the answers.")
    total = sum(1 for _ in read_requests(source))
    with BatchOutput(target) as output:
        before = len(output.done)
        if any(request.custom_id not in output.done for request in read_requests(source)):
            uvloop.run(_run(engine, options, output, total))
        print(
            f"{total} requests: {len(output.done) - before} answered in this run, {before} in earlier runs; "
            f"{output.failed} failed"
        )
        return 1 if output.failed else 0


async def _run(engine: EngineConfig, options: RunBatchOptions, output: BatchOutput, total: int) -> None:
    with contextlib.ExitStack() as stack:
        remote, uds = RemoteOptions(options.url or "http://localhost", options.api_key), None
        if options.url is None:
            uds = stack.enter_context(_own_server(engine))
        bar = stack.enter_context(
            tqdm(total=total, initial=len(output.done), unit="req", disable=not sys.stderr.isatty())
        )
        async with _connected(remote, uds) as server:
            requests = read_requests(Path(options.input_file))
            remaining = (request for request in requests if request.custom_id not in output.done)

            async def next_request() -> BatchRequest | None:
                return next(remaining, None)

            async def keep(request: BatchRequest, response: BatchResponse) -> None:
                output.add(request, response, answer_line(request, response))
                bar.update()

            work = answer_all(
                lambda request: server.post(request.url.removeprefix("/v1/"), request.body),
                next_request,
                keep,
                concurrency=options.max_concurrency,
                fields={"model": server.model},
            )
            await _while_it_answers(server, work)


async def _while_it_answers(server: RemoteServer, work: Coroutine[Any, Any, None]) -> None:
    """Run the work, but raise RemoteError as soon as the server no longer answers."""
    working, watching = asyncio.create_task(work), asyncio.create_task(server.watch())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        (working if working.done() else watching).result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


@contextlib.asynccontextmanager
async def _connected(options: RemoteOptions, uds: str | None) -> AsyncIterator[RemoteServer]:
    """Context manager: connect to a server. With a Unix domain socket, retry until the server has loaded its model."""
    while uds is not None:
        try:
            async with RemoteServer.connect(options, uds=uds):
                break
        except RemoteError:
            _check_server_runs()
            await asyncio.sleep(_POLL_SECONDS)
    async with RemoteServer.connect(options, uds=uds) as server:
        yield server


def _check_server_runs() -> None:
    if not multiprocessing.active_children():
        raise EngineDead("The engine could not be started.")


@contextlib.contextmanager
def _own_server(engine: EngineConfig) -> Iterator[str]:
    """Context manager: run a server in a child process. Yields its Unix domain socket, in a folder of this user only.

    A free port could be taken by another program while the server starts, and that program would get the requests.
    """
    with tempfile.TemporaryDirectory(prefix="rootgraft-") as folder:
        uds = f"{folder}/socket"
        options = ServerConfig(uds=uds, log_level="warning")
        process = multiprocessing.get_context("spawn").Process(target=_serve, args=(engine, options, os.getpid()))
        process.start()
        try:
            yield uds
        finally:
            process.terminate()
            process.join(_STOP_SECONDS)
            # A stopped or hanging process does not end by itself.
            process.kill()
            process.join()


def _serve(engine: EngineConfig, options: ServerConfig, parent: int) -> None:
    end_with_parent(parent)
    from ..http.server import serve

    sys.exit(serve(engine, options))
