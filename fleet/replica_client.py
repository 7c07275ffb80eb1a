"""Replica client: a fleet's interface to one replica. ``EngineClient`` implements it for a process of this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..engine.errors import EngineDead
from ..engine.messages import (
    Abort,
    ForgetTokens,
    KvBlocks,
    ListPrefixes,
    Message,
    PrepareGrammar,
    ReadKv,
    Submit,
    TokenTexts,
)
from ..engine.serving.engine_like import EngineLike


class ReplicaClient(EngineLike, Protocol):
    """The engine of one replica. It is started once and ended by ``close``, after ``kill`` if it is lost."""

    @property
    def place(self) -> str:
        """Place where the replica runs, for people to read."""
        ...

    async def load_adapter(
        self, name: str, path: str, *, replace: bool = False, trusted: bool = False, num_tokens: int = 0, of: str = ""
    ) -> None:
        """Load an adapter; see ``EngineClient.load_adapter``."""
        ...

    def prepare_grammar(self, message: PrepareGrammar) -> None:
        """Compile a grammar in advance for later sequences."""
        ...

    def carry(self, messages: Sequence[ReadKv | KvBlocks | ListPrefixes]) -> None:
        """Request KV for another replica, or deliver KV from another one."""
        ...


def send(client: ReplicaClient, messages: Sequence[Message]) -> None:
    """Send messages to a replica. A replica that has just died is given up by its ``on_death``."""
    submits = [message for message in messages if isinstance(message, Submit)]
    ended = [number for message in messages if isinstance(message, Abort) for number in message.ids]
    try:
        for message in messages:
            if isinstance(message, (TokenTexts, ForgetTokens)):
                client.describe_tokens(message)
        if blocks := [message for message in messages if isinstance(message, KvBlocks)]:
            client.carry(blocks)
        if submits:
            client.submit(submits)
        if reads := [message for message in messages if isinstance(message, (ReadKv, ListPrefixes))]:
            client.carry(reads)
        for message in messages:
            if isinstance(message, PrepareGrammar):
                client.prepare_grammar(message)
        if ended:
            client.abort(ended)
    except EngineDead:
        return
