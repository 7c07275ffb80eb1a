"""A fleet over engine cores in this process: it is one engine to whoever uses it, whatever becomes of its replicas."""

from __future__ import annotations

import asyncio
import inspect
import random
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.engine.core_client import VOCAB, CoreClient
from support.engine.fake_worker import expected_tokens
from support.engine.made_fleet import Made, check_answers, submit

from rootgraft.engine.errors import AdapterUnavailable, EngineDead, RequestError, UnknownModel
from rootgraft.engine.messages import Done, Failed, Heartbeat, TokenTexts
from rootgraft.engine.serving.engine_client import EngineClient
from rootgraft.engine.types import FinishReason
from rootgraft.fleet import fleet as fleet_module
from rootgraft.fleet.fleet import MOST_FAILED_STARTS, Fleet
from rootgraft.fleet.replica_client import ReplicaClient
from rootgraft.fleet.scaling import autoscaling
from rootgraft.fleet.scaling.autoscaling import AutoscalePolicy
from rootgraft.lora.safe_paths import check_name

TEXTS = TokenTexts(array("i", [1] * 256 + [5]), bytes(range(256)) + b"<eos>", (256,))
SPEC = ("regex", b"[a-e]{12}")


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[Made]]]:
    made: list[Made] = []

    async def start(count: int = 3, policy: AutoscalePolicy | None = None, **options: Any) -> Made:
        made.append(Made(count, policy, **options))
        await made[-1].fleet.start()
        return made[-1]

    yield start
    for each in made:
        await each.fleet.close()
        assert all(client.closed for client in each.clients), "a replica was left behind"


def paths(client: CoreClient) -> list[str]:
    return [info.path for info in client.adapters.values()]


async def test_streams_outlive_their_replicas(make: Any) -> None:
    made, draw = await make(), random.Random(1)
    prompts = {number: [draw.randrange(VOCAB) for _ in range(draw.randint(1, 90))] for number in range(24)}
    made.fleet.submit([submit(number, prompt) for number, prompt in prompts.items()])
    turns = 0
    while len(made.ends) < len(prompts):
        await asyncio.sleep(0)
        turns += 1
        if turns in (20, 60, 100):
            draw.choice(made.serving).die()
    assert turns > 100 and made.fleet.num_replays > 10
    for number, prompt in prompts.items():
        assert made.tokens[number] == expected_tokens(prompt, 40, VOCAB)
        end = made.ends[number]
        assert isinstance(end, Done) and end.reason is FinishReason.LENGTH
        assert (end.usage.prompt, end.usage.completion) == (len(prompt), 40)
    await made.until(lambda: len(made.serving) == 3)


async def test_counters_never_go_back(make: Any) -> None:
    made = await make(2)
    made.fleet.submit([submit(number, [number]) for number in range(8)])
    await made.until(lambda: len(made.ends) == 8)
    before = made.fleet.stats
    assert before["generation_tokens"] == 320 and before["pages"] == 800 and made.heartbeats
    for client in made.serving:
        client.die()
    await made.until(lambda: len(made.serving) == 2)
    after = made.fleet.stats
    assert after["generation_tokens"] == 320 and after["finished_length"] == 8
    assert after.get("pages", 0) == after.get("running", 0) == 0  # of replicas that have not said anything yet


async def test_requests_wait_for_a_replica_to_come_back(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "rootgraft.fleet")
    made = await make(1)
    made.serving[0].die()
    assert made.fleet.is_alive and not made.serving
    made.fleet.submit([submit(1, [1, 2])])
    await made.until(lambda: 1 in made.ends)
    assert made.tokens[1] == expected_tokens([1, 2], 40, VOCAB)
    said = [record.getMessage() for record in caplog.records]
    assert said == ["replica-1 is lost: The engine process has ended.", "another replica has started: here"]


@pytest.mark.parametrize(("seconds", "waits"), [(60.0, True), (0.0, False)])
async def test_streams_go_on_before_another_replica_is_started(
    make: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, waits: bool
) -> None:
    monkeypatch.setattr(fleet_module, "RESUME_SECONDS", seconds)
    made = await make(2)
    interrupted: list[int] = []
    inner = made._make
    monkeypatch.setattr(
        made.fleet._launcher,
        "_make",
        lambda: (interrupted.append(made.fleet._dispatcher.num_interrupted), inner())[1],
    )
    made.fleet.submit([submit(number, [number] * 90) for number in range(8)])
    await made.until(lambda: len(made.tokens) == 8)
    made.serving[0].die()
    assert made.fleet._dispatcher.num_interrupted
    while len(made.serving) < 2:
        await asyncio.sleep(0.001)
    assert (interrupted == [0]) is waits


