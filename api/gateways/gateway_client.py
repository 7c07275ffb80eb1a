"""Gateway client: a gateway's connection to the main process, which has the engine, the limits and the stores.

A ``GatewayTicket`` stands for the resources that a request holds in the main process's limits. ``GatewayLedger`` sends
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
    """Sends sequences and calls to the main process. Belongs to one event loop.

    ``AsyncEngine`` uses it as its engine.

    Args:
        link: connection to the main process; this object sets its callbacks.

    Attributes:
        on_frame, on_death: see ``EngineClient``; the engine counts as dead when the main process is gone.
        settings: settings of the server, which the main process sends first.
        model: facts about the model that the gateway needs, when the model is loaded.
        draining: set when the server accepts no new requests any more.
        ended: set when the gateway must end because the server does; running answers are cut off.
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
        """Send the bytes of all tokens, before the first sequence with a grammar, or drop them."""
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
        """Send a command that gets no reply."""
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
        """Return the result of a call. Raises the error that the main process raised, or EngineDead if it is gone."""
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
            # The request that waited for this reply was cancelled.
            return
        if failed:
            reply.set_exception(unpack_error(value))
        else:
            reply.set_result(value)

    def _closed(self) -> None:
        """Fail everything that waits for the main process, as that has ended."""
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
    """The queue places and rate limit tokens that a request of this gateway holds: a ticket of the main process.

    Args:
        number: number of the ticket, unique in this gateway.
        ended: called when it is closed.

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
        """Count tokens of a sequence. Its first tokens are reported to the main process at once."""
        self.num_generated += num_tokens
        if sequence not in self._begun:
            self._begun.add(sequence)
            self._client.tell("begun", self.number, *sequence, self.news())

    def close(self) -> None:
        """Release everything that the ticket holds."""
        self._ended(self)
        self._client.tell("ended", self.number, self.news())

    def news(self) -> int:
        """Return the number of tokens that were not reported to the main process yet, and count them as reported."""
        count = self.num_generated - self.num_told
        self.num_told = self.num_generated
        return count


class GatewayLedger:
    """Sends usage records to the main process's ``UsageLedger``, which waits for its file if necessary."""

    def __init__(self, client: GatewayClient) -> None:
        self._client = client

    def put(self, record: UsageRecord) -> asyncio.Future[None]:
        """Send a record. The future is done when the record is in the file, or when writing it was given up."""
        return self._client.begin_call("record", *astuple(record))

    async def until_written(self, written: asyncio.Future[None]) -> None:
        """Wait for a future of ``put``. The main process itself waits at most ``WAIT_SECONDS``."""
        await asyncio.wait((written,), timeout=2 * WAIT_SECONDS)
        if written.done() and not written.cancelled():
            # If the main process is gone, the exception is read, so that asyncio does not log it.
            written.exception()
