"""Several clients of one engine: equal numbers are kept apart, and a client that leaves takes its sequences along."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from support.engine.core_client import VOCAB, CoreClient
from support.engine.fake_worker import expected_tokens

from rootgraft.api.gateways.engine_multiplexer import EngineChannel, EngineMultiplexer
from rootgraft.engine.errors import CapacityError, EngineDead
from rootgraft.engine.messages import AdapterChanged, Done, Failed, ForgetTokens, Message, Submit, TokenOut, TokenTexts
from rootgraft.engine.types import SamplingParams

PROMPTS = ([1, 2, 3, 4, 5], [5, 4, 3], [7, 7])


class Client:
    """What one client of the engine heard."""

    def __init__(self, multiplexer: EngineMultiplexer) -> None:
        self.engine: EngineChannel = multiplexer.open_channel()
        self.engine.on_frame = self.take
        self.engine.on_death = self.die
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Done | Failed] = {}
        self.deaths: list[EngineDead] = []

    def take(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, TokenOut):
                self.tokens.setdefault(message.id, []).extend(message.tokens)
            else:
                assert isinstance(message, (Done, Failed)) and message.id not in self.ends
                self.ends[message.id] = message

    def die(self, error: EngineDead) -> None:
        self.deaths.append(error)

    def submit(self, number: int, prompt: list[int], count: int = 12) -> None:
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.engine.submit([Submit(number, array("i", prompt), params)])


async def until_ended(*clients: Client) -> None:
    while any(len(client.engine) for client in clients):
        await asyncio.sleep(0)


async def test_equal_numbers_of_two_clients_are_two_sequences() -> None:
    core = CoreClient()
    multiplexer = EngineMultiplexer(core)
    first, second = Client(multiplexer), Client(multiplexer)
    for number, prompt in enumerate(PROMPTS):
        first.submit(number, prompt)
        second.submit(number, prompt[::-1])
    await until_ended(first, second)
    for number, prompt in enumerate(PROMPTS):
        assert first.tokens[number] == expected_tokens(prompt, 12, VOCAB)
        assert second.tokens[number] == expected_tokens(prompt[::-1], 12, VOCAB)
    assert set(first.ends) == set(second.ends) == {0, 1, 2}


async def test_a_client_that_leaves_ends_its_sequences_and_no_other() -> None:
    core = CoreClient()
    multiplexer = EngineMultiplexer(core)
    first, second = Client(multiplexer), Client(multiplexer)
    first.submit(7, PROMPTS[0], 1000)
    second.submit(7, PROMPTS[1], 40)
    while not (first.tokens and second.tokens):
        await asyncio.sleep(0)
    first.engine.close()
    heard = {number: list(tokens) for number, tokens in first.tokens.items()}
    await until_ended(second)
    assert second.tokens[7] == expected_tokens(PROMPTS[1], 40, VOCAB)
    assert first.tokens == heard and not first.ends
    assert core.stats["running"] == 0
    assert not core.core.has_work


async def test_an_abort_names_the_clients_own_sequences_alone() -> None:
    multiplexer = EngineMultiplexer(CoreClient())
    first, second = Client(multiplexer), Client(multiplexer)
    first.submit(1, PROMPTS[0], 1000)
    second.submit(1, PROMPTS[1], 30)
    first.engine.abort([1, 2])
    await until_ended(first, second)
    assert isinstance(first.ends[1], Done) and first.ends[1].reason == "abort"
    assert len(second.tokens[1]) == 30


async def test_what_the_engine_refuses_leaves_nothing_behind() -> None:
    core = CoreClient()
    multiplexer = EngineMultiplexer(core)
    client = Client(multiplexer)
    submit, aborted = core.submit, []

    def refuse(submits: Sequence[Submit]) -> None:
        raise CapacityError("full")

    def abort(ids: Any) -> None:
        aborted.extend(ids)

    core.submit, core.abort = refuse, abort  # type: ignore[method-assign]
    with pytest.raises(CapacityError, match="full"):
        client.submit(3, PROMPTS[0])
    assert len(client.engine) == 0 and len(aborted) == 1
    core.submit = submit  # type: ignore[method-assign]
    client.submit(3, PROMPTS[0], 2)
    await until_ended(client)
    assert client.tokens[3] == expected_tokens(PROMPTS[0], 2, VOCAB)


async def test_all_clients_hear_of_the_engines_death_but_those_that_have_left() -> None:
    core = CoreClient()
    multiplexer = EngineMultiplexer(core)
    clients = [Client(multiplexer) for _ in range(3)]
    clients[1].engine.close()
    core.die()
    assert [len(client.deaths) for client in clients] == [1, 0, 1]


async def test_tokens_are_sent_once_and_given_up_when_no_client_uses_them() -> None:
    """A client that leaves gives up what it alone has used, but for the model's own tokens."""
    core = CoreClient()
    multiplexer = EngineMultiplexer(core)
    sent: list[Message] = []
    core.describe_tokens = sent.append  # type: ignore[method-assign]
    first, second = Client(multiplexer), Client(multiplexer)
    own, wide = (TokenTexts(array("i", [1]), b"a", (), key) for key in ("", "wide"))
    for client in (first, second):
        client.engine.describe_tokens(own)
        client.engine.describe_tokens(wide)
    assert sent == [own, wide]
    first.engine.describe_tokens(ForgetTokens("wide"))
    assert sent == [own, wide]
    first.engine.describe_tokens(wide)
    second.engine.describe_tokens(ForgetTokens("wide"))
    assert sent == [own, wide]
    first.engine.close()
    second.engine.close()
    assert sent == [own, wide, ForgetTokens("wide")]


async def test_every_client_hears_of_changed_adapters() -> None:
    core = CoreClient()
    multiplexer = EngineMultiplexer(core)
    heard: list[list[Message]] = []
    for _ in range(2):
        multiplexer.open_channel().on_frame = heard.append
    core.on_frame([AdapterChanged("a", None)])
    assert heard == [[AdapterChanged("a", None)]] * 2