async def test_an_abort_reaches_the_replica(make: Any) -> None:
    made = await make(2)
    made.fleet.submit([submit(1, [1], max_tokens=500)])
    await made.until(lambda: 1 in made.tokens)
    made.fleet.abort([1])
    await made.until(lambda: 1 in made.ends)
    assert made.ends[1].reason is FinishReason.ABORT


async def test_a_fleet_whose_replicas_cannot_start_is_dead(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await make(2)
    deaths: list[EngineDead] = []
    made.fleet.on_death = deaths.append
    made.options = {"fails": EngineDead("no memory")}
    sleep = asyncio.sleep
    monkeypatch.setattr(fleet_module.asyncio, "sleep", lambda seconds: sleep(0))
    for client in made.serving:
        client.die()
    await made.until(lambda: bool(deaths))
    assert len(made.clients) >= 2 + MOST_FAILED_STARTS and "no memory" in str(made.fleet.death)
    with pytest.raises(EngineDead, match="no memory"):
        made.fleet.submit([submit(1, [1])])


async def test_a_start_that_fails_ends_all_replicas() -> None:
    made = Made(2, fails=EngineDead("no memory"))
    with pytest.raises(EngineDead, match="no memory"):
        await made.fleet.start()
    assert all(client.closed for client in made.clients)


async def test_another_base_model_is_no_replacement(make: Any) -> None:
    made = await make(2)
    made.options = {"base": "other"}
    made.serving[0].die()
    await made.until(lambda: len(made.clients) == 3 and made.clients[2].closed)
    assert len(made.serving) == 1
    made.options = {}


async def test_a_name_is_replaced_where_no_other_is_free(make: Any) -> None:
    made = await make(2)
    for client in made.serving:
        client.most_adapters = 2
    for name in ("sql", "fr"):
        await made.fleet.load_adapter(name, "one")
    await made.fleet.load_adapter("sql", "two", replace=True)
    with pytest.raises(AdapterUnavailable, match="the limit"):
        await made.fleet.load_adapter("es", "three")
    await made.fleet.load_adapter("sql", "three", replace=True)
    assert {name: info.path for name, info in made.fleet.adapters.items()} == {"sql": "three", "fr": "one"}


async def test_adapters_are_the_same_on_all_replicas(make: Any) -> None:
    made = await make(2, refused=("broken",))
    await made.fleet.load_adapter("sql", "one")
    with pytest.raises(RequestError, match="already loaded"):
        await made.fleet.load_adapter("sql", "two")
    await made.fleet.load_adapter("sql", "two", replace=True)
    with pytest.raises(RequestError, match="broken"):
        await made.fleet.load_adapter("bad", "broken")
    assert [(info.name, info.path) for info in made.fleet.adapters.values()] == [("sql", "two")]
    assert [(info.name, info.path) for info in await made.fleet.list_adapters()] == [("sql", "two")]
    made.serving[0].die()
    await made.until(lambda: len(made.serving) == 2)
    await made.until(lambda: all(paths(client) == ["two"] for client in made.serving))
    await made.fleet.unload_adapter("sql")
    await made.until(lambda: not any(client.adapters for client in made.serving))
    await made.until(lambda: len(made.changed) == 3)
    assert made.changed == ["sql"] * 3
    with pytest.raises(UnknownModel):
        await made.fleet.unload_adapter("sql")


async def test_a_version_is_kept_as_long_as_a_sequence_uses_it(make: Any) -> None:
    made = await make(1)
    await made.fleet.load_adapter("sql", "one")
    client = made.serving[0]
    client.kill()  # it takes no more: its sequence stays open
    made.fleet.submit([submit(1, [1], adapter="sql")])
    client.is_alive = True
    await made.fleet.load_adapter("sql", "two", replace=True)
    await asyncio.sleep(2 * fleet_module.TICK_SECONDS)
    assert {info.path for info in client.adapters.values()} == {"one", "two"}
    made.fleet.abort([1])
    made.fleet.submit([submit(2, [1], adapter="sql")])
    assert client.submits[-1].adapter == "sql@2"


async def test_a_replacement_has_the_versions_of_open_sequences(make: Any) -> None:
    made = await make(1)
    await made.fleet.load_adapter("sql", "one", trusted=True)
    client = made.serving[0]
    client.kill()  # it takes no more: its sequence stays open
    made.fleet.submit([submit(1, [1], adapter="sql")])
    client.is_alive = True
    await made.fleet.load_adapter("sql", "two", replace=True)
    client.die()
    await made.until(lambda: 1 in made.ends)
    joined = made.serving[0]
    assert joined.submits[0].adapter == "sql"
    assert sorted(joined.trusted) == [("sql", True), ("sql@2", False)]


async def test_a_version_never_has_the_name_of_another_adapter(make: Any) -> None:
    made = await make(2)
    await made.fleet.load_adapter("sql@2", "other")
    await made.fleet.load_adapter("sql", "one")
    await made.fleet.load_adapter("sql", "two", replace=True)
    await made.fleet.load_adapter("sql@3", "third")
    paths = {info.name: info.path for info in made.fleet.adapters.values()}
    assert paths == {"sql@2": "other", "sql": "two", "sql@3": "third"}


@pytest.mark.parametrize("fault", ["refused", "changed"])
async def test_a_replacement_goes_without_a_version_whose_files_are_gone_or_changed(make: Any, fault: str) -> None:
    made = await make(2)
    await made.fleet.load_adapter("sql", "one")
    await made.fleet.load_adapter("fr", "two")
    first, second = made.serving
    made.options = {fault: ("one",)}
    first.die()
    await made.until(lambda: len(made.serving) == 2)
    joined = made.serving[1]
    assert list(joined.adapters) == ["fr"]
    made.fleet.submit([submit(number, [number], adapter="sql") for number in range(6)])
    await made.until(lambda: len(made.ends) == 6)
    assert len(second.submits) == 6 and not joined.submits
    assert made.fleet.adapters.keys() == {info.name for info in await made.fleet.list_adapters()} == {"sql", "fr"}
    second.kill()  # it takes no more: its sequence stays open
    made.fleet.submit([submit(6, [1], adapter="sql")])
    second.die()  # the last that had it
    await made.until(lambda: 6 in made.ends)
    assert isinstance(made.ends[6], Failed) and "load it again" in made.ends[6].message
    made.options = {}
    await made.fleet.load_adapter("sql", "three", replace=True)
    made.fleet.submit([submit(7, [1], adapter="sql")])
    await made.until(lambda: 7 in made.ends)
    assert any(each.submits and each.submits[-1].adapter == "sql@2" for each in made.serving)


async def test_an_adapter_that_changes_while_it_is_loaded_is_refused(make: Any) -> None:
    made = await make(2)
    made.serving[0].changed = ("one",)
    with pytest.raises(RequestError, match="changed"):
        await made.fleet.load_adapter("sql", "one")
    assert not made.fleet.adapters and not any(client.adapters for client in made.serving)


async def test_names_of_the_replicas_versions_are_unknown(make: Any) -> None:
    made = await make(1)
    await made.fleet.load_adapter("sql", "one")
    await made.fleet.load_adapter("sql", "two", replace=True)
    with pytest.raises(UnknownModel, match="'sql@2'"):
        made.fleet.submit([submit(1, [1]), submit(2, [1], adapter="sql@2")])
    client = made.serving[0]
    client.kill()  # it takes no more: its sequence stays open
    made.fleet.submit([submit(3, [1], adapter="sql")])
    client.is_alive = True
    await made.fleet.unload_adapter("sql")
    with pytest.raises(UnknownModel, match="'sql@2'"):
        made.fleet.submit([submit(4, [1], adapter="sql@2")])
    assert "sql@2" in client.adapters and 1 not in made.ends


async def test_heartbeats_name_the_adapters_of_all_replicas(make: Any) -> None:
    made = await make(2)
    beats: list[Heartbeat] = []
    made.fleet.on_heartbeat = beats.append
    for path in ("one", "two"):
        await made.fleet.load_adapter("sql", path, replace=True)
    first, second = made.serving
    first.on_heartbeat(Heartbeat({}, {}, (("sql@2",), ("fr",))))
    second.on_heartbeat(Heartbeat({}, {}, (("de", "sql@2"), ())))
    assert beats[-1].adapters == (("de", "sql"), ("fr",))
    first.die()
    second.on_heartbeat(Heartbeat({}, {}, (("de",), ())))
    assert beats[-1].adapters == (("de",), ())


@pytest.mark.parametrize("name", ["a" * 256, "a" * 253 + "/bc", "a" * 254, "a" * 255])
async def test_versions_of_long_names_are_names_too(make: Any, name: str) -> None:
    made = await make(1)
    for path in ("one", "two", "three"):
        await made.fleet.load_adapter(name, path, replace=True)
    for version in made.serving[0].adapters:
        check_name(version)
    assert [(info.name, info.path) for info in made.fleet.adapters.values()] == [(name, "three")]


async def test_a_load_is_told_from_the_next_one_and_is_one_for_all_replicas(make: Any) -> None:
    """Tokenizers are kept by it: what another replica, or one that joins, calls its load is none."""
    made = await make(2)
    await made.fleet.load_adapter("sql", "one")
    first = made.fleet.adapters["sql"].loaded
    for member in made.serving:
        member.adapters["sql"] = replace(member.adapters["sql"], loaded=random.random())
        assert made.fleet.adapters["sql"].loaded == first > 1e9
    await made.fleet.load_adapter("sql", "one", replace=True)
    assert made.fleet.adapters["sql"].loaded > first


async def test_loads_at_once_do_not_unload_each_other(make: Any) -> None:
    made = await make(2)
    first, second = (made.fleet.load_adapter("sql", path) for path in ("one", "two"))
    outcomes = await asyncio.gather(first, second, return_exceptions=True)
    assert outcomes[0] is None and isinstance(outcomes[1], RequestError)
    assert [info.path for info in made.fleet.adapters.values()] == ["one"]


@pytest.mark.parametrize("is_unloaded", [False, True])
async def test_calls_about_a_name_take_effect_in_their_order(
    make: Any, monkeypatch: pytest.MonkeyPatch, *, is_unloaded: bool
) -> None:
    """A load that takes long is not the last word where another one, or an unload, was asked for after it."""
    made, gate = await make(2), asyncio.Event()
    load_adapter = CoreClient.load_adapter

    async def gated(client: CoreClient, name: str, path: str, **options: Any) -> None:
        if path == "slow":
            await gate.wait()
        await load_adapter(client, name, path, **options)

    monkeypatch.setattr(CoreClient, "load_adapter", gated)
    await made.fleet.load_adapter("sql", "first")
    calls = [asyncio.create_task(made.fleet.load_adapter("sql", "slow", replace=True))]
    await asyncio.sleep(0)
    last = made.fleet.unload_adapter("sql") if is_unloaded else made.fleet.load_adapter("sql", "fast", replace=True)
    calls.append(asyncio.create_task(last))
    for _ in range(20):
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*calls)
    assert {name: info.path for name, info in made.fleet.adapters.items()} == ({} if is_unloaded else {"sql": "fast"})


