"""The model catalogue: random changes against a model, kill -9 between writes, wrong input, and the traffic split."""

from __future__ import annotations

import hashlib
import multiprocessing
import random
import sqlite3
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rootgraft.api.errors import reply_to
from rootgraft.engine.errors import ConfigError, RequestError, UnknownModel
from rootgraft.fleet.catalog.model_catalog import ModelCatalog, VersionState
from rootgraft.fleet.catalog.traffic_split import pick_version, sticky_point
from rootgraft.fleet.errors import CatalogUnavailable

DIGESTS = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(5)]
A, B, C = DIGESTS[:3]


@pytest.fixture
def catalog(tmp_path: Path) -> Any:
    made = ModelCatalog.open(tmp_path / "models.db")
    yield made
    made.close()


def add(catalog: ModelCatalog, name: str, *digests: str) -> None:
    for digest in digests:
        catalog.begin(name, digest, f"file:///{digest[:6]}")
        catalog.finish(name, digest, verified=True)


def test_the_files_are_the_owner_s_alone(catalog: ModelCatalog, tmp_path: Path) -> None:
    add(catalog, "sql", A)
    assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


class CatalogMachine(RuleBasedStateMachine):
    """Random changes of two names, with a reopened file now and then, against dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name) / "models.db"
        self.catalog = ModelCatalog.open(self.path)
        self.ready: dict[str, set[str]] = {"sql": set(), "chat": set()}
        self.stack: dict[str, list[dict[str, int]]] = {"sql": [], "chat": []}

    names = st.sampled_from(["sql", "chat"])
    digests = st.sampled_from(DIGESTS)

    @rule(name=names, digest=digests, verified=st.booleans())
    def load(self, name: str, digest: str, verified: bool) -> None:
        is_new = self.catalog.begin(name, digest, "file:///x")
        assert is_new == (digest not in self.ready[name])
        if is_new:
            with pytest.raises(RequestError, match="not ready"):
                self.catalog.promote(name, digest)
            self.catalog.finish(name, digest, verified=verified)
            if verified:
                self.ready[name].add(digest)

    @rule(name=names, digest=digests)
    def promote(self, name: str, digest: str) -> None:
        if digest in self.ready[name]:
            self.catalog.promote(name, digest[:12])
            self.stack[name].append({digest: 100})
        else:
            with pytest.raises(RequestError):
                self.catalog.promote(name, digest)

    @rule(name=names, digest=digests, weight=st.integers(-1, 101))
    def canary(self, name: str, digest: str, weight: int) -> None:
        others = {each for each in self.weights(name) if each != digest}
        if digest in self.ready[name] and others and 0 < weight < 100:
            self.catalog.canary(name, digest, weight)
            self.stack[name].append(self.catalog.weights(name))
            assert self.weights(name)[digest] == weight
        else:
            with pytest.raises(RequestError):
                self.catalog.canary(name, digest, weight)

    @rule(name=names)
    def rollback(self, name: str) -> None:
        before = self.stack[name][-2] if len(self.stack[name]) > 1 else {}
        if before and before.keys() <= self.ready[name]:
            self.catalog.rollback(name)
            self.stack[name].pop()
        else:
            with pytest.raises(RequestError):
                self.catalog.rollback(name)

    @rule(name=names, digest=digests)
    def remove_version(self, name: str, digest: str) -> None:
        if digest in self.ready[name] and digest not in self.weights(name):
            assert self.catalog.remove(name, digest) == (digest,)
            self.ready[name].discard(digest)
        else:
            with pytest.raises(RequestError):
                self.catalog.remove(name, digest)

    @rule(name=names)
    def remove(self, name: str) -> None:
        if self.ready[name]:
            assert set(self.catalog.remove(name)) == self.ready[name]
            self.ready[name].clear()
            self.stack[name] = []
        else:
            with pytest.raises(UnknownModel):
                self.catalog.remove(name)

    @rule()
    def reopen(self) -> None:
        self.catalog.close()
        self.catalog = ModelCatalog.open(self.path)

    def weights(self, name: str) -> dict[str, int]:
        return self.stack[name][-1] if self.stack[name] else {}

    @invariant()
    def agrees(self) -> None:
        self.catalog.check()
        reader = ModelCatalog.read(self.path)
        for name, ready in self.ready.items():
            for each in (self.catalog, reader):
                assert each.weights(name) == self.weights(name)
                assert {version.digest for version in each.versions(name)} == ready
        reader.close()

    def teardown(self) -> None:
        self.catalog.close()
        self.folder.cleanup()


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


def _write_for_ever(path: str, told: Any) -> None:
    catalog = ModelCatalog.open(Path(path))
    add(catalog, "sql", A, B)
    draw = random.Random(0)
    while True:
        told.send(catalog.promote("sql", draw.choice([A, B])).id)


def test_a_killed_writer_leaves_what_it_has_told_and_a_free_lock(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_write_for_ever, args=(str(tmp_path / "models.db"), there))
    child.start()
    there.close()
    told = [here.recv() for _ in range(20)]
    child.kill()
    child.join()
    while True:
        try:
            told.append(here.recv())
        except (EOFError, OSError):
            break
    catalog = ModelCatalog.open(tmp_path / "models.db")
    catalog.check()
    assert catalog.history("sql")[0].id in (told[-1], told[-1] + 1)
    assert sum(catalog.weights("sql").values()) == 100
    catalog.close()


def test_a_load_that_a_crash_broke_off_is_retired(tmp_path: Path) -> None:
    catalog = ModelCatalog.open(tmp_path / "models.db")
    catalog.begin("sql", A, "file:///a")
    catalog.close()
    catalog = ModelCatalog.open(tmp_path / "models.db")
    assert [each.state for each in catalog.versions("sql", retired=True)] == [VersionState.RETIRED]
    assert catalog.names() == ()
    catalog.close()


def test_one_writes_and_many_read(catalog: ModelCatalog, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another server is using"):
        ModelCatalog.open(tmp_path / "models.db")
    add(catalog, "sql", A)
    reader = ModelCatalog.read(tmp_path / "models.db")
    catalog.promote("sql", A)
    assert reader.weights("sql") == {A: 100}
    with pytest.raises(CatalogUnavailable, match="readonly"):
        reader.promote("sql", A)
    reader.close()


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    with pytest.raises(ConfigError, match="another application"):
        ModelCatalog.open(path)


def test_the_history_says_who_did_what(catalog: ModelCatalog) -> None:
    add(catalog, "sql", A, B)
    catalog.promote("sql", A, "ops")
    catalog.canary("sql", B, 5, "ops")
    catalog.rollback("sql", "night")
    assert [(each.action, each.by, dict(each.weights)) for each in catalog.history("sql")] == [
        ("rollback", "night", {A: 100}),
        ("canary", "ops", {A: 95, B: 5}),
        ("promote", "ops", {A: 100}),
    ]


@pytest.mark.parametrize("name", ["", "a" * 65, "org/name", "a@b", ".a", "ä", "a b"])
def test_names_that_are_none(catalog: ModelCatalog, name: str) -> None:
    with pytest.raises(RequestError, match="is not a name for a model") as caught:
        catalog.begin(name, A, "file:///a")
    assert caught.value.param == "name"


def test_the_longest_name_is_one(catalog: ModelCatalog) -> None:
    assert catalog.begin("a" * 64, A, "file:///a")


@pytest.mark.parametrize("version", ["", "abc", A[:5], "latest", C])
def test_versions_that_are_unknown(catalog: ModelCatalog, version: str) -> None:
    add(catalog, "sql", A, B)
    with pytest.raises(RequestError, match=f"ready: {A[:12]}, {B[:12]}") as caught:
        catalog.find("sql", version)
    assert (caught.value.param, caught.value.code) == ("version", "unknown_version")
    assert catalog.find("sql", A[:6]) == catalog.find("sql", f"sha256:{A.upper()}")


def test_a_canary_takes_its_share_and_its_sessions_stay(catalog: ModelCatalog) -> None:
    add(catalog, "sql", A, B)
    catalog.promote("sql", A)
    points = [sticky_point("sql", "tenant", str(number)) for number in range(4000)]
    before: set[int] = set()
    for weight in (1, 10, 50, 99):
        catalog.canary("sql", B, weight)
        weights = catalog.weights("sql")
        chosen = {number for number, point in enumerate(points) if pick_version(weights, point) == B}
        assert before <= chosen
        assert len(chosen) / 4000 == pytest.approx(weight / 100, abs=0.03)
        before = chosen


def test_three_versions_share_by_their_weights() -> None:
    weights = {A: 50, B: 30, C: 20}
    counts = Counter(pick_version(weights, number / 1000) for number in range(1000))
    assert counts == {A: 500, B: 300, C: 200}
    assert pick_version(weights, 0.0) == A
    with pytest.raises(ValueError, match="no version"):
        pick_version({}, 0.5)


def test_a_disk_without_space_changes_nothing_and_is_told(catalog: ModelCatalog) -> None:
    add(catalog, "sql", A)
    pages = catalog._db.execute("PRAGMA page_count").fetchone()[0]
    catalog._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(CatalogUnavailable) as refused:
        for number in range(1000):
            catalog.begin("sql", hashlib.sha256(f"x{number}".encode()).hexdigest(), "file:///" + "x" * 500)
    reply = reply_to(refused.value)
    assert (reply.status, reply.code, reply.type) == (507, "storage_full", "server_error")
    catalog.check()
