"""A started fleet over engine cores of this process, what it was asked and what it delivered."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from rootgraft.engine.messages import AdapterChanged, Done, Failed, Message, Submit, TokenOut
from rootgraft.engine.types import FinishReason, SamplingParams
from rootgraft.fleet.dispatcher import DispatcherLimits
from rootgraft.fleet.fleet import Fleet
from rootgraft.fleet.replica_launcher import ProcessLauncher
from rootgraft.fleet.scaling.autoscaling import AutoscalePolicy
from support.engine.core_client import VOCAB, CoreClient
from support.engine.fake_worker import expected_tokens
from support.machine.waits import HANG_SECONDS


class Made:
    """A started fleet, its replicas in the order in which they were made, and what it delivered."""

    def __init__(
        self, count: int, policy: AutoscalePolicy | None = None, roles: Sequence[str] = (), **options: Any
    ) -> None:
        self.clients: list[CoreClient] = []
        self.options = options
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Done | Failed] = {}
        self.changed: list[str] = []  # names of adapters
        self.heartbeats = 0
        limits = DispatcherLimits(heartbeat_seconds=HANG_SECONDS)
        self.fleet = Fleet(ProcessLauncher(self._make), count, limits, policy=policy, roles=roles)
        self.fleet.on_frame = self._take
        self.fleet.on_heartbeat = lambda heartbeat: setattr(self, "heartbeats", self.heartbeats + 1)

    def _make(self) -> CoreClient:
        self.clients.append(CoreClient(**self.options))
        return self.clients[-1]

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, TokenOut):
                assert message.id not in self.ends
                self.tokens.setdefault(message.id, []).extend(message.tokens)
            elif isinstance(message, AdapterChanged):
                self.changed.append(message.name)
            else:
                assert isinstance(message, (Done, Failed)) and message.id not in self.ends
                self.ends[message.id] = message

    @property
    def serving(self) -> list[CoreClient]:
        return [client for client in self.clients if client in self.fleet.replicas.values()]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(HANG_SECONDS):
            while not holds():
                await asyncio.sleep(0)


def submit(number: int, prompt: list[int], max_tokens: int = 40, **fields: Any) -> Submit:
    return Submit(number, array("i", prompt), SamplingParams(max_tokens=max_tokens), **fields)


def check_answers(made: Made, prompts: dict[int, list[int]], max_tokens: int) -> None:
    """Every sequence has ended once, with the tokens of an engine that nothing happened to."""
    assert made.ends.keys() == prompts.keys()
    for number, prompt in prompts.items():
        assert made.tokens[number] == expected_tokens(prompt, max_tokens, VOCAB)
        end = made.ends[number]
        assert isinstance(end, Done) and end.reason is FinishReason.LENGTH