def test_it_has_the_methods_of_an_engine_client() -> None:
    for name, method in vars(EngineClient).items():
        if inspect.isfunction(method) and not name.startswith("_") and not hasattr(asyncio.Protocol, name):
            if name not in ("prepare_grammar", "carry"):  # which a fleet asks of its replicas
                signature = inspect.signature(method)
                asked = [each for each in signature.parameters.values() if each.name != "of"]  # likewise
                assert inspect.signature(getattr(Fleet, name)) == signature.replace(parameters=asked), name
            assert inspect.signature(getattr(ReplicaClient, name)) == inspect.signature(method), name


async def test_its_status_tells_of_losses_and_drains(make: Any) -> None:
    made = await make(2)
    await made.fleet.load_adapter("sql", "one")
    await made.fleet.load_adapter("sql", "two", replace=True)
    made.fleet.submit([submit(number, [number], adapter="sql") for number in range(8)])
    made.fleet.submit([submit(number + 8, [number], 90) for number in range(8)])
    await made.until(lambda: len(made.tokens) == 8)
    before = made.fleet.status()
    assert [(each.name, each.engine, each.state) for each in before.replicas] == [
        ("replica-1", 0, "serving"), ("replica-2", 1, "serving"),
    ]  # fmt: skip
    assert {each.adapters for each in before.replicas} == {(), ("sql",)} and before.num_started == 2
    made.serving[0].die()
    assert (made.fleet.status().num_lost, made.fleet.status().num_starting) == (1, 1)
    await made.until(lambda: len(made.serving) == 2 and len(made.ends) == 16)
    after = made.fleet.status()
    assert [(each.name, each.engine) for each in after.replicas] == [("replica-2", 1), ("replica-3", 0)]
    assert after.num_replays == made.fleet.num_replays > 0 and after.num_started == 3
    counted = made.fleet.engine_stats()
    assert sum(stats["generation_tokens"] for stats in counted.values()) == made.fleet.stats["generation_tokens"]
    made.fleet.scale(1)
    assert sorted(each.state for each in made.fleet.status().replicas) == ["draining", "serving"]
    await made.until(lambda: len(made.serving) == 1)
    last = made.fleet.status()
    assert (last.wanted, last.num_drained, last.num_lost) == (1, 1, 1)
    assert made.fleet.engine_stats()[0]["generation_tokens"] >= counted[0]["generation_tokens"]


