"""A disk without space under what commands write: a file that was there stays as it was, and the error is one line.

Uploads, batches, the ledger, keys and run records are in ``tests/scenarios/api/test_full_disk.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.api.small_disk import SmallDisk, mounted
from transformers import LlamaConfig, LlamaForCausalLM

from rootgraft.api.cli.chat.chat_history import ChatHistory
from rootgraft.api.cli.main import main
from rootgraft.api.cli.sweep_chart import write_chart
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.kv_cache.block_codec import BlockCodec
from rootgraft.engine.kv_cache.block_files import BlockFiles
from rootgraft.engine.kv_cache.block_keys import BlockScheme
from rootgraft.engine.kv_cache.kv_folder import KvFolder
from rootgraft.engine.kv_cache.kv_stores import DiskStore
from rootgraft.engine.kv_cache.prefix_files import write_prefix
from rootgraft.engine.serving.calibration_folder import CalibrationFile, write_calibration
from rootgraft.engine.whole_file import write_whole
from rootgraft.radix import namespace
from rootgraft.radix.namespace import Namespace

BLOCK = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with mounted(tmp_path / "disk", 1 << 20) as small:
        if small is None:
            pytest.skip("this user may not mount a file system")
        yield small


def save_chat(path: Path, size: int) -> None:
    history = ChatHistory()
    history.ask("a" * size)
    history.answer("b")
    history.save(path, "m")


def calibrate(path: Path, size: int) -> None:
    write_calibration(path.parent, path.stem, CalibrationFile("0" * 64, 1.0, [0.5] * (size // 4)))


def draw(path: Path, size: int) -> None:
    write_chart(path, [], None, "x" * size)


def save_prefix(path: Path, size: int) -> None:
    scheme = BlockScheme("fake", 4, 512)
    data, keys = array("i", range(max(4, size // 128))).tobytes(), list[bytes]()
    origin = namespace.Path(Namespace("base"))
    pages = len(data) // 16
    scheme.extend(keys, origin, data, pages)
    write_prefix(path, BlockCodec(scheme), scheme.blocks(keys, origin, data, 0, pages), lambda index: bytes(512))


WRITERS: dict[str, Callable[[Path, int], None]] = {
    "chat.json": save_chat,
    "team.json": calibrate,
    "chart.svg": draw,
    "prefix": save_prefix,
    "any": lambda path, size: write_whole(path, bytes(size)),
}


@pytest.mark.parametrize("leave", [0, 1, 3])
@pytest.mark.parametrize("name", WRITERS)
def test_what_was_there_stays(disk: SmallDisk, name: str, leave: int) -> None:
    path = disk.path / name
    WRITERS[name](path, 100)
    before = path.read_bytes()
    disk.fill(leave)
    with pytest.raises((ConfigError, OSError), match="No space left on device"):
        WRITERS[name](path, 10 * BLOCK)
    assert path.read_bytes() == before and disk.names == {name}
    disk.free()
    WRITERS[name](path, 10 * BLOCK)
    assert path.stat().st_size > 10 * BLOCK - 100


def pages_on(folder: Path, count: int) -> None:
    """A folder of ``--kv-disk`` with pages."""
    scheme = BlockScheme("fake", 4, 512)
    store = DiskStore(BlockFiles(folder), BlockCodec(scheme), 1 << 20)
    for number in range(count):
        data, keys = array("i", [number] * 4).tobytes(), list[bytes]()
        path = namespace.Path(Namespace("base"))
        scheme.extend(keys, path, data, 1)
        store.put(scheme.blocks(keys, path, data, 0, 1)[0], bytes(512))
    store.close()


def test_an_export_of_kv_is_whole_or_not_there(
    disk: SmallDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages_on(tmp_path / "kv", 20)
    command = ["cache", "export", str(disk.path / "kv.tar"), "--kv-disk", str(tmp_path / "kv")]
    assert main(command) == 0
    before = (disk.path / "kv.tar").read_bytes()
    disk.fill(3)
    assert main(command) == 1
    assert capsys.readouterr().err == "rootgraft cache export: No space left on device\n"
    assert (disk.path / "kv.tar").read_bytes() == before and disk.names == {"kv.tar"}
    with tarfile.open(disk.path / "kv.tar") as whole:
        assert len(whole.getnames()) == 20
    folder = KvFolder(tmp_path / "kv")
    assert folder.size()[0] == 20
    folder.close()


@pytest.mark.parametrize("leave", [0, 30])
def test_a_quantised_copy_is_whole_or_not_there(
    disk: SmallDisk, tmp_path: Path, capsys: pytest.CaptureFixture[str], leave: int
) -> None:
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(4)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "plain", max_shard_size="200KB")
    command = ["quantize", str(tmp_path / "plain"), "--output", str(disk.path / "out"), "--scheme", "w8a8"]
    disk.fill(leave)
    capsys.readouterr()
    assert main(command) == 1
    assert capsys.readouterr().err.startswith("rootgraft quantize: No space left on device")
    assert not disk.names and not (disk.path / "out").exists()
    disk.free()
    assert main(command) == 0 and "config.json" in disk.names


def test_output_that_cannot_be_written_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "rootgraft", "--version"]
        ran = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.stderr == "rootgraft: standard output cannot be written: No space left on device\n"
    assert ran.returncode == 1


def test_a_pipe_is_written_in_place_and_a_link_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", b"abc")
    assert os.read(reader, 10) == b"abc"
    os.close(reader)
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "target").chmod(0o640)
    (tmp_path / "link").symlink_to("target")
    write_whole(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_bytes() == b"new"
    assert (tmp_path / "target").stat().st_mode & 0o777 == 0o640
