"""Gateway client: a gateway's connection to the main process, which has the engine, the limits and the stores.

A ticket is what a request holds of the main process's limits; the ledger sends the usage that it writes.
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
    """Sends sequences and calls to the main process. Belongs to one event loop.

    To ``AsyncEngine`` it is the engine.

    Args:
        link: connection to the main process; this object sets its callbacks.

    Attributes:
        on_frame, on_death: as in ``EngineClient``; the engine counts as dead once the main process is gone.
        settings: settings of the server, which the main process sends first.
        model: facts about the model that the gateway needs, once the model is loaded.
        draining: set when the server takes no new requests any more.
        ended: set when the gateway has to end, as the server does; running answers are cut off.
        death: why the engine is gone; None while it is not.
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
        """Send the bytes of all tokens, before the first sequence with a grammar, or give them up."""
        self._link.send([message])

    def submit(self, submits: Sequence[Submit]) -> None:
        """Start sequences. Raises EngineDead if the main process or the engine is gone."""
        if self.death is not None:
            raise EngineDead(str(self.death))
        self._link.send(submits)

    def abort(self, ids: Iterable[int]) -> None:
        """End sequences."""
        self._link.send([Abort(tuple(ids))])

    def tell(self, name: str, *values: Any) -> None:
        """Send a command that is not answered."""
        self._link.tell(name, *values)

    def begin_call(self, name: str, *values: Any) -> asyncio.Future[Any]:
        """Send a call. The future gets its result, or the error that the main process raised."""
        number = next(self._call_ids)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if not self._link.is_open:
            reply.set_exception(EngineDead(_GONE))
            return reply
        self._calls[number] = reply
        self._link.tell("call", number, name, *values)
        return reply

    async def call(self, name: str, *values: Any) -> Any:
        """Return the result of a call. Raises the error that the main process raised, EngineDead if it is gone."""
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
                raise ValueError(f"no command of a main process: {name}")

    def _settle(self, number: int, value: Any, *, failed: bool) -> None:
        reply = self._calls.pop(number, None)
        if reply is None or reply.done():
            # The request of this reply was cancelled.
            return
        if failed:
            reply.set_exception(unpack_error(value))
        else:
            reply.set_result(value)

    def _closed(self) -> None:
        """Fail what waits for the main process, which has ended."""
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(EngineDead(_GONE))
        self._calls.clear()
        if not self.settings.done():
            self.settings.set_exception(EngineDead(_GONE))
        self._end(_GONE)

    def _end(self, reason: str) -> None:
        """End the answers that run; the link is open yet, for what is told of their end."""
        if self.death is None:
            self.death = EngineDead(reason)
            self.on_death(EngineDead(reason))
            self.ended.set()


class GatewayTicket:
    """What a request of this gateway holds of queue and rate limits: a ticket of the main process, by its number.

    Args:
        number: unique in this gateway.
        ended: called when it is closed.

    Attributes:
        num_generated: tokens of the answers so far.
        num_told: tokens of ``num_generated`` that the main process has been told of.
    """

    def __init__(self, client: GatewayClient, number: int, ended: Callable[[GatewayTicket], None]) -> None:
        self._client = client
        self._ended = ended
        self._begun: set[tuple[int, int]] = set()
        self.number = number
        self.num_generated = 0
        self.num_told = 0

    def take(self, sequence: tuple[int, int], num_tokens: int) -> None:
        """Count tokens of a sequence; the main process is told of its first ones at once."""
        self.num_generated += num_tokens
        if sequence not in self._begun:
            self._begun.add(sequence)
            self._client.tell("begun", self.number, *sequence, self.news())

    def close(self) -> None:
        """Give back what it holds."""
        self._ended(self)
        self._client.tell("ended", self.number, self.news())

    def news(self) -> int:
        """Return the tokens that the main process has not been told of, and count them as told."""
        count = self.num_generated - self.num_told
        self.num_told = self.num_generated
        return count


class GatewayLedger:
    """Sends the usage of requests to the main process's ``UsageLedger``, which waits for its file if it can."""

    def __init__(self, client: GatewayClient) -> None:
        self._client = client

    def put(self, record: UsageRecord) -> asyncio.Future[None]:
        """Send a record. The future is done when it is in the file, or was given up."""
        return self._client.begin_call("record", *astuple(record))

    async def until_written(self, written: asyncio.Future[None]) -> None:
        """Wait for a future of ``put``; the main process itself waits at most ``WAIT_SECONDS``."""
        await asyncio.wait((written,), timeout=2 * WAIT_SECONDS)
        if written.done() and not written.cancelled():
            # Read the exception of a write whose main process is gone, so that asyncio does not log it.
            written.exception()
