"""Random requests in cramped engines say what each says alone: some of what ``benchmarks/fuzz.py`` runs for hours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.machine.thoroughness import repeats

from benchmarks.fuzzing.fake_fuzzer import FakeFuzzer
from benchmarks.fuzzing.fuzzer import Fuzzer, Said, fuzz, report
from benchmarks.fuzzing.tiered_fuzzer import TieredFakeFuzzer, TieredModelFuzzer
from benchmarks.fuzzing.worlds import MOST_ANSWERS
from rootgraft.engine.core import adapter_manager
from rootgraft.radix.namespace import Namespace

SEED = 1
HEAVY_REQUESTS = repeats(600)
HEAVY_FAKE_REQUESTS = repeats(1500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture
def fuzzer(folder: Path) -> Iterator[Fuzzer]:
    made = Fuzzer(folder)
    yield made
    made.close()


@pytest.fixture
def fake_fuzzer(tmp_path: Path) -> Iterator[FakeFuzzer]:
    made = FakeFuzzer(tmp_path)
    yield made
    made.close()


@pytest.fixture
def tiered_fuzzer(tmp_path: Path) -> Iterator[TieredFakeFuzzer]:
    made = TieredFakeFuzzer(tmp_path)
    yield made
    made.close()


@pytest.fixture
def tiered_model_fuzzer(tmp_path: Path) -> Iterator[TieredModelFuzzer]:
    made = TieredModelFuzzer(tmp_path)
    yield made
    made.close()


def run(fuzzer: Fuzzer, seed: int, requests: int) -> None:
    for name, wrong in fuzz(fuzzer, seed, requests):
        assert wrong is None, report(fuzzer, name, wrong)
    assert fuzzer.counts["requests"] == requests
    assert min(fuzzer.counts.values()) > 0, "what could go wrong was there"


@pytest.mark.sample
def test_some_requests(fuzzer: Fuzzer) -> None:
    run(fuzzer, SEED, 150)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_hundreds_of_requests(fuzzer: Fuzzer) -> None:
    run(fuzzer, SEED + 1, HEAVY_REQUESTS)


@pytest.mark.sample
def test_some_requests_on_the_fake_device(fake_fuzzer: FakeFuzzer) -> None:
    run(fake_fuzzer, SEED, 500)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_hundreds_of_requests_on_the_fake_device(fake_fuzzer: FakeFuzzer) -> None:
    run(fake_fuzzer, SEED + 1, HEAVY_FAKE_REQUESTS)


@pytest.mark.sample
def test_some_requests_whose_kv_moves_over_a_failing_disk(tiered_fuzzer: TieredFakeFuzzer) -> None:
    tiered_fuzzer.inline = True
    for name, wrong in fuzz(tiered_fuzzer, SEED + 7, 120):
        assert wrong is None, report(tiered_fuzzer, name, wrong)
    assert tiered_fuzzer.counts["kv_hits_disk"] and tiered_fuzzer.counts["kv_errors_disk"]


@pytest.mark.heavy
def test_some_requests_whose_kv_moves_in_models(tiered_model_fuzzer: TieredModelFuzzer) -> None:
    """Whether a page was written before it is asked for is a matter of threads: more are drawn until one was read."""
    for seed in range(SEED + 2, SEED + 8):
        for name, wrong in fuzz(tiered_model_fuzzer, seed, 120):
            assert wrong is None, report(tiered_model_fuzzer, name, wrong)
        if tiered_model_fuzzer.counts["kv_hits_disk"]:
            return
    pytest.fail("no page was read from disk")


@pytest.mark.parametrize("fuzzers", ["fuzzer", "fake_fuzzer"])
def test_shared_kv_of_different_adapters_is_found(
    fuzzers: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that is made on purpose: all adapters have the same namespace."""
    fuzzer = request.getfixturevalue(fuzzers)

    def mixed(revision: str, adapter: str | None, *rest: Any) -> Namespace:
        return Namespace(revision, adapter and "any", *rest)

    monkeypatch.setattr(adapter_manager, "Namespace", mixed)
    # What steps take decides who meets whom, so one world may miss it on a busy machine.
    found = (fuzzer.check_world(f"1.{number}", range(60)) or "" for number in range(20))
    assert any("\ntogether Said(" in text for text in found)


def test_a_fault_is_narrowed_down_to_its_requests(fuzzer: Fuzzer, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Fuzzer._say_alone

    def wrong(self: Fuzzer, world: Any, submit: Any, version: str | None) -> Said:
        said = inner(self, world, submit, version)
        return said if submit.id // MOST_ANSWERS != 5 else Said([*said.tokens, 3], [], [], ("stop", None, 1))

    monkeypatch.setattr(Fuzzer, "_say_alone", wrong)
    found = report(fuzzer, "1.0", "", requests=12)
    assert found.endswith("Again: python -m benchmarks.fuzz --world 1.0 --only 5")
