"""Names of adapter versions: none is given twice while it is in use, and what is counted of names is bounded."""

from __future__ import annotations

import pytest

from rootgraft.fleet import adapter_versions
from rootgraft.fleet.adapter_versions import AdapterVersions, LoadedVersion


def load(versions: AdapterVersions, name: str) -> str:
    version = versions.begin(name, ())
    versions.end(version)
    versions.add(LoadedVersion(name, version, "", False))
    return version


def test_names_that_come_and_go_are_forgotten_and_those_in_use_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_versions, "MOST_COUNTED", 20)
    versions = AdapterVersions()
    assert [load(versions, "stays"), load(versions, "stays")] == ["stays", "stays@2"]
    for number in range(300):
        name = f"passing-{number}"
        version = load(versions, name)
        versions.remove(name)
        versions.forget(version)
        assert len(versions._counts) <= 21
    assert load(versions, "stays") == "stays@3", "a version of an earlier load is retired, not forgotten"
