"""Changes of a key file: valid or not made, the rest of the file kept, one at a time."""

from __future__ import annotations

import hashlib
import os
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rootgraft.api.access.api_keys import KeyRing, read_entries
from rootgraft.api.access.key_file import add_key, revoke_key, rotate_key
from rootgraft.engine.errors import ConfigError


@pytest.fixture(params=["keys.toml", "keys.json"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / request.param


def test_a_key_is_made_replaced_and_taken_away(path: Path) -> None:
    first = add_key(path, "acme", {"adapters": ["sql"], "tokens_per_minute": 5})
    add_key(path, "admin", {"scopes": ["admin"]})
    ring = KeyRing((), path, clock=lambda: 0.0)
    found = ring.find(first.encode())
    assert found is not None and (found.name, found.adapters, found.tokens_per_minute) == ("acme", {"sql"}, 5)
    second = rotate_key(path, "acme")
    ring = KeyRing((), path, clock=lambda: 0.0)
    assert ring.find(first.encode()) is None
    assert ring.find(second.encode()) == ring.named("acme")
    revoke_key(path, "acme")
    assert [entry.name for entry in read_entries(path)] == ["admin"]
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_the_rest_of_a_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    digest = hashlib.sha256(b"x").hexdigest()
    path.write_text(f'# ours\n\n[[keys]]\nname = "one"  # the first\nsha256 = "{digest}"\n')
    path.chmod(0o640)
    add_key(path, "two", {})
    add_key(path, "three", {})
    revoke_key(path, "two")
    text = path.read_text()
    assert text.startswith(f'# ours\n\n[[keys]]\nname = "one"  # the first\nsha256 = "{digest}"\n\n[[keys]]\n')
    assert [each["name"] for each in tomllib.loads(text)["keys"]] == ["one", "three"]
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    link = tmp_path / "keys.toml"
    link.symlink_to(tmp_path / "real" / "keys.toml")
    add_key(tmp_path / "real" / "keys.toml", "one", {})
    add_key(link, "two", {})
    assert link.is_symlink() and len(read_entries(link)) == 2


def test_what_is_wrong_changes_nothing(path: Path) -> None:
    add_key(path, "one", {})
    before = path.read_bytes()
    for change, message in (
        (lambda: add_key(path, "one", {}), "already has a key one"),
        (lambda: add_key(path, "two", {"scopes": ["all"]}), r"keys\[1\]\.scopes\[0\]"),
        (lambda: add_key(path, "two", {"tokens_per_minute": 0}), r"keys\[1\]\.tokens_per_minute"),
        (lambda: rotate_key(path, "two"), "has no key two"),
        (lambda: revoke_key(path, "two"), "has no key two"),
        (lambda: revoke_key(path, "one"), "is the last key"),
    ):
        with pytest.raises(ConfigError, match=message):
            change()
        assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_file_that_is_no_key_file_is_left_alone(path: Path) -> None:
    path.write_text("not = [ valid")
    with pytest.raises(ConfigError, match="--api-key-file"):
        add_key(path, "one", {})
    assert path.read_text() == "not = [ valid"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        add_key(tmp_path / "none" / "keys.toml", "one", {})


def test_changes_at_the_same_time_are_all_made(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add_key(path, f"key-{number}", {}), range(24)))
    assert len(read_entries(path)) == 24