async def test_scaling_up_and_down_breaks_no_stream(make: Any) -> None:
    made, prompts = await make(1), {number: [number % VOCAB, 3] for number in range(24)}
    made.fleet.submit([submit(number, prompt, 90) for number, prompt in prompts.items()])
    made.fleet.scale(3)
    await made.until(lambda: len(made.serving) == 3)
    made.fleet.submit([submit(number + 100, prompt, 90) for number, prompt in prompts.items()])
    made.fleet.scale(1)
    await made.until(lambda: len(made.ends) == 48)
    for number, prompt in prompts.items():
        assert made.tokens[number] == made.tokens[number + 100] == expected_tokens(prompt, 90, VOCAB)
    await made.until(lambda: len(made.serving) == 1)
    assert len(made.clients) == 3 and made.fleet.num_lost == 0


async def test_a_fleet_starts_as_many_replicas_as_it_was_asked_for(make: Any) -> None:
    made = await make(3)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(made.clients) == len(made.serving) == 3


async def test_sequences_of_a_replica_that_drains_for_too_long_go_on_elsewhere(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_module, "DRAIN_SECONDS", 0.0)
    monkeypatch.setattr(fleet_module, "TICK_SECONDS", 0.0)
    made, prompts = await make(2), {number: [number % VOCAB, 3] for number in range(8)}
    made.fleet.submit([submit(number, prompt, 300) for number, prompt in prompts.items()])
    await made.until(lambda: len(made.tokens) == 8)
    made.fleet.scale(1)
    await made.until(lambda: len(made.ends) == 8)
    assert made.fleet.num_replays and made.fleet.num_lost == 0 and len(made.serving) == 1
    for number, prompt in prompts.items():
        assert made.tokens[number] == expected_tokens(prompt, 300, VOCAB)


