"""Recurrent states on disk, under attack as pages are (``test_kv_tiers_attacks.py``): a state is the right one or none.

The device of integers compares the state that a row begins with with the KV before it, and each answer with what the
model alone would say.
"""

from __future__ import annotations

import random
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engine.adapter_engine import Engine, write
from support.engine.core_hooks import tree_of
from support.machine.damaged_files import cut_one, flip_bit, swap_two

from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.kv_cache.block_files import found_files
from rootgraft.engine.kv_cache.state_cache import StateSlots
from rootgraft.engine.messages import Done
from rootgraft.radix.namespace import Path as TreePath

PROMPT = [random.Random(f"4 {each}").randrange(11) for each in range(42)]
WHOLE = 40  # tokens of its whole pages
SLOTS = StateSlots(4, 16, 12)


def say(engine: Engine, **fields: str) -> int:
    """Ask for an answer, which must be right. Returns how many tokens of the prompt were cached."""
    number = engine.submit(PROMPT, max_tokens=4, ignore_eos=True, **fields)
    engine.run()
    engine.check_tokens(number)
    done = engine.ends[number]
    assert isinstance(done, Done)
    return done.usage.cached


def with_disk(folder: Path, run: Callable[[Engine], int], root: Path | None = None, **options: object) -> int:
    engine = Engine(root, kv_disk=str(folder), states=SLOTS, **options)
    try:
        return run(engine)
    finally:
        engine.core.close()


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def key(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, object]:
    """Options of a key, or none."""
    if not request.param:
        return {}
    (tmp_path / "key").write_bytes(bytes(range(32)))
    return {"kv_disk_key_file": str(tmp_path / "key")}


def test_a_restart_finds_pages_and_state(tmp_path: Path, key: dict[str, object]) -> None:
    assert with_disk(tmp_path / "kv", say, **key) == 0
    assert with_disk(tmp_path / "kv", say, **key) == WHOLE
    assert with_disk(tmp_path / "kv", lambda engine: say(engine) and say(engine), **key) == WHOLE


def test_another_tenant_salt_or_key_finds_nothing(tmp_path: Path, key: dict[str, object]) -> None:
    disk, fields = tmp_path / "kv", {"salt": "s", "cache_tenant": "t"}
    other = tmp_path / "other"
    other.write_bytes(bytes(32))
    assert with_disk(disk, lambda engine: say(engine, **fields), **key) == 0
    for wrong in ({}, {"salt": "s"}, {"cache_tenant": "t"}, {"salt": "t", "cache_tenant": "s"}):
        assert with_disk(disk, lambda engine, wrong=wrong: say(engine, **wrong), **key) == 0
    assert with_disk(disk, lambda engine: say(engine, **fields), kv_disk_key_file=str(other)) == 0
    assert with_disk(disk, lambda engine: say(engine, **fields), **key) == WHOLE


def test_adapters_find_their_own_states_whatever_they_are_called(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    write(root, "one", 1)
    write(root, "two", 2)

    def ask(source: str) -> Callable[[Engine], int]:
        def run(engine: Engine) -> int:
            engine.load("name", str(root / source))
            return say(engine, adapter="name")

        return run

    disk = tmp_path / "kv"
    assert with_disk(disk, ask("one"), root) == 0
    assert with_disk(disk, ask("two"), root) == 0, "other content under the same name"
    assert with_disk(disk, say, root) == 0, "the base model"
    assert with_disk(disk, ask("one"), root) == with_disk(disk, ask("two"), root) == WHOLE


def states_and_pages(disk: Path) -> tuple[list[Path], list[Path]]:
    """Return the plain files of states and those of pages."""
    files = sorted(found_files(disk / "0"))
    states = [path for path in files if b'"kind": "state"' in path.read_bytes()]
    return states, [path for path in files if path not in states]


def test_pages_without_a_state_are_of_no_use_and_the_other_way_round(tmp_path: Path) -> None:
    disk, kept = tmp_path / "kv", tmp_path / "kept"
    with_disk(disk, say)
    states, pages = states_and_pages(disk)
    assert len(states) == 4 and len(pages) >= 10, "after 12, 24 and 36 tokens, and at the prompt's end"
    shutil.copytree(disk, kept)
    for index in (0, 1):
        for path in states_and_pages(disk)[index]:
            path.unlink()
        assert with_disk(disk, say) == 0
        shutil.rmtree(disk)
        shutil.copytree(kept, disk)
    assert with_disk(disk, say) == WHOLE


def _retell(files: list[Path], rng: random.Random) -> None:
    """Say of a page's file that it is a state, under that state's name."""
    state, page = rng.sample(files, 2)
    state.write_bytes(page.read_bytes().replace(b'"tokens"', b'"kind": "state", "tokens"', 1))


@pytest.mark.parametrize("damage", [swap_two, cut_one, flip_bit, _retell])
def test_damaged_files_change_no_token(
    tmp_path: Path, key: dict[str, object], damage: Callable[[list[Path], random.Random], None]
) -> None:
    disk, rng, cached = tmp_path / "kv", random.Random(1), []
    with_disk(disk, say, **key)
    for _ in range(6):
        for _ in range(3):
            damage(sorted(found_files(disk / "0")), rng)
        found = [with_disk(disk, say, **key)]
        while found[-1] < WHOLE:  # what is damaged still is met when the files before it are right again
            assert len(found) < 10, "what was wrong is not written anew"
            found.append(with_disk(disk, say, **key))
        cached += found
    assert min(cached) < WHOLE


def test_a_hit_ends_where_a_state_was_kept(tmp_path: Path) -> None:
    """The first 30 tokens in common: their last state is after 24."""
    prompt = [*PROMPT[:30], *reversed(PROMPT[:12])]
    with_disk(tmp_path, say)

    def ask(engine: Engine) -> int:
        number = engine.submit(prompt, max_tokens=4, ignore_eos=True)
        engine.run()
        engine.check_tokens(number)
        done = engine.ends[number]
        assert isinstance(done, Done)
        return done.usage.cached

    assert with_disk(tmp_path, ask) == 24


@pytest.mark.parametrize("num_pages", [64, 9])
def test_a_prefix_file_has_the_state_of_its_end(tmp_path: Path, num_pages: int) -> None:
    """A pool without room for all takes none of it: its last state would be missing."""
    file, one = tmp_path / "prefix", Engine(states=SLOTS)
    say(one)
    path = one.core.prefix_transfer()
    assert path.save(_path(one.core), array("i", PROMPT), file) == WHOLE
    content = file.read_bytes()
    for changed in (content[:-5000], content[: len(content) // 2], content[:-1], content[:-40] + b"x" * 40):
        file.write_bytes(changed)
        assert Engine(states=SLOTS).core.prefix_transfer().load(file) == 0
    file.write_bytes(content)
    assert Engine().core.prefix_transfer().load(file) == 0, "a model without states"
    other = Engine(states=SLOTS, num_pages=num_pages)
    expected = WHOLE if num_pages > 10 else 0
    assert other.core.prefix_transfer().load(file) == other.core.prefix_transfer().load(file) == expected
    other.core.check()
    if expected:
        assert say(other) == WHOLE


def _path(core: EngineCore) -> TreePath:
    [namespace] = tree_of(core).tops
    return TreePath(namespace)
