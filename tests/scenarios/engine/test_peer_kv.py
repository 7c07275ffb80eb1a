"""KV from one replica of a fleet to another: the same tokens, with fewer computed, whatever becomes of the copy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from support.engine.core_client import VOCAB, CoreClient
from support.engine.made_fleet import Made, check_answers, submit

from rootgraft.engine.core import kv_exports
from rootgraft.engine.messages import KvBlocks, ReadKv

DOCUMENT = [random.Random(3).randrange(VOCAB) for _ in range(640)]


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Awaitable[Made]]]:
    made: list[Made] = []

    async def start(count: int = 2, **options: Any) -> Made:
        made.append(Made(count, **options))
        await made[-1].fleet.start()
        return made[-1]

    yield start
    for each in made:
        await each.fleet.close()


def questions(first: int, count: int = 72) -> dict[int, list[int]]:
    """So many that one replica does not get them all, each with the document before it."""
    return {first + each: [*DOCUMENT, each % VOCAB, each // VOCAB] for each in range(count)}


async def ask(made: Made, prompts: dict[int, list[int]], max_tokens: int = 4, **fields: Any) -> None:
    made.fleet.submit([submit(number, prompt, max_tokens, **fields) for number, prompt in prompts.items()])
    await made.until(lambda: prompts.keys() <= made.ends.keys())


async def begin(made: Made, **fields: Any) -> CoreClient:
    """Have the document computed. Returns where."""
    await ask(made, {0: DOCUMENT}, 1, **fields)
    [holder] = [client for client in made.clients if client.submits]
    return holder


async def test_a_replica_gets_the_prefix_that_another_one_has(make: Any) -> None:
    made = await make()
    holder = await begin(made)
    [other] = [client for client in made.clients if client is not holder]
    await ask(made, questions(1))
    assert other.submits, "one replica has got them all"
    assert other.stats["kv_hits_peer"] == other.stats["kv_stored_peer"] == len(DOCUMENT) // 4
    assert other.stats["computed_tokens"] < len(DOCUMENT), "the document was computed again"
    assert other.stats["kv_pages_peer"] == 0, "they are in the tree now"
    del made.tokens[0], made.ends[0]
    check_answers(made, questions(1), 4)


@pytest.mark.parametrize("field", ["salt", "cache_tenant"])
async def test_what_belongs_to_others_is_not_copied(make: Any, field: str) -> None:
    """Each request has its own: none of them gets what another one has."""
    made = await make()
    await begin(made)
    prompts = questions(1, 8)
    made.fleet.submit([submit(number, prompt, 4, **{field: str(number)}) for number, prompt in prompts.items()])
    await made.until(lambda: prompts.keys() <= made.ends.keys())
    assert all(client.submits for client in made.clients)
    assert not any(client.stats["kv_stored_peer"] for client in made.clients)
    del made.tokens[0], made.ends[0]
    check_answers(made, prompts, 4)


async def test_a_replica_that_has_lost_the_prefix_says_so(make: Any) -> None:
    made = await make()
    holder = await begin(made)
    holder.core.reset_cache()
    [other] = [client for client in made.clients if client is not holder]
    await ask(made, questions(1))
    assert other.submits
    del made.tokens[0], made.ends[0]
    check_answers(made, questions(1), 4)


@pytest.mark.parametrize("kind", [ReadKv, KvBlocks], ids=["asked", "answered in part"])
async def test_a_source_that_is_lost_in_the_copy(make: Any, monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> None:
    monkeypatch.setattr(kv_exports, "STEP_BYTES", 10_000)  # two pages with their headers
    made = await make()
    holder = await begin(made)
    num_seen = 0

    def dies_after(inner: Callable[[Any], None]) -> Callable[[Any], None]:
        def carry(messages: Any) -> None:
            nonlocal num_seen
            inner(messages)
            num_seen += sum(isinstance(each, kind) for each in messages)
            if num_seen and holder.is_alive:
                holder.kill()
                asyncio.get_running_loop().call_soon(holder.die)

        return carry

    for client in made.clients:
        client.carry = dies_after(client.carry)  # type: ignore[method-assign]
    await ask(made, questions(1))
    assert num_seen and made.fleet.num_lost == 1
    del made.tokens[0], made.ends[0]
    check_answers(made, questions(1), 4)


async def test_blocks_that_are_damaged_are_computed(make: Any) -> None:
    made = await make()
    holder = await begin(made)
    draw = random.Random(7)

    def damage(inner: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        def on_frame(messages: list[Any]) -> None:
            changed = []
            for message in messages:
                if isinstance(message, KvBlocks):
                    blocks = [bytearray(block) for block in message.blocks]
                    for block in blocks[5:]:
                        block[draw.randrange(len(block))] ^= 1 << draw.randrange(8)
                    message = KvBlocks(message.id, tuple(map(bytes, blocks)), message.is_last)
                changed.append(message)
            inner(changed)

        return on_frame

    holder.on_frame = damage(holder.on_frame)
    await ask(made, questions(1))
    [other] = [client for client in made.clients if client is not holder]
    assert other.stats["kv_hits_peer"] == 5
    del made.tokens[0], made.ends[0]
    check_answers(made, questions(1), 4)
