"""Gateway ledger: sends the usage of a gateway's requests to the main process, which writes it."""

from __future__ import annotations

import asyncio
from dataclasses import astuple

from ..observe.usage_ledger import WAIT_SECONDS, UsageRecord
from .gateway_client import GatewayClient


class GatewayLedger:
    """Sends records to the main process's ``UsageLedger``, which waits for its file if that can be written."""

    def __init__(self, client: GatewayClient) -> None:
        self._client = client

    def put(self, record: UsageRecord) -> asyncio.Future[None]:
        """Send a record. The future is done when it is in the file, or was given up."""
        return self._client.begin_call("record", *astuple(record))

    async def until_written(self, written: asyncio.Future[None]) -> None:
        """Wait for a future of ``put``; the main process itself waits at most ``WAIT_SECONDS``."""
        await asyncio.wait((written,), timeout=2 * WAIT_SECONDS)
        if written.done() and not written.cancelled():
            written.exception()  # the main process is gone: the answer has ended all the same
