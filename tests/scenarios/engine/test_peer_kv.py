"""KV from one replica of a fleet to another: the same tokens, with fewer computed, whatever becomes of the copy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.engine.core_client import VOCAB, CoreClient
from support.engine.fake_worker import expected_tokens
from support.engine.made_fleet import Made, check_answers, submit
from support.machine.waits import HANG_SECONDS

from rootgraft.engine.core import kv_exports
from rootgraft.engine.kv_cache import peer_reads
from rootgraft.engine.kv_cache.state_cache import StateSlots
from rootgraft.engine.messages import Done, KvBlocks, ReadKv
from rootgraft.fleet import fleet as fleet_module
from rootgraft.fleet.scaling.autoscaling import AutoscalePolicy

DOCUMENT = [random.Random(f"3 {each}").randrange(VOCAB) for each in range(640)]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[Made]]]:
    # On a busy machine an answer may take longer than a request would wait for it.
    monkeypatch.setattr(peer_reads, "ANSWER_SECONDS", HANG_SECONDS)
    made: list[Made] = []

    async def start(count: int = 2, policy: AutoscalePolicy | None = None, **options: Any) -> Made:
        made.append(Made(count, policy, **options))
        await made[-1].fleet.start()
        return made[-1]

    yield start
    for each in made:
        await each.fleet.close()


def questions(first: int, count: int = 72) -> dict[int, list[int]]:
    """So many that one replica does not get them all, each with the document before it."""
    return {first + each: [*DOCUMENT, each % VOCAB, each // VOCAB] for each in range(count)}


def computed(client: CoreClient) -> float:
    """Return the tokens that a replica has computed but for drafts, which are as many as steps are quick."""
    return client.stats["computed_tokens"] - client.stats["draft_tokens"]


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
    assert computed(other) < len(DOCUMENT), "the document was computed again"
    assert other.stats["kv_pages_peer"] == 0, "they are in the tree now"
    del made.tokens[0], made.ends[0]
    check_answers(made, questions(1), 4)


async def test_a_recurrent_state_comes_with_its_pages(make: Any) -> None:
    made = await make(states=StateSlots(4, 40, 16))
    holder = await begin(made)
    [other] = [client for client in made.clients if client is not holder]
    await ask(made, questions(1))
    assert other.stats["kv_hits_peer"] > len(DOCUMENT) // 4 - 4, "pages up to the last state, and the state"
    assert computed(other) < len(DOCUMENT), "the document was computed again"
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


# All fit the pool of a replica at once: what is evicted before it is copied is computed again.
LONG = {number: [(number * each) % VOCAB for each in range(1, 300)] for number in range(1, 5)}


def with_role(made: Made, role: str) -> list[CoreClient]:
    status = made.fleet.status().replicas
    return [made.fleet.replicas[each.name] for each in status if each.role == role]  # type: ignore[misc]


async def test_prompts_are_computed_on_one_replica_and_answered_on_another(make: Any) -> None:
    made = await make(2, roles=("prefill", "decode"))
    [prefill], [decode] = with_role(made, "prefill"), with_role(made, "decode")
    await ask(made, LONG, 20)
    check_answers(made, LONG, 20)
    assert len(prefill.submits) == len(decode.submits) == len(LONG)
    assert all(len(each.generated) >= 1 for each in decode.submits)
    whole = sum(len(prompt) // 4 for prompt in LONG.values())
    assert decode.stats["kv_hits_peer"] == decode.stats["kv_stored_peer"], "a page went twice"
    assert whole <= decode.stats["kv_hits_peer"] <= whole + len(LONG), "the first tokens may end a page"
    assert computed(decode) < len(LONG) * (20 + 2 * 4), "a prompt was computed there"
    assert all(end.usage.cached == 0 for end in made.ends.values()), "nothing was cached before"  # type: ignore[union-attr]
    assert made.fleet.num_replays == 0


async def test_a_short_prompt_is_computed_where_it_is_answered(make: Any) -> None:
    made = await make(2, roles=("prefill", "decode"))
    await ask(made, {1: LONG[1][:200]}, 20)
    assert not with_role(made, "prefill")[0].submits


async def test_the_next_call_of_a_conversation_stays_where_its_kv_is(make: Any) -> None:
    made = await make(2, roles=("prefill", "decode"))
    await ask(made, {1: LONG[1]}, 20)
    following = [*LONG[1], *made.tokens[1], 1, 2, 3]
    await ask(made, {2: following}, 20)
    [prefill], [decode] = with_role(made, "prefill"), with_role(made, "decode")
    assert len(prefill.submits) == 1 and len(decode.submits) == 2
    assert made.tokens[2] == expected_tokens(following, 20, VOCAB)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("turns", [1, 8, 12, 16, 40])
async def test_either_side_may_be_lost_at_any_time(make: Any, role: str, turns: int) -> None:
    made = await make(2, roles=("prefill", "decode"))
    made.fleet.submit([submit(number, prompt, 30) for number, prompt in LONG.items()])
    [victim] = with_role(made, role)
    for _ in range(turns):
        await asyncio.sleep(0)
    victim.die()
    await made.until(lambda: made.ends.keys() == LONG.keys())
    check_answers(made, LONG, 30)
    await made.until(lambda: len(made.serving) == 2)
    assert {status.role for status in made.fleet.status().replicas} == {"prefill", "decode"}


async def test_a_replica_that_drains_hands_its_kv_over(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "DRAIN_SECONDS", 0.0)
    monkeypatch.setattr(fleet_module, "TICK_SECONDS", 0.0)
    made = await make(2)
    made.fleet.submit([submit(number, prompt, 400) for number, prompt in LONG.items()])
    await made.until(lambda: len(made.tokens) == len(LONG) and all(client.submits for client in made.clients))
    made.fleet.scale(1)
    await made.until(lambda: made.ends.keys() == LONG.keys())
    check_answers(made, LONG, 400)
    [left] = made.serving
    assert left.stats["kv_hits_peer"] > 60, "prompts were computed again"
    assert made.fleet.num_lost == 0


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ticks in each turn of the loop."""
    monkeypatch.setattr(fleet_module, "TICK_SECONDS", 0.0)


