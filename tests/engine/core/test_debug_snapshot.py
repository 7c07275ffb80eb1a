"""Snapshots of a working engine: right in every number, bounded in size, and without a token of anybody's."""

from __future__ import annotations

import dataclasses
import random
from array import array
from pathlib import Path

import pytest
from support.engine.adapter_engine import Engine, write
from support.engine.fake_worker import FakeWorker

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core import debug_snapshot
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import SnapshotTaken, Submit, TakeSnapshot, decode, encode
from rootgraft.engine.snapshot import EngineSnapshot, NamespaceView, SlotView
from rootgraft.engine.types import SamplingParams


def snapshot_of(core: EngineCore) -> EngineSnapshot:
    """As the client gets it; the engine takes a step."""
    core.handle([TakeSnapshot(5)])
    [taken] = [message for message in decode(encode(core.step())) if isinstance(message, SnapshotTaken)]
    assert taken.id == 5
    return taken.snapshot


def plain_core(**options: object) -> EngineCore:
    config = EngineConfig(block_size=4, **{"max_num_seqs": 4, "max_num_batched_tokens": 16, **options})  # type: ignore
    return EngineCore(config, FakeWorker(600, 4))


def submit(
    core: EngineCore, number: int, prompt: list[int], count: int, tenant: str = "", salt: str = "", pin: float = 0.0
) -> None:
    params = SamplingParams(max_tokens=count)
    tokens = array("i", prompt)
    core.handle([Submit(number, tokens, params, None, salt, tenant=tenant, cache_tenant=tenant, pin_seconds=pin)])


def test_an_idle_engine() -> None:
    seen = snapshot_of(plain_core())
    assert (seen.nodes, seen.sequences, seen.slots, seen.hidden_tokens) == ((), (), (), 0)
    assert seen.page_size == 4 and seen.stats["pages"] == 600


def test_sequences_and_the_nodes_that_they_extend() -> None:
    core = plain_core()
    prompt = list(range(10))
    submit(core, 1, prompt, 3)
    while core.has_work:
        core.step()
    submit(core, 2, [*prompt, 10], 40, tenant="t")
    submit(core, 3, prompt, 40)
    core.step()
    core.step()
    seen = snapshot_of(core)  # of before the step that it takes with it
    second, third = seen.sequences
    assert (second.id, second.tenant, second.cached, second.prompt) == (2, "t", 0, 11)
    assert (third.id, third.cached, third.prompt, third.adapter, third.structured) == (3, 9, 10, None, False)
    assert third.tokens == third.prompt + third.generated and third.computed == third.tokens - 1 and third.seconds >= 0
    for each in (second, third):
        node = seen.nodes[each.node]
        assert node.leases == 1 and each.shared % 4 == 0 and each.shared <= each.computed
        depth, place = 0, each.node
        while place >= 0:
            depth, place = depth + seen.nodes[place].tokens, seen.nodes[place].parent
        assert depth == each.shared
    tenants = {seen.namespaces[seen.nodes[each.node].namespace].tenant for each in (second, third)}
    assert tenants == {"", "t"}


def test_the_seconds_of_steps_have_parts() -> None:
    core = plain_core()
    submit(core, 1, [1, 2, 3], 5)
    while core.has_work:
        core.step()
    stats = core.stats()
    parts = [stats[f"seconds_{part}"] for part in ("schedule", "commit")]
    assert all(part > 0 for part in parts) and sum(parts) <= stats["seconds_step"]


def test_salts_and_tenants_are_told_apart_and_not_told() -> None:
    core = plain_core()
    for number, (tenant, salt) in enumerate([("", ""), ("", "secret"), ("team", ""), ("team", "secret")]):
        submit(core, number, list(range(9)), 2, tenant, salt)
    while core.has_work:
        core.step()
    seen = snapshot_of(core)
    expected = {NamespaceView(None, tenant, salted) for tenant in ("", "team") for salted in (False, True)}
    assert set(seen.namespaces) == expected and len(seen.namespaces) == 4
    assert b"secret" not in encode([SnapshotTaken(1, seen)])


def test_pins_are_marked() -> None:
    core = plain_core()
    submit(core, 1, list(range(12)), 2, pin=1000.0)
    submit(core, 2, [9] * 12, 2)
    while core.has_work:
        core.step()
    pinned = [node.tokens for node in snapshot_of(core).nodes if node.pinned]
    assert pinned == [12]


def test_a_large_tree_is_shown_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_snapshot, "MOST_NODES", 30)
    monkeypatch.setattr(debug_snapshot, "MOST_SEQUENCES", 2)
    core, rng = plain_core(), random.Random(3)
    for number in range(60):
        submit(core, number, [rng.randrange(2) for _ in range(20)], 4)
    while core.has_work:
        core.step()
    for number in range(100, 104):
        submit(core, number, [rng.randrange(2) for _ in range(20)], 30)
    for _ in range(4):
        core.step()
    seen = snapshot_of(core)
    assert len(seen.nodes) == 30 and len(seen.sequences) == 2 and seen.stats["running"] == 4
    shown = sum(-(-node.tokens // 4) for node in seen.nodes) * 4
    assert shown + seen.hidden_tokens == seen.stats["pages_cached"] * 4 and seen.hidden_tokens > 0
    assert all(node.parent < place for place, node in enumerate(seen.nodes))


def test_nothing_of_a_prompt_is_in_it() -> None:
    """Views hold numbers, flags and the names of adapters and tenants: there is no field for a token or a text."""
    core = plain_core()
    submit(core, 1, [8, 9, 10, 7, 6, 5], 30)
    core.step()
    seen = snapshot_of(core)
    for view in (*seen.nodes, *seen.sequences):
        for field in dataclasses.fields(view):
            value = getattr(view, field.name)
            assert isinstance(value, (int, float)) or field.name in ("adapter", "tenant"), field


def test_adapters_and_their_slots(tmp_path: Path) -> None:
    """The last one has the content of the first, and is not asked for: the tree has the name that was."""
    engine = Engine(tmp_path)
    for seed, name in ((0, "one"), (1, "two"), (2, "three"), (0, "same")):
        write(tmp_path, name, seed)
        engine.load(name, name)
    engine.submit(range(9), "one", max_tokens=50)
    engine.submit(range(9), None, max_tokens=50)
    for _ in range(6):
        engine.step()
    engine.core.handle([TakeSnapshot(9)])
    engine.step()
    seen = engine.replies[9].snapshot  # type: ignore[attr-defined]
    assert [info.name for info in seen.adapters] == ["one", "two", "three", "same"]
    assert SlotView("one", True, 1, False) in seen.slots and len(seen.slots) == 2
    assert {view.adapter for view in seen.namespaces} == {None, "one"}
    assert {each.adapter for each in seen.sequences} == {None, "one"}
    engine.core.close()
