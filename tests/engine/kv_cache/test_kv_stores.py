"""Stores of KV: bounded at all times, found again by the next process, and every fault is a miss."""

from __future__ import annotations

import os
import random
import shutil
import threading
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from support.engine.faulty_files import FaultyFiles

from rootgraft.engine.kv_cache.block_codec import ALIGNMENT, BlockCodec
from rootgraft.engine.kv_cache.block_files import BlockFiles, found_files
from rootgraft.engine.kv_cache.block_keys import BlockId, BlockScheme
from rootgraft.engine.kv_cache.kv_folder import KvFolder
from rootgraft.engine.kv_cache.kv_stores import DiskStore, HostStore
from rootgraft.radix import namespace
from rootgraft.radix.namespace import Namespace

PAGE, BYTES = 4, 512
SCHEME = BlockScheme("fake", PAGE, BYTES)
FILE_BYTES = ALIGNMENT + BYTES + 16


def block(number: int, tenant: str = "") -> BlockId:
    data, keys = array("i", [number] * PAGE).tobytes(), list[bytes]()
    path = namespace.Path(Namespace("base", tenant=tenant))
    SCHEME.extend(keys, path, data, 1)
    return SCHEME.blocks(keys, path, data, 0, 1)[0]


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(BYTES)


def open_store(folder: Path, pages: int = 10, key: bytes = b"") -> DiskStore:
    return DiskStore(BlockFiles(folder), BlockCodec(SCHEME, key), pages * FILE_BYTES)


def disk_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in found_files(folder / "0"))


@pytest.mark.parametrize("key", [b"", bytes(32)])
def test_a_later_process_finds_the_pages(tmp_path: Path, key: bytes) -> None:
    store = open_store(tmp_path, key=key)
    for number in range(5):
        store.put(block(number), payload(number))
    store.close()
    again = open_store(tmp_path, key=key)
    assert [bytes(again.get(block(number)) or b"") for number in range(5)] == [payload(number) for number in range(5)]
    assert again.get(block(5)) is None
    assert again.stats()["kv_hits_disk"] == 5


def test_files_never_take_more_than_the_bound(tmp_path: Path) -> None:
    store = open_store(tmp_path, 4)
    for number in range(50):
        store.put(block(number, "ab"[number % 2]), payload(number))
        store.check()
        assert disk_bytes(tmp_path) == store.stats()["kv_bytes_disk"] <= 4 * FILE_BYTES
    kept = [number for number in range(50) if store.get(block(number, "ab"[number % 2]))]
    assert len(kept) == 4 and kept[-2:] == [48, 49]
    store.close()
    smaller = open_store(tmp_path, 2)
    assert disk_bytes(tmp_path) == 2 * FILE_BYTES
    smaller.check()


def test_files_are_the_users_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path / "new")
    store.put(block(0), payload(0))
    [path] = found_files(tmp_path / "new" / "0")
    modes = [each.stat().st_mode & 0o777 for each in (path, path.parent, path.parent.parent, tmp_path / "new")]
    assert modes == [0o600, 0o700, 0o700, 0o700]


