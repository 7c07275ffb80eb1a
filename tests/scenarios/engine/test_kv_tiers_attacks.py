"""KV on disk under attack: other keys, salts, tenants, adapters; files that were cut, swapped, rewritten or flipped.

The device of integers keeps in each cell a hash of all tokens and weights before it, so KV of anything else changes
the tokens that follow.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engine.adapter_engine import Engine, write
from support.engine.core_hooks import tiers_of
from support.machine.damaged_files import cut_one, flip_bit, rewrite_some, swap_two

from rootgraft.engine.kv_cache.block_files import found_files
from rootgraft.engine.messages import Done

PROMPT = [random.Random(f"4 {each}").randrange(11) for each in range(42)]
WHOLE = 40  # tokens of its whole pages
FLIPS = 1000


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write(root, "one", 1)
    write(root, "two", 2)
    write(root, "activated", 3, invocation=[7, 8])
    return root


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(bytes(range(32)))
    return path


def say(engine: Engine, prompt: list[int] | None = None, **fields: str) -> int:
    """Ask for an answer, which must be right. Returns how many tokens of the prompt were cached."""
    number = engine.submit(PROMPT if prompt is None else prompt, max_tokens=4, ignore_eos=True, **fields)
    engine.run()
    engine.check_tokens(number)
    done = engine.ends[number]
    assert isinstance(done, Done)
    return done.usage.cached


def with_disk(folder: Path, run: Callable[[Engine], int], root: Path | None = None, **options: object) -> int:
    engine = Engine(root, kv_disk=str(folder), **options)
    try:
        return run(engine)
    finally:
        engine.core.close()


def test_a_restart_finds_the_prompt(tmp_path: Path) -> None:
    assert with_disk(tmp_path, say) == 0
    assert with_disk(tmp_path, say) == WHOLE


def test_another_tenant_salt_or_key_finds_nothing(tmp_path: Path, key_file: Path) -> None:
    disk, other = tmp_path / "kv", tmp_path / "other"
    other.write_bytes(bytes(32))
    key = {"kv_disk_key_file": str(key_file)}
    fields = {"salt": "s", "cache_tenant": "t"}
    assert with_disk(disk, lambda engine: say(engine, **fields), **key) == 0
    for wrong in ({}, {"salt": "s"}, {"cache_tenant": "t"}, {"salt": "t", "cache_tenant": "s"}, {"salt": "st"}):
        assert with_disk(disk, lambda engine, wrong=wrong: say(engine, **wrong), **key) == 0
    for options in ({}, {"kv_disk_key_file": str(other)}):
        assert with_disk(disk, lambda engine: say(engine, **fields), **options) == 0
    assert with_disk(disk, lambda engine: say(engine, **fields), **key) == WHOLE


def test_adapters_find_their_own_kv_whatever_they_are_called(tmp_path: Path, adapters: Path) -> None:
    def ask(source: str) -> Callable[[Engine], int]:
        def run(engine: Engine) -> int:
            engine.load("name", str(adapters / source))
            return say(engine, adapter="name")

        return run

    assert with_disk(tmp_path, ask("one"), adapters) == 0
    assert with_disk(tmp_path, ask("two"), adapters) == 0, "other content under the same name"
    assert with_disk(tmp_path, say, adapters) == 0, "the base model"
    for source in ("one", "two"):
        assert with_disk(tmp_path, ask(source), adapters) == WHOLE


def test_an_activated_adapter_finds_the_base_s_kv_before_its_switch(tmp_path: Path, adapters: Path) -> None:
    prompt = [*PROMPT[:22], 7, 8, *PROMPT[:9]]

    def ask(engine: Engine) -> int:
        engine.load("name", str(adapters / "activated"))
        number = engine.submit(prompt, adapter="name", max_tokens=1)
        engine.run()
        done = engine.ends[number]
        assert isinstance(done, Done)
        return done.usage.cached

    assert with_disk(tmp_path, lambda engine: say(engine, prompt), adapters) == 0
    assert with_disk(tmp_path, ask, adapters) == 20, "five pages before the switch"
    assert with_disk(tmp_path, ask, adapters) == 32


def test_another_base_model_or_form_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from support.engine import fake_worker

    assert with_disk(tmp_path, say) == 0
    for name, value in (("base_digest", "other"), ("form", "other")):
        owner = fake_worker.FakeWorker if name == "base_digest" else fake_worker.FakePages
        made = owner.__init__

        def changed(self: object, *args: object, made=made, name=name, value=value, **named: object) -> None:
            made(self, *args, **named)
            setattr(self, name, value)

        with monkeypatch.context() as patch:
            patch.setattr(owner, "__init__", changed)
            assert with_disk(tmp_path, say) == 0
    assert with_disk(tmp_path, say) == WHOLE


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("damage", [swap_two, cut_one, rewrite_some])
def test_damaged_files_change_no_token(
    tmp_path: Path, key_file: Path, damage: Callable[[list[Path], random.Random], None], encrypted: bool
) -> None:
    options: dict[str, object] = {"kv_disk_key_file": str(key_file)} if encrypted else {}
    disk, rng, cached = tmp_path / "kv", random.Random(1), []
    with_disk(disk, say, **options)
    for _ in range(6):
        damage(sorted(found_files(disk / "0")), rng)
        cached.append(with_disk(disk, say, **options))
        with_disk(disk, say, **options)  # a second damaged file is met when the first one is right again
        assert with_disk(disk, say, **options) == WHOLE, "what was wrong was computed and written anew"
    assert min(cached) < WHOLE


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_thousand_flipped_bits_change_no_token(tmp_path: Path, key_file: Path, encrypted: bool) -> None:
    """One engine, whose files change under it: all are read anew for each flip."""
    options: dict[str, object] = {"kv_disk_key_file": str(key_file)} if encrypted else {}
    disk, rng = tmp_path / "kv", random.Random(2)
    with_disk(disk, say, **options)
    kept = tmp_path / "kept"
    shutil.copytree(disk, kept)
    flips = FLIPS // 100

    def run(engine: Engine) -> int:
        for _ in range(flips):
            flip_bit(sorted(found_files(disk / "0")), rng)
        return say(engine)

    for _ in range(FLIPS // flips // 10):
        assert with_disk(disk, run, **options) < WHOLE
        shutil.rmtree(disk)
        shutil.copytree(kept, disk)


def test_a_clear_leaves_nothing(tmp_path: Path) -> None:
    engine = Engine(kv_disk=str(tmp_path))
    say(engine)
    tiers_of(engine.core).flush()
    assert tiers_of(engine.core).clear() == 11, "pages of prompt and answer"
    tiers_of(engine.core).flush()
    assert not [*found_files(tmp_path / "0")]
    engine.core.close()