def following(made: Made, number: int) -> list[int]:
    """The next call of a conversation."""
    return [*LONG[number], *made.tokens[number], 1, 2, 3]


async def test_a_replica_that_drains_hands_its_sessions_over(make: Any, hasty: None) -> None:
    made = await make(2)
    made.fleet.submit([submit(number, prompt, 20, session=f"chat {number}") for number, prompt in LONG.items()])
    await made.until(lambda: made.ends.keys() == LONG.keys())
    assert all(client.submits for client in made.clients)
    made.fleet.scale(1)
    await made.until(lambda: len(made.fleet.replicas) == 1)
    [left] = made.serving
    before = computed(left)
    for number in LONG:
        await ask(made, {10 + number: following(made, number)}, 4)
        assert made.tokens[10 + number] == expected_tokens(following(made, number), 4, VOCAB)
    assert computed(left) - before < 4 * 16, "a conversation was computed again"
    assert left.stats["kv_hits_peer"] > 60 and made.fleet.num_lost == 0


async def test_a_replica_that_joins_gets_the_hottest_prefixes(make: Any, hasty: None) -> None:
    made = await make(1)
    for number in range(3):
        await ask(made, {number: [*DOCUMENT, number]}, 1)
    await ask(made, {3: LONG[1]}, 1)  # nobody asks for this one again
    made.fleet.scale(2)
    await made.until(lambda: len(made.serving) == 2)
    new = made.clients[1]
    await made.until(lambda: new.core.stats()["kv_pages_peer"] == len(DOCUMENT) // 4)
    await ask(made, questions(10))
    assert new.submits and computed(new) < len(DOCUMENT), "the document was computed again"
    assert all(submit.peer_tokens == 0 for submit in new.submits), "it had to ask for the document"
    for number, prompt in questions(10).items():
        assert made.tokens[number] == expected_tokens(prompt, 4, VOCAB)


@pytest.mark.parametrize("victim", ["source", "target"])
async def test_a_replica_that_is_lost_in_a_handover(
    make: Any, hasty: None, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    monkeypatch.setattr(kv_exports, "STEP_BYTES", 10_000)  # two pages with their headers
    made = await make(1)
    for number in range(3):
        await ask(made, {number: [*DOCUMENT, number]}, 1)
    made.fleet.scale(2)
    await made.until(lambda: len(made.serving) == 2 and bool(made.clients[1].core.stats()["kv_pages_peer"]))
    made.clients[victim == "target"].die()
    await ask(made, questions(10))
    for number, prompt in questions(10).items():
        assert made.tokens[number] == expected_tokens(prompt, 4, VOCAB)
    await made.until(lambda: len(made.serving) == 2)


async def test_what_was_computed_outlives_a_fleet_of_no_replicas(make: Any, hasty: None, tmp_path: Path) -> None:
    made = await make(1, AutoscalePolicy(least=0, most=2, rows=4, idle_seconds=0.0), disk=tmp_path)
    await ask(made, LONG, 20)
    await made.until(lambda: not made.fleet.replicas)
    await ask(made, {10: following(made, 1)}, 4)
    assert made.tokens[10] == expected_tokens(following(made, 1), 4, VOCAB)
    end = made.ends[10]
    assert len(made.clients) == 2 and isinstance(end, Done) and end.usage.cached >= len(LONG[1])
    assert made.clients[1].stats["kv_hits_disk"] >= len(LONG[1]) // 4
