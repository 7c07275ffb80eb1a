"""The life of adapters: loaded in the background, replaced and unloaded under running sequences, fetched again."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.machine.waits import HANG_SECONDS
from support.models.lora_folders import (
    DOWN,
    HIDDEN,
    Q,
    file_of,
    good_config,
    good_tensors,
    key,
    small_layout,
    small_reader,
    write_folder,
)

from rootgraft.kernels.side_stream import SideMark, SideStream
from rootgraft.lora import lora_step
from rootgraft.lora.adapter_pool import AdapterPool, LoadResult
from rootgraft.lora.base_projections import BaseLayout
from rootgraft.lora.device_slots import WAIT
from rootgraft.lora.errors import AdapterError, AdapterLimit
from rootgraft.lora.lora_step import AdapterBank
from rootgraft.lora.prepare_factors import PreparedAdapter
from rootgraft.lora.read_adapter import AdapterReader
from rootgraft.lora.registry import AdapterVersion


@dataclass
class GatedReader:
    """A reader that stands still while ``gate`` is closed, and counts."""

    inner: Any
    gate: threading.Event = field(default_factory=threading.Event)
    reads: list[str] = field(default_factory=list)
    stuck: str = ""  # the path that alone waits for the gate

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def layout(self) -> BaseLayout:
        return self.inner.layout

    def read(self, path: str, *, trusted: bool = False) -> PreparedAdapter:
        assert threading.current_thread() is not threading.main_thread()
        if self.stuck in ("", path):
            self.gate.wait()
        self.reads.append(path)
        return self.inner.read(path, trusted=trusted)

    def read_again(self, path: str, digest: str, *, trusted: bool = False) -> PreparedAdapter:
        self.gate.wait()
        self.reads.append(path)
        return self.inner.read_again(path, digest, trusted=trusted)


@pytest.fixture
def reader() -> GatedReader:
    return GatedReader(small_reader())


@pytest.fixture
def adapters(reader: GatedReader) -> Iterator[AdapterPool]:
    with pool(reader) as made:
        yield made


@contextmanager
def pool(reader: GatedReader, **options: Any) -> Iterator[AdapterPool]:
    fields = {"max_loras": 2, "max_adapters": 20, "max_cpu_bytes": 1 << 20, "patience": 5, **options}
    made = AdapterPool(reader, **fields)
    try:
        yield made
    finally:
        reader.gate.set()
        made.close()
    made.registry.check()
    made.slots.check()


def folder(path: Path, seed: int = 0, rank: int = 2) -> str:
    return str(write_folder(path, good_config(r=rank), file_of(good_tensors(seed, rank))))


def settle(adapters: AdapterPool) -> list[LoadResult]:
    """Poll until the background threads have nothing to do."""
    results = adapters.poll()
    while adapters._loads or adapters._fetches:
        wait([*(load.future for load in adapters._loads), *adapters._fetches.values()], return_when=FIRST_COMPLETED)
        results += adapters.poll()
    return results


def loaded(adapters: AdapterPool, name: str, path: str) -> AdapterVersion:
    adapters.load(name, path)
    (result,) = settle(adapters)
    assert result.error is None and result.version is not None
    return result.version


def held(adapters: AdapterPool, version: AdapterVersion) -> int:
    """A slot for it, whatever has to be loaded."""
    slot = adapters.slots.acquire(version.load_id)
    if slot == WAIT:
        settle(adapters)
        slot = adapters.slots.acquire(version.load_id)
    assert slot != WAIT
    return slot


def contribution(adapters: AdapterPool, slot: int) -> torch.Tensor:
    """What a slot adds to the fused q and k of one token of ones."""
    y = torch.zeros(1, HIDDEN + 4)
    step = adapters.bank.step(np.array([slot], np.int32))
    assert step is not None
    step.project(Q, torch.ones(1, HIDDEN), y)
    return y[0]


def expected(seed: int, rank: int = 2) -> torch.Tensor:
    found = good_tensors(seed, rank)
    delta = found[key(Q, "lora_B.weight")] @ found[key(Q, "lora_A.weight")] @ torch.ones(HIDDEN) * (4 / rank)
    return torch.cat([delta, torch.zeros(4)])


def test_replace_under_running_sequences(adapters, tmp_path):
    """A sequence keeps the version that it began with, its slot and its KV's identity."""
    old = loaded(adapters, "a", folder(tmp_path / "1", seed=1))
    adapters.registry.pin(old)
    old_slot = held(adapters, old)
    new = loaded(adapters, "a", folder(tmp_path / "2", seed=2, rank=3))
    assert adapters.registry.get("a") is new and old.retired
    assert old.digest != new.digest and old.load_id != new.load_id
    new_slot = held(adapters, new)
    torch.testing.assert_close(contribution(adapters, old_slot), expected(1))
    torch.testing.assert_close(contribution(adapters, new_slot), expected(2, 3))
    assert adapters.take_ended() == []
    adapters.slots.release(old_slot)
    adapters.registry.unpin(old)
    assert adapters.take_ended() == [old.digest]
    assert adapters.slots.num_resident == 1 and old.digest not in adapters.cache
    torch.testing.assert_close(contribution(adapters, new_slot), expected(2, 3))
    assert adapters.bank.step(np.array([old_slot], np.int32)) is None
    adapters.slots.release(new_slot)