def test_a_file_under_another_name_is_a_miss(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(block(0, "a"), payload(0))
    store.put(block(1, "b"), payload(1))
    one, other = found_files(tmp_path / "0")
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    assert store.get(block(0, "a")) is None and store.get(block(1, "b")) is None
    assert store.stats()["kv_rejected_disk"] == 2
    assert not [*found_files(tmp_path / "0")], "what is wrong goes"


def _cut(path: Path) -> None:
    os.truncate(path, FILE_BYTES // 2)


def _emptied(path: Path) -> None:
    path.write_bytes(b"")


def _longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _as_pipe(path: Path) -> None:
    """Whose reader would wait for ever."""
    path.unlink()
    os.mkfifo(path)


def _as_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("damage", [_cut, _emptied, _longer, _as_folder, _as_pipe, _as_link, Path.unlink])
@pytest.mark.parametrize("before_start", [False, True])
def test_a_damaged_file_is_a_miss_and_its_place_is_free_again(
    tmp_path: Path, damage: Callable[[Path], None], before_start: bool
) -> None:
    store = open_store(tmp_path)
    store.put(block(0), payload(0))
    [path] = found_files(tmp_path / "0")
    if before_start:
        store.close()
        damage(path)
        store = open_store(tmp_path)
    else:
        damage(path)
    assert store.get(block(0)) is None
    assert not store.touch(block(0).key)
    store.check()
    if not path.is_dir():
        store.put(block(0), payload(0))
        assert store.get(block(0)) == payload(0)


def test_half_written_files_of_a_crash_are_removed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(block(0), payload(0))
    [path] = found_files(tmp_path / "0")
    path.rename(path.with_suffix(".part"))
    store.close()
    again = open_store(tmp_path)
    assert again.get(block(0)) is None and not [*found_files(tmp_path / "0")]


def test_processes_have_folders_of_their_own(tmp_path: Path) -> None:
    first, second = BlockFiles(tmp_path), BlockFiles(tmp_path)
    assert (first.folder.name, second.folder.name) == ("0", "1")
    first.close()
    assert BlockFiles(tmp_path).folder.name == "0"


def test_foreign_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    names = ["ab.kv", "ab.part", "notes.kv", "notes.txt"]
    for folder in (mine := tmp_path / "0" / "mine", tmp_path / "0" / "0123456789abcdef"):
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_text("keep")
    (mine / ("0" * 48 + ".kv")).write_text("keep")
    store = open_store(tmp_path, 1)
    for number in range(3):
        store.put(block(number), payload(number))
    store.clear()
    store.close()
    KvFolder(tmp_path).clear()
    assert sorted(path.name for path in folder.iterdir()) == names
    assert sorted(path.name for path in mine.iterdir()) == ["0" * 48 + ".kv", *names]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_file_that_was_moved_or_copied_is_counted(tmp_path: Path, damaged: bool) -> None:
    """As by somebody who merges two folders: what is on disk stays within the bound."""
    store = open_store(tmp_path)
    store.put(block(0), payload(0))
    store.close()
    [path] = found_files(tmp_path / "0")
    (other := tmp_path / "0" / "0123456789abcdef").mkdir()
    (other / path.name).write_bytes(b"x" if damaged else path.read_bytes())
    os.utime(other / path.name, (2**31, 2**31))  # it was used last, by a clock that was wrong
    store = open_store(tmp_path)
    assert [*found_files(tmp_path / "0")] == [other / path.name]
    assert store.get(block(0)) == (None if damaged else payload(0))
    assert disk_bytes(tmp_path) == store.stats()["kv_bytes_disk"]


def test_a_folder_that_is_removed_meanwhile_costs_its_pages_alone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(block(0), payload(0))
    shutil.rmtree(tmp_path)
    assert store.get(block(0)) is None
    for number in range(2):
        store.put(block(number), payload(number))
    assert [store.get(block(number)) for number in range(2)] == [payload(0), payload(1)]
    store.check()


def test_two_processes_in_one_folder_get_right_pages_or_none(tmp_path: Path) -> None:
    """As when somebody removes the lock of a server that runs: each evicts files of the other one, too."""
    stores = [open_store(tmp_path, 4)]
    (tmp_path / "0" / "lock").unlink()
    stores.append(open_store(tmp_path, 3))
    rng, found = random.Random(8), 0
    for _ in range(300):
        number, store = rng.randrange(6), rng.choice(stores)
        if rng.random() < 0.5:
            store.put(block(number), payload(number))
        elif (read := store.get(block(number))) is not None:
            assert read == payload(number)
            found += 1
        store.check()
    assert found > 50 and disk_bytes(tmp_path) <= 7 * FILE_BYTES


def test_a_write_goes_through_no_link(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    store.put(block(0), payload(0))
    [path] = found_files(tmp_path / "kv" / "0")
    store.clear()
    store.sweep()
    (victim := tmp_path / "victim").write_text("keep")
    path.with_suffix(".part").symlink_to(victim)
    store.put(block(0), payload(0))
    assert store.get(block(0)) is None and victim.read_text() == "keep"


def test_faults_of_the_disk_are_misses(tmp_path: Path) -> None:
    files = FaultyFiles(tmp_path, random.Random(5), 0.3)
    store = DiskStore(files, BlockCodec(SCHEME), 20 * FILE_BYTES)
    rng, found = random.Random(6), 0
    for _ in range(400):
        number = rng.randrange(30)
        if rng.random() < 0.5:
            store.put(block(number), payload(number))
        elif (read := store.get(block(number))) is not None:
            assert read == payload(number)
            found += 1
        store.check()
        assert disk_bytes(tmp_path) <= 20 * FILE_BYTES
    assert found > 10 and files.num_faults > 50


def test_a_page_that_is_replaced_while_it_is_read_is_never_another_one(tmp_path: Path) -> None:
    """A reader and a writer in a store for two pages: what is read is right, whatever happens meanwhile."""
    store, wrong = open_store(tmp_path, 2), list[int]()

    def read() -> None:
        for number in [*range(6)] * 40:
            found = store.get(block(number))
            if found is not None and found != payload(number):
                wrong.append(number)

    thread = threading.Thread(target=read)
    thread.start()
    for number in [*range(6)] * 20:
        store.put(block(number), payload(number))
    thread.join()
    store.check()
    assert not wrong and disk_bytes(tmp_path) <= 2 * FILE_BYTES


def test_host_memory_is_bounded_and_keeps_whole_pages() -> None:
    store = HostStore(3 * BYTES)
    for number in range(10):
        store.put(block(number), payload(number))
        store.check()
    assert [number for number in range(10) if store.get(block(number)) == payload(number)] == [7, 8, 9]
    assert store.clear() == 3 and store.stats()["kv_bytes_host"] == 0
