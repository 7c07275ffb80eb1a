"""Engine multiplexer: lets several clients use one engine. Each client gives its sequences ids of its own.

client 1: sequence 7  --->                  ---> 41
                           EngineMultiplexer, engine
client 2: sequence 7  --->                  ---> 42
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from ...engine.errors import EngineDead
from ...engine.messages import AdapterChanged, Done, Failed, ForgetTokens, Message, Submit, TokenOut, TokenTexts
from ...engine.serving.engine_like import SequenceEngine


class EngineMultiplexer:
    """Receives an engine's frames, and passes each client the client's own messages.

    Belongs to the engine's event loop.

    Args:
        engine: the engine; the multiplexer sets its ``on_frame`` and ``on_death``.
    """

    def __init__(self, engine: SequenceEngine) -> None:
        self.engine = engine
        self._numbers = itertools.count(1)
        # For each sequence id of the engine: the client, and the client's own id of the sequence.
        self._owners: dict[int, tuple[EngineChannel, int]] = {}
        # For each vocabulary, the clients that have sent its tokens.
        self._described: dict[str, set[EngineChannel]] = {}
        self._clients: list[EngineChannel] = []
        engine.on_frame = self._take
        engine.on_death = self._fail

    def open_channel(self) -> EngineChannel:
        """Return a channel for a new client."""
        client = EngineChannel(self)
        self._clients.append(client)
        return client

    def describe_tokens(self, client: EngineChannel, message: TokenTexts | ForgetTokens) -> None:
        """Send the tokens of a vocabulary once for all clients. They are dropped when all clients have dropped them."""
        clients = self._described.get(message.vocabulary, set())
        if isinstance(message, TokenTexts):
            if not clients:
                self.engine.describe_tokens(message)
            self._described[message.vocabulary] = clients | {client}
        elif clients and not clients - {client}:
            del self._described[message.vocabulary]
            self.engine.describe_tokens(message)
        else:
            clients.discard(client)

    def number(self, client: EngineChannel, own: int) -> int:
        """Return a new sequence id of the engine for a client's sequence."""
        number = next(self._numbers)
        self._owners[number] = client, own
        return number

    def forget(self, number: int) -> None:
        self._owners.pop(number, None)

    def leave(self, client: EngineChannel) -> None:
        """Remove a client, and the vocabularies that no other client has sent."""
        self._clients.remove(client)
        for vocabulary in [key for key, clients in self._described.items() if client in clients]:
            # The model's own vocabulary is never dropped.
            if vocabulary:
                with suppress(EngineDead):
                    self.describe_tokens(client, ForgetTokens(vocabulary))
        self._described.get("", set()).discard(client)

    def _take(self, messages: list[Message]) -> None:
        by_client: dict[EngineChannel, list[Message]] = {}
        for message in messages:
            if isinstance(message, AdapterChanged):
                for each in self._clients:
                    by_client.setdefault(each, []).append(message)
            if not isinstance(message, (TokenOut, Done, Failed)):
                continue
            owner = self._owners.get(message.id)
            if owner is None:
                continue
            client, own = owner
            if not isinstance(message, TokenOut):
                del self._owners[message.id]
                client.ended(own)
            by_client.setdefault(client, []).append(_renumbered(message, own))
        for client, own_messages in by_client.items():
            client.on_frame(own_messages)

    def _fail(self, error: EngineDead) -> None:
        for client in tuple(self._clients):
            client.on_death(error)


class EngineChannel:
    """One client's channel to a shared engine.

    Attributes:
        on_frame: called with the messages about the client's own sequences and about adapters, in order.
        on_death: called once if the engine ends or hangs.
    """

    def __init__(self, multiplexer: EngineMultiplexer) -> None:
        self._multiplexer = multiplexer
        # The engine's ids of the sequences that have not ended, by the client's own ids.
        self._numbers: dict[int, int] = {}
        self.on_frame: Callable[[list[Message]], None] = lambda messages: None
        self.on_death: Callable[[EngineDead], None] = lambda error: None

    def __len__(self) -> int:
        """Number of sequences that have not ended."""
        return len(self._numbers)

    def describe_tokens(self, message: TokenTexts | ForgetTokens) -> None:
        """Send the bytes of a vocabulary's tokens, which grammars need, or tell the engine to drop them.

        Raises EngineDead.
        """
        self._multiplexer.describe_tokens(self, message)

    def submit(self, submits: Sequence[Submit]) -> None:
        """Submit sequences. If the engine raises an error, none of the sequences runs."""
        numbered = []
        for submit in submits:
            number = self._numbers[submit.id] = self._multiplexer.number(self, submit.id)
            numbered.append(replace(submit, id=number))
        try:
            self._multiplexer.engine.submit(numbered)
        except BaseException:
            for submit, sent in zip(submits, numbered, strict=True):
                self._multiplexer.forget(sent.id)
                self._numbers.pop(submit.id, None)
            self._multiplexer.engine.abort([sent.id for sent in numbered])
            raise

    def abort(self, ids: Iterable[int]) -> None:
        """Abort sequences. Ids of sequences that have ended are ignored."""
        if known := [self._numbers[own] for own in ids if own in self._numbers]:
            self._multiplexer.engine.abort(known)

    def ended(self, own: int) -> None:
        """Remove a sequence. The multiplexer calls this before it passes on the sequence's last message."""
        self._numbers.pop(own, None)

    def close(self) -> None:
        """Abort all sequences of the client, and remove the client. It gets no further messages."""
        self.on_frame, self.on_death = (lambda messages: None), (lambda error: None)
        self.abort(tuple(self._numbers))
        self._multiplexer.leave(self)


def _renumbered(message: TokenOut | Done | Failed, own: int) -> Message:
    return message.renumbered(own) if isinstance(message, TokenOut) else replace(message, id=own)