class SlowSide(SideStream):
    """A device whose copies end when ``open`` is set."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.open, self.marks = False, 0

    def mark(self) -> Any:
        self.marks += 1
        return SlowMark(self)


class SlowMark(SideMark):
    def __init__(self, side: SlowSide) -> None:
        super().__init__(None)
        self.side = side

    @property
    def is_reached(self) -> bool:
        return self.side.open


def test_a_slot_waits_for_its_copy_and_steps_go_on(reader, tmp_path):
    """An adapter is in its slot when its copy has ended; until then it stays in host memory, whatever that may hold."""
    side = SlowSide()
    bank = AdapterBank(reader.layout, 2, side)
    with pool(reader, bank=bank, max_cpu_bytes=1) as adapters:
        version = loaded(adapters, "a", folder(tmp_path / "1", seed=1))
        assert adapters.slots.acquire(version.load_id) == WAIT
        loaded(adapters, "b", folder(tmp_path / "2", seed=2))
        assert version.digest in adapters.cache, "it is read while it is copied"
        for _ in range(3):
            adapters.poll()
            assert adapters.slots.acquire(version.load_id) == WAIT
        assert side.marks == 1, "it is copied once"
        side.open = True
        adapters.poll()
        slot = adapters.slots.acquire(version.load_id)
        torch.testing.assert_close(contribution(adapters, slot), expected(1))
        assert not bank._arriving
        adapters.slots.release(slot)


def test_slots_are_emptied_without_any_memory(reader, tmp_path, monkeypatch):
    """Of an adapter that finds none, and of one that another one replaces."""

    def refuse(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    bank = AdapterBank(reader.layout, 1)
    with pool(reader, bank=bank, max_loras=1) as adapters:
        first = loaded(adapters, "a", folder(tmp_path / "1", seed=1))
        second = loaded(adapters, "b", folder(tmp_path / "2", seed=2))
        adapters.slots.release(held(adapters, first))
        with monkeypatch.context() as patch:
            patch.setattr(lora_step, "to_device", refuse)
            assert adapters.slots.acquire(second.load_id) == WAIT
            adapters.poll()
        assert adapters.slots.num_resident == 0
        assert bank.step(np.zeros(1, np.int32)) is None
        adapters.slots.check()
        slot = held(adapters, first)
        torch.testing.assert_close(contribution(adapters, slot), expected(1))
        adapters.slots.release(slot)


def test_a_copy_that_nobody_waits_for_is_dropped(reader, tmp_path):
    """Its adapter was unloaded, or the engine began anew."""
    side = SlowSide()
    bank = AdapterBank(reader.layout, 2, side)
    with pool(reader, bank=bank) as adapters:
        first = loaded(adapters, "a", folder(tmp_path / "1", seed=1))
        second = loaded(adapters, "b", folder(tmp_path / "2", seed=2))
        assert [adapters.slots.acquire(each.load_id) for each in (first, second)] == [WAIT, WAIT]
        assert len(bank._arriving) == 2
        adapters.unload("a")
        adapters.take_ended()
        assert list(bank._arriving) == [second.digest] and first.digest not in adapters.cache
        adapters.slots.clear()
        adapters.poll()
        assert not bank._arriving
        side.open = True
        slot = held(adapters, second)
        torch.testing.assert_close(contribution(adapters, slot), expected(2))
        adapters.slots.release(slot)


def test_the_same_bytes_have_the_same_identity(adapters, tmp_path):
    """So their KV is shared, and stays until the last version with them ends."""
    first = loaded(adapters, "a", folder(tmp_path / "1"))
    second = loaded(adapters, "b", folder(tmp_path / "2"))
    again = loaded(adapters, "a", folder(tmp_path / "1"))
    assert first.digest == second.digest == again.digest
    assert len({first.load_id, second.load_id, again.load_id}) == 3
    assert adapters.take_ended() == []
    adapters.unload("a")
    assert adapters.take_ended() == [] and first.digest in adapters.cache
    adapters.unload("b")
    assert adapters.take_ended() == [first.digest] and len(adapters.cache) == 0


def test_the_engine_goes_on_while_adapters_load(adapters, reader, tmp_path):
    first = loaded(adapters, "a", folder(tmp_path / "1", seed=1))
    slot = held(adapters, first)
    reader.gate.clear()
    adapters.load("b", folder(tmp_path / "2", seed=2))
    for _ in range(10):
        assert adapters.poll() == []
        torch.testing.assert_close(contribution(adapters, slot), expected(1))
    assert adapters.loading == ["b"] and adapters.registry.get("b") is None
    reader.gate.set()
    assert [result.name for result in settle(adapters)] == ["b"]
    adapters.slots.release(slot)


def test_unloaded_while_it_loads(adapters, reader, tmp_path):
    old = loaded(adapters, "a", folder(tmp_path / "1"))
    reader.gate.clear()
    adapters.load("a", folder(tmp_path / "2", seed=2))
    adapters.load("new", folder(tmp_path / "2", seed=2))
    adapters.unload("a")
    adapters.unload("new")
    with pytest.raises(AdapterError, match="no adapter"):
        adapters.unload("a")
    reader.gate.set()
    results = sorted(settle(adapters), key=lambda result: result.name)
    assert [(result.name, result.version) for result in results] == [("a", None), ("new", None)]
    assert "unloaded while" in str(results[0].error)
    assert len(adapters.registry) == 0 and adapters.take_ended() == [old.digest]


def test_the_last_load_of_a_name_counts(adapters, reader, tmp_path):
    reader.gate.clear()
    for seed in (1, 2, 3):
        adapters.load("a", folder(tmp_path / str(seed), seed=seed))
    reader.gate.set()
    versions = [result.version for result in settle(adapters)]
    assert adapters.registry.get("a") is versions[-1]
    torch.testing.assert_close(contribution(adapters, held(adapters, versions[-1])), expected(3))


def test_unknown_names(adapters):
    assert adapters.registry.get("x") is None
    with pytest.raises(AdapterError) as refused:
        adapters.unload("x")
    assert refused.value.option == "name"


def test_adapters_that_nobody_takes_over_do_not_pile_up(adapters, reader, tmp_path):
    path = folder(tmp_path / "1")
    for index in range(10):
        adapters.load(f"n{index}", path)
    first = [load.future for load in adapters._loads]
    while sum(future.done() for future in first) < 4:
        wait([future for future in first if not future.done()], return_when=FIRST_COMPLETED)
    assert len(reader.reads) == 4 and adapters._room._value == 0
    assert len(settle(adapters)) == 10


def test_a_slot_does_not_wait_for_new_adapters(reader, tmp_path):
    """Ten adapters are being loaded, and nobody takes them over: one that was evicted still comes back."""
    with pool(reader, max_cpu_bytes=0) as adapters:
        old = loaded(adapters, "old", folder(tmp_path / "1", seed=1))
        path = folder(tmp_path / "2", seed=2)
        loaded(adapters, "newer", path)
        for index in range(10):
            adapters.load(f"n{index}", path)
        assert adapters.slots.acquire(old.load_id) == WAIT
        adapters._fetches[old.load_id].result()
        settle(adapters)
        torch.testing.assert_close(contribution(adapters, held(adapters, old)), expected(1))


def test_closing_with_loads_under_way(reader, tmp_path):
    path = folder(tmp_path / "1")
    with pool(reader) as adapters:
        for index in range(10):
            adapters.load(f"n{index}", path)


def test_loads_of_a_tenant_that_hang_leave_a_thread_to_others(reader, tmp_path):
    path, stuck = folder(tmp_path / "1"), folder(tmp_path / "stuck")
    with pool(reader) as adapters:
        reader.stuck = stuck
        reader.gate.clear()
        for index in range(9):
            adapters.load(f"a{index}", stuck, tenant="a")
        adapters.load("b", path, tenant="b")
        [of_b] = [load.future for load in adapters._loads if load.tenant == "b"]
        assert of_b.exception(60) is None
        [result] = adapters.poll()
        assert result.name == "b" and result.version is not None
        reader.gate.set()
        assert len(settle(adapters)) == 9


def test_a_tenant_may_load_as_many_as_it_leaves(reader, tmp_path):
    path = folder(tmp_path / "1")
    with pool(reader, max_adapters=8) as adapters:
        reader.gate.clear()
        for tenant, share in (("a", 4), ("b", 2), ("c", 1)):
            for index in range(share):
                adapters.load(f"{tenant}{index}", path, tenant=tenant)
            with pytest.raises(AdapterLimit, match="being loaded: try again later"):
                adapters.load(f"{tenant}-more", path, tenant=tenant)
        reader.gate.set()
        assert len(settle(adapters)) == 7
        adapters.load("a-more", path, tenant="a")


def test_limits(reader, tmp_path):
    with pool(reader, max_adapters=3) as adapters:
        path = folder(tmp_path / "1")
        reader.gate.clear()
        for name in "abc":
            adapters.load(name, path)
        with pytest.raises(AdapterError, match="3 adapters are being loaded"):
            adapters.load("d", path)
        reader.gate.set()
        settle(adapters)
        with pytest.raises(AdapterError, match="limit"):
            adapters.load("d", path)
        loaded(adapters, "a", path)
        reader.gate.clear()
        for _ in range(3):
            adapters.load("a", path)
        with pytest.raises(AdapterError, match="later"):
            adapters.load("a", path)


def test_more_adapters_than_host_memory_and_slots(reader, tmp_path):
    """Each comes back from disk when it is asked for, with its own bits."""
    one = small_reader().read(folder(tmp_path / "x")).num_bytes
    with pool(reader, max_cpu_bytes=3 * one) as adapters:
        versions = [loaded(adapters, f"n{seed}", folder(tmp_path / str(seed), seed=seed)) for seed in range(8)]
        rng = random.Random(0)
        for _ in range(40):
            seed = rng.randrange(8)
            slot = held(adapters, versions[seed])
            torch.testing.assert_close(contribution(adapters, slot), expected(seed))
            assert adapters.cache.num_bytes <= 4 * one
            adapters.slots.release(slot)
        assert len(reader.reads) > 8 and adapters.cache.num_evicted > 0


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_files_that_are_no_longer_what_they_were(damage, reader, tmp_path):
    """The version is broken, its name stands for nothing, and the others go on."""
    with pool(reader, max_cpu_bytes=0) as adapters:
        bad, good = (
            loaded(adapters, "bad", folder(tmp_path / "1", 1)),
            loaded(adapters, "good", folder(tmp_path / "2", 2)),
        )
        adapters.registry.pin(bad)
        if damage == "gone":
            shutil.rmtree(tmp_path / "1")
        else:
            folder(tmp_path / "1", seed=9)
        assert adapters.slots.acquire(bad.load_id) == WAIT
        settle(adapters)
        (broken,) = adapters.take_broken()
        assert broken.version is bad and isinstance(broken.error, AdapterError)
        assert adapters.registry.get("bad") is None and adapters.take_broken() == []
        torch.testing.assert_close(contribution(adapters, held(adapters, good)), expected(2))
        adapters.registry.unpin(bad)
        assert adapters.take_ended() == [bad.digest]


def test_a_version_that_ends_while_it_is_fetched(reader, tmp_path):
    with pool(reader, max_cpu_bytes=0) as adapters:
        first = loaded(adapters, "a", folder(tmp_path / "1", 1))
        loaded(adapters, "b", folder(tmp_path / "2", 2))
        reader.gate.clear()
        assert adapters.slots.acquire(first.load_id) == WAIT
        adapters.unload("a")
        assert adapters.take_ended() == [first.digest]
        reader.gate.set()
        settle(adapters)
        assert adapters.slots.num_resident == 0 and adapters.take_broken() == []


def test_an_unexpected_error_of_the_thread_stays_there(adapters, reader, tmp_path):
    def explode(module: str) -> torch.Tensor:
        raise LookupError(module)

    layout = small_layout()
    reader.inner = AdapterReader(BaseLayout(layout.projections, layout.dtype, layout.device, explode, explode), 8)
    path = write_folder(
        tmp_path / "dora",
        good_config(use_dora=True),
        file_of({**good_tensors(), **{key(m, "lora_magnitude_vector"): torch.ones(HIDDEN) for m in (Q, DOWN)}}),
    )
    adapters.load("a", str(path))
    (result,) = settle(adapters)
    assert result.version is None and "LookupError" in str(result.error)


def test_registered_adapters_cost_a_step_nothing(reader, tmp_path):
    """A step touches what it uses: no loop over names, versions or slots that are not in it."""
    with pool(reader, max_adapters=1000, max_cpu_bytes=0) as adapters:
        path = folder(tmp_path / "1")
        for index in range(1000):
            adapters.load(f"team{index % 10}/adapter{index}", path)
        settle(adapters)
        assert len(adapters.registry) == 1000
        slot = held(adapters, adapters.registry.get("team7/adapter77"))
        touched: list[str] = []
        adapters.registry._alive = Watched(adapters.registry._alive, touched)  # type: ignore[assignment]
        adapters.registry._current = Watched(adapters.registry._current, touched)  # type: ignore[assignment]
        for _ in range(5):
            adapters.poll()
            adapters.slots.release(held(adapters, adapters.registry.get("team7/adapter77")))
            contribution(adapters, slot)
            adapters.take_ended()
        assert touched == []
        adapters.registry._alive, adapters.registry._current = (
            dict(adapters.registry._alive),
            dict(adapters.registry._current),
        )


class Watched(dict[Any, Any]):
    """Notes whenever someone goes through all of it."""

    def __init__(self, content: dict[Any, Any], touched: list[str]) -> None:
        super().__init__(content)
        self.touched = touched

    def __iter__(self) -> Iterator[Any]:
        self.touched.append("iter")
        return super().__iter__()

    def values(self) -> Any:
        self.touched.append("values")
        return super().values()

    def items(self) -> Any:
        self.touched.append("items")
        return super().items()


def test_slow_fetches_of_one_tenant_hold_up_no_other(reader: GatedReader, tmp_path: Path) -> None:
    """Of ten evicted adapters on a disk that does not answer; another tenant's are read meanwhile."""
    with pool(reader, max_cpu_bytes=0, max_loras=8) as adapters:
        quick = loaded(adapters, "quick", folder(tmp_path / "quick", 11))
        slow = [loaded(adapters, f"slow-{number}", folder(tmp_path / f"slow-{number}", number)) for number in range(10)]
        gate, inner = threading.Event(), reader.inner.read_again

        def read_again(path: str, digest: str, *, trusted: bool = False) -> PreparedAdapter:
            if Path(path).name.startswith("slow"):
                gate.wait()
            return inner(path, digest, trusted=trusted)

        reader.read_again = read_again  # type: ignore[method-assign]
        try:
            for version in slow:
                assert adapters.slots.acquire(version.load_id, "one") == WAIT
            assert adapters.slots.acquire(quick.load_id, "other") == WAIT
            adapters._fetches[quick.load_id].result(HANG_SECONDS)
            adapters.poll()
            assert adapters.slots.acquire(quick.load_id, "other") != WAIT
        finally:
            gate.set()
        settle(adapters)