async def test_a_fleet_is_never_scaled_to_nothing(make: Any) -> None:
    made = await make(1)
    with pytest.raises(ValueError, match="at least 1"):
        made.fleet.scale(0)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle replicas go at once; the last one does by its policy's ``idle_seconds``."""
    monkeypatch.setattr(autoscaling, "DOWN_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(fleet_module, "TICK_SECONDS", 0.0)


async def test_from_none_the_first_request_is_held_and_answered(make: Any, hasty: None) -> None:
    made = await make(1, AutoscalePolicy(least=0, most=2, rows=4, idle_seconds=0))
    await made.fleet.load_adapter("sql", "one")
    await made.until(lambda: not made.serving)
    status = made.fleet.status()
    assert (status.wanted, status.num_drained, status.num_lost, status.bounds) == (0, 1, 0, (0, 2))
    assert made.fleet.is_alive and made.fleet.adapters.keys() == {"sql"}
    assert [info.path for info in await made.fleet.list_adapters()] == ["one"]
    with pytest.raises(EngineDead, match="No replica"):
        await made.fleet.take_snapshot()
    made.fleet.submit([submit(1, [1, 2], adapter="sql")])
    assert (made.fleet.status().num_held, made.fleet.status().num_starting) == (1, 1)
    made.fleet.submit([submit(2, [1, 2])])
    await made.until(lambda: len(made.ends) == 2)
    assert isinstance(made.ends[2], Done) and made.tokens[2] == expected_tokens([1, 2], 40, VOCAB)
    assert [each.adapter for each in made.clients[1].submits] == ["sql", None]


async def test_an_adapter_is_loaded_where_no_replica_runs(make: Any, hasty: None) -> None:
    made = await make(1, AutoscalePolicy(least=0, most=2, rows=4, idle_seconds=0))
    await made.until(lambda: not made.serving)
    await made.fleet.load_adapter("sql", "one")
    assert made.fleet.adapters.keys() == {"sql"} and len(made.clients) == 2
    await made.until(lambda: not made.serving)
    await made.fleet.unload_adapter("sql")
    assert not made.fleet.adapters


async def test_the_number_of_replicas_follows_the_load(make: Any, hasty: None) -> None:
    made = await make(1, AutoscalePolicy(least=1, most=3, rows=4))
    prompts = {number: [number % VOCAB, 3] for number in range(20)}
    made.fleet.submit([submit(number, prompt, 200) for number, prompt in prompts.items()])
    await made.until(lambda: len(made.serving) == 3)
    made.fleet.submit([submit(number + 100, prompt, 200) for number, prompt in prompts.items()])
    await made.until(lambda: len(made.ends) == 40 and len(made.serving) == 1)
    for number, prompt in prompts.items():
        assert made.tokens[number] == made.tokens[number + 100] == expected_tokens(prompt, 200, VOCAB)
    status = made.fleet.status()
    assert status.num_scaled_up >= 1 and status.num_scaled_down >= 2 and status.num_lost == 0
    assert len(made.fleet.replicas) <= 3


async def test_a_replica_that_drains_is_taken_back_before_another_is_started(make: Any) -> None:
    made = await make(2)
    made.fleet.submit([submit(number, [number], 500) for number in range(8)])
    await made.until(lambda: len(made.tokens) == 8)
    made.fleet.scale(1)
    made.fleet.scale(2)
    assert [each.state for each in made.fleet.status().replicas] == ["serving", "serving"]
    made.fleet.submit([submit(number + 8, [number], 40) for number in range(8)])
    await made.until(lambda: len(made.ends) == 16)
    assert len(made.clients) == 2 and all(len(client.submits) > 4 for client in made.clients)


async def test_requests_may_name_an_adapter_while_no_replica_runs(make: Any) -> None:
    made = await make(1)
    await made.fleet.load_adapter("sql", "one")
    made.serving[0].die()
    assert not made.serving and made.fleet.adapters.keys() == {"sql"}
    made.fleet.submit([submit(1, [1], adapter="sql")])
    await made.until(lambda: 1 in made.ends)
    assert made.clients[1].submits[0].adapter == "sql"


async def test_two_replicas_that_are_lost_at_once_lose_nothing(make: Any) -> None:
    made = await make(3)
    prompts = {number: [number % VOCAB, 3, 1] for number in range(24)}
    made.fleet.submit([submit(number, prompt) for number, prompt in prompts.items()])
    await made.until(lambda: len(made.tokens) >= 12)
    for client in made.serving[:2]:
        client.die()
    await made.until(lambda: len(made.ends) == len(prompts) and len(made.serving) == 3)
    check_answers(made, prompts, 40)
    assert made.fleet.num_lost == 2


@pytest.mark.parametrize("steps", [1, 2, 5])
async def test_a_replica_that_is_lost_in_prefill_loses_nothing(make: Any, steps: int) -> None:
    """Prompts of many steps, of which some are computed and none has a token."""
    made = await make(2)
    prompts = {number: [(number + each) % VOCAB for each in range(300)] for number in range(6)}
    made.fleet.submit([submit(number, prompt, 8) for number, prompt in prompts.items()])
    victim = made.serving[0]
    await made.until(lambda: victim.stats.get("steps", 0) >= steps)
    assert not made.tokens and victim.submits
    victim.die()
    await made.until(lambda: len(made.ends) == len(prompts))
    check_answers(made, prompts, 8)


async def test_a_replica_that_is_lost_while_it_compiles_loses_nothing(make: Any) -> None:
    """A grammar whose sequences have not begun; they go on where it is compiled again, with the same tokens."""
    prompts = {number: [number % VOCAB, 7] for number in range(6)}
    answers = []
    for count, is_lost in ((1, False), (2, True)):
        made = await make(count, vocab_size=257, eos=(256,))
        made.fleet.describe_tokens(TEXTS)
        made.fleet.submit([submit(number, prompt, 12, grammar=SPEC) for number, prompt in prompts.items()])
        victim = made.serving[0]
        assert victim.submits and not made.tokens
        if is_lost:
            victim.die()
        await made.until(lambda made=made: len(made.ends) == len(prompts))
        assert not [end for end in made.ends.values() if not isinstance(end, Done)]
        assert made.fleet.num_lost == is_lost and set(made.ends) == set(prompts)
        answers.append(made.tokens)
    assert answers[0] == answers[1] and all(len(tokens) == 12 for tokens in answers[0].values())


async def test_a_replica_that_is_lost_while_it_drains_loses_nothing(make: Any) -> None:
    made = await make(2)
    prompts = {number: [number % VOCAB, 5] for number in range(8)}
    made.fleet.submit([submit(number, prompt, 200) for number, prompt in prompts.items()])
    await made.until(lambda: len(made.tokens) == len(prompts))
    made.fleet.scale(1)
    [draining] = [
        client
        for client, status in zip(made.fleet.replicas.values(), made.fleet.status().replicas, strict=True)
        if status.state == "draining"
    ]
    draining.die()
    await made.until(lambda: len(made.ends) == len(prompts))
    check_answers(made, prompts, 200)
    assert len(made.serving) == 1 and made.fleet.num_replays


async def answered_with_a_loss(made: Made, prompts: dict[int, list[int]], max_tokens: int) -> None:
    """Ask a fleet without replicas, and kill one once there is a token."""
    await made.until(lambda: not made.serving)
    made.fleet.submit([submit(number, prompt, max_tokens) for number, prompt in prompts.items()])
    await made.until(lambda: bool(made.tokens.keys() & prompts.keys()))
    made.serving[-1].die()
    await made.until(lambda: made.ends.keys() >= prompts.keys())


async def test_waves_from_none_to_all_and_back_lose_nothing(make: Any, hasty: None) -> None:
    """With a loss in each wave, while replicas come and go."""
    made = await make(1, AutoscalePolicy(least=0, most=3, rows=4, idle_seconds=0))
    waves = [{100 * wave + number: [number % VOCAB, wave] for number in range(16)} for wave in range(3)]
    for prompts in waves:
        await answered_with_a_loss(made, prompts, 60)
    check_answers(made, waves[0] | waves[1] | waves[2], 60)
    assert made.fleet.num_lost == 3


async def test_a_replica_that_is_lost_while_it_loads_an_adapter(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load goes on where it can, the loss is replaced, and its replacement has the adapter too."""
    made = await make(2)
    victim, gate = made.serving[0], asyncio.Event()
    begun: list[str] = []

    async def stuck(name: str, path: str, **_: Any) -> None:
        begun.append(name)
        await gate.wait()
        raise EngineDead("The engine process has ended.")

    monkeypatch.setattr(victim, "load_adapter", stuck)
    load = asyncio.ensure_future(made.fleet.load_adapter("sql", "one"))
    await made.until(lambda: bool(begun))
    victim.die()
    gate.set()
    await load
    await made.until(lambda: len(made.serving) == 2)
    assert made.fleet.adapters.keys() == {"sql"}
    await made.until(lambda: all(paths(client) == ["one"] for client in made.serving))


@pytest.mark.parametrize("call", ["list_adapters", "take_snapshot"])
async def test_a_replica_that_is_lost_while_it_is_asked(make: Any, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Another one is asked in its place."""
    made = await make(2)
    await made.fleet.load_adapter("sql", "one")
    victim, other = made.serving
    asked: list[str] = []

    async def lost() -> Any:
        asked.append(call)
        victim.die()
        raise EngineDead("The engine process has ended.")

    monkeypatch.setattr(victim, call, lost)
    monkeypatch.setitem(victim.stats, "running", 1.0)
    answer = await getattr(made.fleet, call)()
    assert asked == [call]
    assert answer is other if call == "take_snapshot" else [info.name for info in answer] == ["sql"]


async def test_adapters_are_told_where_all_replicas_are_lost_while_they_are_asked(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await make(2)
    await made.fleet.load_adapter("sql", "one")
    [first, second] = made.serving

    async def lost(client: CoreClient) -> Any:
        client.die()
        raise EngineDead("The engine process has ended.")

    for client in (first, second):
        monkeypatch.setattr(client, "list_adapters", partial(lost, client))
        monkeypatch.setattr(client, "take_snapshot", partial(lost, client))
    assert [(info.name, info.path) for info in await made.fleet.list_adapters()] == [("sql", "one")]
    assert not (first.is_alive or second.is_alive)
