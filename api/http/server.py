"""Server process: opens the port, loads the engine process, drains on SIGTERM and determines the exit code.

The port answers from the start: /health and /ready return 503 until the model is loaded. After the first SIGTERM or
SIGINT, running requests may finish within ``--shutdown-timeout``. A second signal cuts them off. A signal that arrives
while engine and stores are being closed ends the process without waiting for them.

SIGHUP makes the server read its models file again. Without such a file, SIGHUP means that the terminal has closed, and
has the same effect as a first SIGTERM.

The exit code is 0 if every request was finished, 1 if responses were cut off, and 70 if the engine or the event loop
has ended or hangs, so that a supervisor restarts the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import uvloop

from ...engine import process_memory
from ...engine.config import EngineConfig
from ...engine.end_limit import EndLimit
from ...engine.errors import ConfigError
from ...engine.metric_tables import kv_usage
from ...engine.sandbox.program_pool import POOL
from ...engine.serving.engine_spawn import SpawnEngine
from ..config import ServerConfig
from ..gateways.main_supervisor import GatewaySupervisor
from ..generate.server_state import ServerState
from ..models_file import ModelEntry, ServedModel
from ..observe.log import set_up_log
from .app import create_app
from .http_server import HttpServer
from .listener import Listener, listening, private_socket, remove_socket
from .loop_watch import LoopWatch
from .model_services import ModelReader, ModelServices
from .run_record import RunRecord, RunRecordFile, run_folder
from .systemd_notify import notify
from .tls import RenewableContext, refresh_certificates, tls_context

EXIT_CUT_OFF = 1
EXIT_ENGINE_DEAD = 70
CLOSE_SECONDS = 25.0
"""Seconds that engines, gateways, stores and threads have to end after the last request has ended."""
_WATCH_SECONDS = 0.1

logger = logging.getLogger("rootgraft.server")


def serve(config: EngineConfig, options: ServerConfig) -> int:
    """Serve one model. Returns the exit code. Raises like ``serve_models``."""
    model = ServedModel(ModelEntry(), config, options)
    return serve_models([model], lambda: [model])


def serve_models(models: Sequence[ServedModel], read_again: ModelReader, spawn: SpawnEngine | None = None) -> int:
    """Serve models until a signal arrives or an engine ends. Returns the exit code.

    Args:
        models: at least one model; all of them have the same options of the whole server.
        read_again: called at SIGHUP; reads the models file again and returns its models.
        spawn: starts the engine process of a model that has only one; None for ``spawn_engine``.

    Raises:
        ConfigError: the port is in use; a certificate, the file with keys or a store cannot be used; an option does not
            fit the model; OpenTelemetry is missing.
        ModelError: the model cannot be loaded.
        EngineDead: the engine ended while it was loading.
    """
    options = models[0].server
    if options.gateways > 1 and models[0].entry.options is not None:
        raise ConfigError("--gateways can serve only one base model: remove it, or the list of models.")
    process_memory.share_heap()
    process_memory.freeze_at_exit()
    set_up_log(options.log_level, options.log_format, log_requests=options.log_requests)
    tls = tls_context(options)
    with (
        listening(options) as listener,
        private_socket() if options.gateways > 1 else contextlib.nullcontext() as private,
        contextlib.ExitStack() as limits,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_serve_on(listener, tls, models, read_again, private, spawn, limits))


async def _serve_on(
    listener: Listener,
    tls: RenewableContext | None,
    models: Sequence[ServedModel],
    read_again: ModelReader,
    private: tuple[socket.socket, str] | None,
    spawn: SpawnEngine | None,
    limits: contextlib.ExitStack,
) -> int:
    service = _Service(listener, tls, models, read_again, private, spawn)
    watch = LoopWatch(service.kill)
    try:
        return await service.run(limits)
    finally:
        watch.close()


class _Service:
    """One run of the server, from the open port to its exit code."""

    def __init__(
        self,
        listener: Listener,
        tls: RenewableContext | None,
        models: Sequence[ServedModel],
        read_again: ModelReader,
        private: tuple[socket.socket, str] | None,
        spawn: SpawnEngine | None,
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._options: ServerConfig = models[0].server
        self._state = ServerState.open(self._options, _version())
        self._models = ModelServices(models, self._state, read_again, spawn)
        self._may_reload = models[0].entry.options is not None
        self._gateways: GatewaySupervisor | None = None
        self._http_socket = listener.socket
        # The gateways listen on the public port with their own TLS contexts, and this process listens on a private
        # socket.
        if private is not None:
            tls, (self._http_socket, path) = None, private
            self._gateways = GatewaySupervisor(
                self._options.gateways, listener.socket, self._state, models[0].engine, path
            )
            self._state.observers.gateways = self._gateways.status
        most = self._options.max_request_bytes
        self._http = HttpServer(create_app(self._models.router), tls, self._state, max_message_bytes=most)
        self._signalled = asyncio.Event()
        self._closing = False
        self._is_loaded = False
        self._reloads = False  # Whether a SIGHUP arrived while the models were being loaded.
        self._code = 0
        self._record = RunRecordFile(run_folder())

    async def run(self, limits: contextlib.ExitStack) -> int:
        """Load, serve, drain and close. Returns the exit code.

        Args:
            limits: exit stack that holds the time limit for closing; the caller closes it after the event loop has
                ended.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        # Under nohup, SIGHUP is ignored and must stay ignored.
        if self._may_reload or signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._on_hangup)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        self._write_record()
        http = asyncio.create_task(self._http.serve([self._http_socket]))
        end = asyncio.create_task(self._signalled.wait())
        load = asyncio.create_task(self._load())
        renewal = asyncio.create_task(self._renew_certificates())
        try:
            if self._gateways is not None:
                await self._gateways.start()
            await asyncio.wait((load, end), return_when=asyncio.FIRST_COMPLETED)
            if load.done():
                load.result()
                self._is_loaded = True
                if self._reloads:
                    self._models.begin_reload()
                self._code = await self._watch()
            return self._code
        finally:
            others = (load, end, renewal)
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._close(http, limits)

    def _on_hangup(self) -> None:
        """Handle SIGHUP: reload the models file, after the models are loaded; without such a file, drain and end."""
        if self._state.engine.draining:
            return
        if not self._may_reload:
            self._on_signal()
        elif self._is_loaded:
            self._models.begin_reload()
        else:
            self._reloads = True

    def _on_signal(self) -> None:
        if self._closing:
            self._end_at_once()
        if self._state.engine.draining:
            logger.warning("second signal: ending at once")
            self._http.force_exit = True
        else:
            logger.info("%s", _ending(self._num_active, self._options.shutdown_timeout))
        self._models.drain()
        if self._gateways is not None:
            self._gateways.drain()
        notify("STOPPING=1")
        if self._state.stores.batches is not None:
            self._state.stores.batches.stop()
        self._models.stop_downloads()
        self._signalled.set()

    def _end_at_once(self) -> None:
        """End the process without waiting, because another signal has arrived while the server was closing."""
        logger.warning("second signal: exiting without waiting for connections to close")
        self.kill()
        remove_socket(self._listener)
        logging.shutdown()
        os._exit(self._code)

    def kill(self) -> None:
        """Kill the engines and gateways, and remove the run record of this server."""
        self._models.kill()
        if self._gateways is not None:
            self._gateways.kill()
        self._record.remove()

    async def _renew_certificates(self) -> None:
        if self._tls is not None and self._options.enable_ssl_refresh:
            await refresh_certificates(self._tls, self._options)

    async def _load(self) -> None:
        count = len(self._models.served)
        what = "the model" if count == 1 else f"{count} models"
        logger.info("listening on %s; loading %s", self._listener.place, what)
        await self._models.load(self._write_record)
        process_memory.freeze()
        if self._gateways is not None:
            await self._gateways.serve(*self._models.loaded_model())
        state = self._state
        if state.stores.batches is not None and state.stores.internal_client is not None:
            state.stores.batches.resume(state.stores.internal_client)
        names = [name for each in self._models.router.states for name in each.models.names]
        url = self._listener.url
        page = f"; live page: {url}/ui" if url.startswith("http") else ""
        logger.info("ready: %s at %s/v1%s", ", ".join(names), url, page)
        notify("READY=1")

    async def _watch(self) -> int:
        """Wait until the server is drained after a signal, or until an engine has ended. Returns the exit code."""
        loop = asyncio.get_running_loop()
        deadline = float("inf")
        models = self._models
        while models.sick is None and not self._http.force_exit:
            self._write_record()
            if self._state.engine.draining:
                deadline = min(deadline, loop.time() + self._options.shutdown_timeout)
                if not self._num_active or loop.time() >= deadline:
                    break
            await asyncio.sleep(_WATCH_SECONDS)
        if (sick := models.sick) is None:
            if num_active := self._num_active:
                logger.warning("cutting off %s", _requests(num_active))
            return EXIT_CUT_OFF if num_active else 0
        logger.error("%s The server ends.", sick.engine.death())
        models.kill()
        return EXIT_ENGINE_DEAD

    @property
    def _num_active(self) -> int:
        """Number of requests that are being answered by this process or by gateways."""
        return self._models.num_active + (0 if self._gateways is None else self._gateways.num_active)

    def _write_record(self) -> None:
        served = self._models.served
        states = [service.state for service in served]
        stats = [state.stats() for state in states]
        is_loaded = all(state.engine.async_engine is not None for state in states)
        self._record.write(
            RunRecord(
                os.getpid(),
                self._record.started,
                self._listener.url,
                tuple(name for state in states for name in state.models.names) if is_loaded else (),
                sum(len(state.models.adapters) for state in states),
                "draining" if self._state.engine.draining else "ready" if is_loaded else "loading",
                sum(int(each.get("running", 0)) for each in stats),
                sum(int(each.get("waiting", 0)) for each in stats),
                round(max(map(kv_usage, stats)), 2),
                self._state.version,
                served[0].path,
                tuple(service.path for service in served[1:]),
            )
        )

    async def _close(self, http: asyncio.Task[None], limits: contextlib.ExitStack) -> None:
        """Close the engines, so that their streams end with an error, and then the HTTP server and its stores."""
        self._closing = True
        limit = EndLimit(CLOSE_SECONDS, self._code, "What the server closes")
        limits.callback(limit.cancel)
        self._models.drain()
        if self._state.stores.batches is not None:
            await self._state.stores.batches.close()
        if self._gateways is not None:
            await self._gateways.close("The server is shutting down.")
        await self._models.close_engines("The server is shutting down.")
        self._http.should_exit = True
        await http
        self._record.remove()
        await self._models.close_files()
        if self._state.stores.ledger is not None:
            await self._state.stores.ledger.close()
        if self._state.observers.tracer is not None:
            await asyncio.to_thread(self._state.observers.tracer.close)
        await asyncio.to_thread(POOL.close)


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _ending(num_active: int, timeout: float) -> str:
    """Return the log message for the first signal."""
    if not num_active:
        return "ending: no request runs"
    return f"finishing {_requests(num_active)}, for at most {timeout:g} s; a second signal aborts them"


def _version() -> str:
    try:
        return version("rootgraft")
    except PackageNotFoundError:
        return "unknown"
