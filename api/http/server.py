"""The server process: opens the port, loads the engine process, drains on SIGTERM and sets the exit code.

The port answers from the start: /health and /ready return 503 until the model is loaded. After the first SIGTERM or
SIGINT running requests may finish within ``--shutdown-timeout``; the second one cuts them off, and one that comes while
engine and stores are being closed ends the process without waiting for them. The exit code
is 0 if every request was finished, 1 if answers were cut off, and 70 when the engine ends or hangs, so that a
supervisor restarts the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from ...engine import process_memory
from ...engine.checkpoint.locate import resolve_model
from ...engine.config import EngineConfig
from ...engine.errors import ConfigError, EngineDead
from ...engine.serving.async_engine import AsyncEngine
from ...engine.serving.engine_client import EngineClient
from ...engine.serving.engine_like import EngineLike
from ...engine.serving.sampling_defaults import read_sampling_defaults
from ...engine.text.tokenizer import Tokenizer
from ..config import ServerConfig
from ..generate.remote_adapters import RemoteAdapters
from ..generate.server_state import ServerState
from ..observe.engine_collector import kv_usage
from ..observe.engine_facts import EngineFacts
from ..observe.log import set_up_log
from .app import create_app
from .connection import uvicorn_options
from .listener import Listener, listening, remove_socket
from .run_record import RunRecord, RunRecordFile, run_folder, started_at
from .systemd_notify import notify
from .tls import RenewableContext, refresh_certificates, tls_context

if TYPE_CHECKING:
    from ...engine.adapter_sources.adapter_fetcher import AdapterFetcher

EXIT_CUT_OFF = 1
EXIT_ENGINE_DEAD = 70
_WATCH_SECONDS = 0.1
_FLUSH_SECONDS = 2
_FETCHER_SECONDS = 10.0  # for the fetcher of adapters to close in

logger = logging.getLogger("rootgraft.server")


def serve(config: EngineConfig, options: ServerConfig) -> int:
    """Serve until a signal or the engine's death. Returns the exit code.

    Raises:
        ConfigError: the port is taken, a certificate, the file with keys or a store cannot be used, an option does not
            fit the model, OpenTelemetry is missing.
        ModelError: the model cannot be loaded.
        EngineDead: the engine ended while it was loading.
    """
    process_memory.share_heap()
    set_up_log(options.log_level, options.log_format)
    tls = tls_context(options)
    with listening(options) as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve_on(listener, tls, config, options))


async def _serve_on(
    listener: Listener, tls: RenewableContext | None, config: EngineConfig, options: ServerConfig
) -> int:
    return await _Service(listener, tls, config, options).run()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers: ``_Service`` decides when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Service:
    """One run of the server, from the open port to its exit code."""

    def __init__(
        self, listener: Listener, tls: RenewableContext | None, config: EngineConfig, options: ServerConfig
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._config = config
        self._options = options
        self._fetcher = _open_fetcher(config) if config.enable_lora else None
        self._state = ServerState.open(options, _version())
        settings = uvicorn.Config(
            create_app(self._state), **uvicorn_options(), timeout_graceful_shutdown=_FLUSH_SECONDS
        )
        settings.load()
        settings.ssl = tls
        self._http = _Uvicorn(settings)
        self._signalled = asyncio.Event()
        self._closing = False
        self._code = 0
        self._path = ""
        self._record = RunRecordFile(run_folder())
        self._started = started_at(os.getpid())

    async def run(self) -> int:
        """Load, serve, drain and close. Returns the exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        self._write_record()
        http = asyncio.create_task(self._http.serve([self._listener.socket]))
        end = asyncio.create_task(self._signalled.wait())
        load = asyncio.create_task(self._load())
        renewal = asyncio.create_task(self._renew_certificates())
        try:
            await asyncio.wait((load, end), return_when=asyncio.FIRST_COMPLETED)
            if load.done():
                load.result()
                self._code = await self._watch()
            return self._code
        finally:
            others = (load, end, renewal)
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._close(http)

    def _on_signal(self) -> None:
        if self._closing:
            self._end_at_once()
        if self._state.draining:
            logger.warning("second signal: ending at once")
            self._http.force_exit = True
        else:
            logger.info("finishing %d requests, at most %g s", self._state.active, self._options.shutdown_timeout)
        self._state.draining = True
        notify("STOPPING=1")
        if self._state.batches is not None:
            self._state.batches.stop()
        if self._fetcher is not None and self._state.remote is not None:
            self._fetcher.stop()  # requests that wait for adapters are answered
        self._signalled.set()

    def _end_at_once(self) -> None:
        """End the process without waiting for anything: a signal has come while the server was closing."""
        logger.warning("another signal: ending without waiting for what is being closed")
        if self._state.client is not None:
            self._state.client.kill()
        self._record.remove()
        remove_socket(self._listener)
        logging.shutdown()
        os._exit(self._code)

    async def _renew_certificates(self) -> None:
        if self._tls is not None and self._options.enable_ssl_refresh:
            await refresh_certificates(self._tls, self._options)

    async def _load(self) -> None:
        logger.info("listening on %s; loading the model", self._listener.place)
        files = await asyncio.to_thread(resolve_model, self._config.model, revision=self._config.revision)
        state = self._state
        self._path = os.path.realpath(files.path)
        self._write_record()
        names = self._options.served_model_name or (files.name,)
        for name in self._config.named_adapters.keys() & set(names):
            raise ConfigError(f"--lora-modules: {name} is the name of the base model.")
        defaults = await asyncio.to_thread(read_sampling_defaults, self._config, files.path)
        client, remote = await self._make_client(files.path)
        state.begin_loading(names, client, finds_adapters=self._config.lora_dir is not None, remote=remote)
        tokenizer = await asyncio.to_thread(self._load_tokenizer, files.path)
        ready = await client.start()
        process_memory.freeze()
        async_engine = AsyncEngine(client, tokenizer, ready, defaults.defaults)
        state.begin_serving(async_engine, client, EngineFacts.of(self._config, ready))
        if state.batches is not None and state.internal_client is not None:
            state.batches.resume(state.internal_client)
        for line in (*ready.summary, *([defaults.applied] if defaults.applied else [])):
            logger.info("%s", line)
        for line in defaults.ignored:
            logger.warning("%s", line)
        logger.info("ready: %s at %s/v1", ", ".join(state.names), self._listener.url)
        notify("READY=1")

    async def _make_client(self, path: Path) -> tuple[EngineLike, RemoteAdapters | None]:
        """Return the client of an engine, and the adapters from sources, of which those of the start are fetched."""
        if self._fetcher is None:
            return _engine_of(self._config, path, self._options), None
        from ...engine.adapter_sources.named_sources import fetch_named

        config, named = await asyncio.to_thread(fetch_named, self._config, self._fetcher)
        client = _engine_of(config, path, self._options)
        # The other half of the names is for adapters of the operator's, which no request can take.
        most = max(1, config.max_adapters // 2)
        remote = RemoteAdapters(
            self._fetcher,
            client,
            lora_dir=config.lora_dir,
            most_names=most,
            most_adapters=config.max_adapters,
            named=named,
        )
        return client, remote

    def _load_tokenizer(self, path: Path) -> Tokenizer:
        other = self._config.tokenizer
        return Tokenizer.load(
            path, tokenizer_path=None if other is None else Path(other), chat_template=self._config.chat_template
        )

    async def _watch(self) -> int:
        """Wait until the server is drained after a signal, or the engine is dead. Returns the exit code."""
        loop = asyncio.get_running_loop()
        deadline = float("inf")
        while self._state.is_healthy and not self._http.force_exit:
            self._write_record()
            if self._state.draining:
                deadline = min(deadline, loop.time() + self._options.shutdown_timeout)
                if not self._state.active or loop.time() >= deadline:
                    break
            await asyncio.sleep(_WATCH_SECONDS)
        if self._state.is_healthy:
            if self._state.active:
                logger.warning("cutting off %d requests", self._state.active)
            return EXIT_CUT_OFF if self._state.active else 0
        logger.error("%s The server ends.", self._state.death())
        if self._state.client is not None:
            self._state.client.kill()  # a hung engine would ignore Shutdown
        return EXIT_ENGINE_DEAD

    def _write_record(self) -> None:
        state, stats = self._state, self._state.stats()
        is_loaded = state.async_engine is not None
        self._record.write(
            RunRecord(
                os.getpid(),
                self._started,
                self._listener.url,
                tuple(state.names) if is_loaded else (),
                len(state.adapters),
                "draining" if state.draining else "ready" if is_loaded else "loading",
                int(stats.get("running", 0)),
                int(stats.get("waiting", 0)),
                round(kv_usage(stats), 2),
                state.version,
                self._path,
            )
        )

    async def _close(self, http: asyncio.Task[None]) -> None:
        """Close the engine, whose streams then end with an error, then the server and its stores."""
        self._state.draining = self._closing = True
        if self._state.batches is not None:
            await self._state.batches.close()
        client = self._state.client
        if client is not None:
            if self._state.active:
                client.on_death(EngineDead("The server is shutting down."))
            await client.close()
        self._http.should_exit = True
        await http
        self._record.remove()
        if self._fetcher is not None:
            await _ended(self._fetcher.close, _FETCHER_SECONDS)
        if self._state.ledger is not None:
            await self._state.ledger.close()
        if self._state.tracer is not None:
            await asyncio.to_thread(self._state.tracer.close)


async def _ended(call: Callable[[], None], seconds: float) -> None:
    """Wait for a blocking call, at most so long; it goes on as long as the process does."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while thread.is_alive() and loop.time() < until:
        await asyncio.sleep(0.02)


def _engine_of(config: EngineConfig, path: Path, options: ServerConfig) -> EngineLike:
    """Return the engine: one process, or a fleet of them, by Ray or not, which nothing else imports."""
    if options.ray_address is not None:
        from ..fleet.on_ray.ray_fleet import ray_fleet

        return ray_fleet(config, path, options)
    if options.replicas > 1:
        from ..fleet.local_fleet import local_fleet

        return local_fleet(config, path, options)
    timeouts = options.silence_seconds, options.watchdog_timeout
    return EngineClient(config, path, heartbeat_timeout=timeouts[0], watchdog_timeout=timeouts[1])


def _open_fetcher(config: EngineConfig) -> AdapterFetcher:
    """Return the fetcher of adapters; a server without adapters does not import what it needs."""
    from ...engine.adapter_sources.adapter_fetcher import AdapterFetcher

    return AdapterFetcher.of(config)


def _version() -> str:
    try:
        return version("rootgraft")
    except PackageNotFoundError:
        return "unknown"
