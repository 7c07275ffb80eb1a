"""Gateway client: a gateway's connection to the main process, which owns the engine, the limits and the stores.

A ``GatewayTicket`` represents the resources that a request holds in the main process's limits. ``GatewayLedger`` sends
usage records to the main process, which writes them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from ...engine.errors import EngineDead
from ...engine.messages import Abort, ForgetTokens, Message, Submit, TokenTexts
from ..observe.usage_ledger import WAIT_SECONDS, UsageRecord
from .call_errors import unpack_error
from .process_link import ProcessLink

_GONE = "The server's main process has ended."


class GatewayClient:
    """Sends sequences and calls to the main process. ``AsyncEngine`` uses it as its engine. Belongs to one event loop.

    ``AsyncEngine`` uses it as its engine.

    Args:
        link: connection to the main process; this object sets its callbacks.

    Attributes:
        on_frame, on_death: see ``EngineClient``. The engine counts as dead when the main process is gone.
        settings: future of the server's settings, which the main process sends first.
        model: future of the facts about the model that the gateway needs; done when the model is loaded.
        draining: set when the server accepts no more new requests.
        ended: set when the gateway must end because the server ends; running answers are cut off.
        death: reason for the engine's end; None while it runs.
    """

    def __init__(self, link: ProcessLink) -> None:
        self._link = link
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        link.on_messages = lambda messages: self.on_frame(messages)
        link.on_command = self._command
        link.on_closed = self._closed
        self.settings: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.on_frame: Callable[[list[Message]], None] = lambda messages: None
        self.on_death: Callable[[EngineDead], None] = lambda error: None
        self.model: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self.draining = asyncio.Event()
        self.ended = asyncio.Event()
        self.death: EngineDead | None = None

    def describe_tokens(self, message: TokenTexts | ForgetTokens) -> None:
        """Send the bytes of a vocabulary's tokens, which grammars need, or tell the engine to drop them."""
        self._link.send([message])

    def submit(self, submits: Sequence[Submit]) -> None:
        """Submit sequences. Raises EngineDead if the main process or the engine is gone."""
        if self.death is not None:
            raise EngineDead(str(self.death))
        self._link.send(submits)

    def abort(self, ids: Iterable[int]) -> None:
        """Abort sequences."""
        self._link.send([Abort(tuple(ids))])

    def tell(self, name: str, *values: Any) -> None:
        """Send a command that gets no reply."""
        self._link.tell(name, *values)

    def begin_call(self, name: str, *values: Any) -> asyncio.Future[Any]:
        """Send a call. Returns a future of its result, or of the error that the main process raised."""
        number = next(self._call_ids)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._link.is_open:
            reply.set_exception(EngineDead(_GONE))
            return reply
        self._calls[number] = reply
        self._link.tell("call", number, name, *values)
        return reply

    async def call(self, name: str, *values: Any) -> Any:
        """Send a call and return its result.

        Raises the error that the main process raised, or EngineDead if it is gone.
        """
        return await self.begin_call(name, *values)

    def _command(self, name: str, values: list[Any]) -> None:
        match name:
            case "reply" | "error":
                self._settle(values[0], values[1], failed=name == "error")
            case "start":
                self.settings.set_result(values[0])
            case "serve":
                self.model.set_result(values[0])
            case "drain":
                self.draining.set()
            case "end":
                self._end(values[0])
            case _:
                raise ValueError(f"not a command of a main process: {name}")

    def _settle(self, number: int, value: Any, *, failed: bool) -> None:
        reply = self._calls.pop(number, None)
        if reply is None or reply.done():
            # The request that waited for this reply was cancelled.
            return
        if failed:
            reply.set_exception(unpack_error(value))
        else:
            reply.set_result(value)

    def _closed(self) -> None:
        """Fail everything that waits for the main process, because that process has ended."""
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(EngineDead(_GONE))
        self._calls.clear()
        if not self.settings.done():
            self.settings.set_exception(EngineDead(_GONE))
        self._end(_GONE)

    def _end(self, reason: str) -> None:
        """End the running answers. The link stays open, so that their ends can be reported."""
        if self.death is None:
            self.death = EngineDead(reason)
            self.on_death(EngineDead(reason))
            self.ended.set()


class GatewayTicket:
    """The queue places and rate limit tokens that a request of this gateway holds in the main process.

    Args:
        number: number of the ticket, unique in this gateway.
        ended: called when the ticket is closed.

    Attributes:
        num_generated: number of tokens of the answers so far.
        num_told: number of these tokens that were reported to the main process.
    """

    def __init__(self, client: GatewayClient, number: int, ended: Callable[[GatewayTicket], None]) -> None:
        self._client = client
        self._ended = ended
        self._begun: set[tuple[int, int]] = set()
        self.number = number
        self.num_generated = 0
        self.num_told = 0

    def take(self, sequence: tuple[int, int], num_tokens: int) -> None:
        """Count tokens of a sequence. The first tokens of a sequence are reported to the main process at once."""
        self.num_generated += num_tokens
        if sequence not in self._begun:
            self._begun.add(sequence)
            self._client.tell("begun", self.number, *sequence, self.news())

    def close(self) -> None:
        """Release all resources that the ticket holds."""
        self._ended(self)
        self._client.tell("ended", self.number, self.news())

    def news(self) -> int:
        """Return the number of tokens that were not yet reported to the main process, and mark them as reported."""
        count = self.num_generated - self.num_told
        self.num_told = self.num_generated
        return count


class GatewayLedger:
    """Sends usage records to ``UsageLedger`` in the main process, which waits for its file if necessary."""

    def __init__(self, client: GatewayClient) -> None:
        self._client = client

    def put(self, record: UsageRecord) -> asyncio.Future[None]:
        """Send a record. Returns a future, which is done when the record is in the file or writing it was given up."""
        return self._client.begin_call("record", *astuple(record))

    async def until_written(self, written: asyncio.Future[None]) -> None:
        """Wait for a future of ``put``. The main process itself waits at most ``WAIT_SECONDS``."""
        await asyncio.wait((written,), timeout=2 * WAIT_SECONDS)
        if written.done() and not written.cancelled():
            # If the main process is gone, the future has an exception. It is read here, so that asyncio does not log
            # it.
            written.exception()
