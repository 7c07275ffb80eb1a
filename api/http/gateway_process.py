"""Gateway process: answers HTTP on a port that it shares with other gateways, on behalf of a server's main process::

    python -P -m rootgraft.api.http.gateway_process LISTENING LINK PARENT
    python -P -m rootgraft.api.http.gateway_process FORKS PARENT

LISTENING: descriptor of the socket from which connections are accepted. LINK: descriptor of the gateway's end of a
socketpair to the main process. PARENT: id of the main process. FORKS: descriptor of the end of a ``ForkServer``. In the
second form, the process imports the modules and forks gateways for ``ForkedGateways``. It is not a gateway itself, and
has no options, no model and no threads.

The process exits when the link closes, so it never outlives the main process. Only the main process handles signals.
Exit codes: 0 if the main process has ended the gateway, 70 if the main process is gone or a part of the gateway has
failed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Coroutine, Mapping
from typing import Any

import uvloop

from ...engine import process_memory
from ...engine.config import EngineConfig
from ...engine.errors import EngineError
from ...engine.serving.async_engine import AsyncEngine
from ...engine.serving.fork_server import serve_forks
from ...grammar.parent_death import end_with_parent
from ..config import ServerConfig
from ..gateways.gateway_client import GatewayClient
from ..gateways.gateway_proxy import GatewayProxy
from ..gateways.gateway_state import GatewayState
from ..gateways.loaded_model import LoadedModel
from ..gateways.main_supervisor import settings_of
from ..gateways.process_link import ProcessLink
from ..observe.log import set_up_log
from .allowed_hosts import AllowedHosts
from .app import create_app
from .http_server import HttpServer
from .tls import refresh_certificates, tls_context

TELL_SECONDS = 0.25
"""Seconds between two signs of life. Each of them carries the metrics observed since the previous one."""
EXIT_FAILED = 70

logger = logging.getLogger("rootgraft.gateways")


def set_up_process() -> None:
    """Configure a gateway process. Must be called before a thread is started."""
    # A terminal or systemd sends signals to all processes of the server, but only the main process decides when to end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    process_memory.share_heap()
    process_memory.freeze_at_exit()


def run(listening: int, link: int) -> int:
    """Run a gateway with these descriptors until its main process ends it. Returns the exit code."""
    ends = socket.socket(fileno=listening), socket.socket(fileno=link)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(*ends))


async def _run(listening: socket.socket, link_socket: socket.socket) -> int:
    link = ProcessLink()
    client = GatewayClient(link)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=link_socket)
    try:
        settings = await client.settings
    except EngineError:
        return EXIT_FAILED
    config, options = settings_of(settings)
    set_up_log(options.log_level, options.log_format, log_requests=options.log_requests)
    gateway = _Gateway(config, options, client, link, settings)
    return await gateway.run(listening)


class _Gateway:
    """One run of a gateway, from its settings to its exit code.

    Raises:
        ConfigError: a certificate or the key file can no longer be used.
    """

    def __init__(
        self,
        config: EngineConfig,
        options: ServerConfig,
        client: GatewayClient,
        link: ProcessLink,
        settings: Mapping[str, Any],
    ) -> None:
        self._config = config
        self._options = options
        self._client = client
        self._link = link
        self._state = GatewayState(options, client, settings["version"], enable_lora=config.enable_lora)
        self._tls = tls_context(options)
        self._proxy = GatewayProxy(create_app(self._state), settings["main_socket"], options.root_path)
        hosts = {"names": options.allowed_hosts, "origins": options.allowed_origins}
        self._http = HttpServer(
            AllowedHosts(self._proxy, keys=self._state.limits.keys, **hosts),
            self._tls,
            max_message_bytes=options.max_request_bytes,
        )
        self._is_loaded: bool = settings["is_loaded"]
        self._has_failed = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def _serve(self) -> None:
        """Accept generation requests once the main process has loaded the model."""
        model = LoadedModel.unpack(await self._client.model)
        tokenizer = await asyncio.to_thread(self._state.engine.read_tokenizer, self._config, model.path)
        async_engine = AsyncEngine(self._client, tokenizer, model.ready, model.defaults)
        if self._config.enable_lora:
            await self._state.engine.open_tokenizers(self._config, async_engine)
        self._state.serve(model.names, async_engine)
        process_memory.freeze()
        self._client.tell("serving")

    async def run(self, listening: socket.socket) -> int:
        """Answer requests until the main process ends the gateway. Returns the exit code."""
        self._begin(self._tell_regularly())
        self._begin(self._drain())
        serving = self._begin(self._serve())
        ending = asyncio.create_task(self._client.ended.wait())
        # No connection is accepted before this gateway can serve it, because the other gateways accept it.
        if self._is_loaded:
            await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
        http = asyncio.create_task(self._http.serve([listening]))
        if self._tls is not None and self._options.enable_ssl_refresh:
            self._begin(refresh_certificates(self._tls, self._options))
        await asyncio.wait((http, ending), return_when=asyncio.FIRST_COMPLETED)
        is_told = self._link.is_open and not self._has_failed
        self._http.should_exit = True
        await http
        for task in self._tasks:
            task.cancel()
        await self._proxy.close()
        if self._state.observers.tracer is not None:
            await asyncio.to_thread(self._state.observers.tracer.close)
        self._tell(-1)
        self._link.close()
        return 0 if is_told else EXIT_FAILED

    async def _drain(self) -> None:
        await self._client.draining.wait()
        self._state.engine.draining = True

    async def _tell_regularly(self) -> None:
        num_passes = 0
        while True:
            self._tell(num_passes)
            num_passes += 1
            await asyncio.sleep(TELL_SECONDS)

    def _tell(self, num_passes: int) -> None:
        state = self._state
        self._client.tell("alive", num_passes, state.limits.active, state.relayed.take(), state.main_limits.progress())

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        """End the gateway if a task has failed. The main process then starts another gateway."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a gateway ends: %s", error, exc_info=error)
            self._has_failed = True
            self._client.ended.set()


def _main(numbers: list[int]) -> int:
    *descriptors, parent = numbers
    end_with_parent(parent)
    set_up_process()
    if len(descriptors) == 1:
        return serve_forks(socket.socket(fileno=descriptors[0]), run)
    return run(*descriptors)


if __name__ == "__main__":
    sys.exit(_main([int(word) for word in sys.argv[1:]]))
