"""The GGUF reader against the gguf package, and against malformed files."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.models import small_gguf

from rootgraft.engine.checkpoint.base_digest import base_digest
from rootgraft.engine.checkpoint.gguf import GgufFile
from rootgraft.engine.errors import ModelError


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file with a value of each type."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("n.u8", 200)
    writer.add_int8("n.i8", -100)
    writer.add_uint16("n.u16", 60000)
    writer.add_int16("n.i16", -30000)
    writer.add_uint32("n.u32", 1 << 31)
    writer.add_int32("n.i32", -5)
    writer.add_uint64("n.u64", 1 << 63)
    writer.add_int64("n.i64", -(1 << 40))
    writer.add_float32("n.f32", 0.5)
    writer.add_float64("n.f64", 0.1)
    writer.add_bool("n.bool", True)
    writer.add_string("text", "grüße 🌱")
    writer.add_array("texts", ["a", "", "ß"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, 2.0])
    writer.add_array("flags", [True, False])
    writer.add_tensor("plain", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("half", np.arange(6, dtype=np.float16).reshape(2, 3))
    quantised = gguf.quants.quantize(
        np.linspace(-1, 1, 128, dtype=np.float32).reshape(2, 64), gguf.GGMLQuantizationType.Q4_0
    )
    writer.add_tensor("blocks", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return path


def test_same_as_the_gguf_package(written: Path) -> None:
    ours, theirs = GgufFile.open(written), gguf.GGUFReader(written)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in ours.metadata.items()} == expected
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(reversed(tensor.shape.tolist()))
        assert (mine.type, mine.num_bytes) == (tensor.tensor_type.name, tensor.n_bytes)
        assert np.array_equal(ours.data(tensor.name), tensor.data.reshape(-1).view(np.uint8))
    assert not ours.data("plain").flags.writeable


def test_real_file(smollm2_gguf: Path) -> None:
    file = GgufFile.open(smollm2_gguf)
    assert file.metadata["general.architecture"] == "llama"
    assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
    assert file.tensors["token_embd.weight"].shape == (49152, 576)


def test_truncation_anywhere_is_noticed(written: Path, tmp_path: Path) -> None:
    whole = written.read_bytes()
    for length in [*range(0, len(whole) - 64, 7), len(whole) - 33]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GgufFile.open(cut)


@given(data=st.data())
def test_damage_is_a_model_error_or_harmless(written: Path, tmp_path_factory: pytest.TempPathFactory, data) -> None:
    damaged = bytearray(written.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        file = GgufFile.open(path)
    except ModelError:
        return
    for name, tensor in file.tensors.items():
        assert len(file.data(name)) == tensor.num_bytes


def header(num_tensors: int = 0, num_metadata: int = 0, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, num_tensors, num_metadata)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(name: str = "t", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = (1 << 64) - 1

MALFORMED = {
    "empty": (b"", "cannot be read"),
    "other magic": (header(magic=b"GGML"), "not a GGUF file"),
    "old version": (header(version=1), "version 1"),
    "big-endian": (header(version=3 << 24), "version 50331648"),
    "absurd number of tensors": (header(num_tensors=HUGE), f"{HUGE} tensors"),
    "absurd number of keys": (header(num_metadata=1 << 40), f"{1 << 40} metadata entries"),
    "absurd key length": (header(0, 1) + struct.pack("<Q", HUGE) + bytes(64), f"needs {HUGE} bytes"),
    "absurd array": (
        header(0, 1) + text("a") + struct.pack("<IIQ", 9, 4, HUGE) + bytes(64),
        "truncated or malformed: the metadata value 'a'",
    ),
    "absurd text array": (
        header(0, 1) + text("a") + struct.pack("<IIQ", 9, 8, 1 << 60) + bytes(64),
        f"claims {1 << 60} strings",
    ),
    "text too long in array": (
        header(0, 1) + text("a") + struct.pack("<IIQQ", 9, 8, 1, HUGE) + bytes(64),
        "bytes after the end of the file",
    ),
    "nested array": (header(0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), "value type 9"),
    "unknown value type": (header(0, 1) + text("a") + struct.pack("<I", 13) + bytes(64), "value type 13"),
    "not UTF-8": (header(0, 1) + struct.pack("<QB", 1, 0xFF) + bytes(64), "not UTF-8"),
    "same key twice": (header(0, 2) + 2 * (text("a") + struct.pack("<IB", 0, 1)) + bytes(64), "'a' appears twice"),
    "odd alignment": (
        header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 24) + bytes(64),
        "general.alignment is 24",
    ),
    "same tensor twice": (header(2) + 2 * tensor() + bytes(256), "'t' appears twice"),
    "no dimensions": (header(1) + tensor(dims=()) + bytes(256), "0 dimensions"),
    "five dimensions": (header(1) + tensor(dims=(1, 1, 1, 1, 1)) + bytes(256), "5 dimensions"),
    "empty dimension": (header(1) + tensor(dims=(4, 0)) + bytes(256), "length 0"),
    "absurd shape": (header(1) + tensor(dims=(HUGE, HUGE, HUGE, HUGE)) + bytes(256), "'t' has"),
    "absurd offset": (header(1) + tensor(offset=1 << 63) + bytes(256), "'t' has 16 bytes at"),
    "unaligned offset": (header(1) + tensor(offset=8) + bytes(256), "'t' has 16 bytes at"),
    "partial block": (header(1) + tensor(dims=(33,), kind=2) + bytes(256), "not a multiple of Q4_0's 32"),
    "known type we do not read": (header(1) + tensor(dims=(256,), kind=15) + bytes(292), "of type Q8_K"),
    "unknown type": (header(1) + tensor(kind=999) + bytes(256), "of type 999"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed(case: str, tmp_path: Path) -> None:
    content, message = MALFORMED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        GgufFile.open(path)
    assert message in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


LONG = "k" * 2_000_000
LONG_NAMES = {
    "key cut off": header(0, 1) + text(LONG),
    "key of an unknown type": header(0, 1) + text(LONG) + struct.pack("<I", 13) + bytes(64),
    "key twice": header(0, 2) + 2 * (text(LONG) + struct.pack("<IB", 0, 1)) + bytes(64),
    "key of a text": header(0, 1) + text(LONG) + struct.pack("<IQB", 8, 1, 0xFF) + bytes(64),
    "key of an absurd array": header(0, 1) + text(LONG) + struct.pack("<IIQ", 9, 8, 1 << 60) + bytes(64),
    "alignment": header(0, 1) + text("general.alignment") + struct.pack("<I", 8) + text(LONG) + bytes(64),
    "tensor of an unknown type": header(1) + tensor(LONG, kind=999) + bytes(256),
    "tensor twice": header(2) + 2 * tensor(LONG) + bytes(256),
    "tensor beyond the end": header(1) + tensor(LONG, offset=1 << 40) + bytes(256),
}


@pytest.mark.parametrize("case", LONG_NAMES)
def test_a_long_name_is_quoted_shortened(case: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(LONG_NAMES[case])
    with pytest.raises(ModelError) as caught:
        GgufFile.open(path)
    assert len(str(caught.value)) < 300
    if case != "key cut off":
        assert "'kkkkkk" in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.gguf cannot be read: No such file"):
        GgufFile.open(tmp_path / "none.gguf")


def test_needs_no_torch() -> None:
    code = "import sys; from rootgraft.engine.checkpoint import gguf, read_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def resident(path: Path) -> int:
    """KiB of a mapped file that are in this process's memory."""
    total, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0] and ":" not in line.split(" ", 1)[0]:
            is_file = line.endswith(str(path))
        elif is_file and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_released_bytes_leave_memory_and_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    large = np.random.default_rng(0).standard_normal((1024, 512), dtype=np.float32)
    writer.add_tensor("small", large[:1])
    writer.add_tensor("large", large)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    file = GgufFile.open(path)
    data = file.data("large")
    assert np.array_equal(data.view(np.float32), large.ravel())
    before = resident(path)
    assert before >= large.nbytes // 1024
    file.release(data)
    assert resident(path) <= before - large.nbytes // 1024 + 8  # pages that others may share
    assert np.array_equal(data.view(np.float32), large.ravel())
    file.release(data[100:200])
    file.release(data[:0])
    assert np.array_equal(file.data("small").view(np.float32), large[0])


def write_split(folder: Path, count: int = 3, *, num_tensors: int | None = None) -> list[Path]:
    """A model in several files, as ``gguf-split`` writes one: the first has the metadata."""
    whole = small_gguf.tensors()
    names = list(whole)
    paths = []
    for index in range(count):
        path = folder / f"model-Q8_0-{index + 1:05d}-of-{count:05d}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint16("split.no", index)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(names) if num_tensors is None else num_tensors)
        for key, value in small_gguf.METADATA.items() if index == 0 else ():
            small_gguf._add(writer, f"llama.{key}", value)
        for name in names[index::count]:
            writer.add_tensor(name, whole[name])
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        paths.append(path)
    return paths


def test_a_split_model_is_read_as_one_file(tmp_path: Path) -> None:
    first, *_ = write_split(tmp_path)
    file = GgufFile.open(first)
    for name, values in small_gguf.tensors().items():
        data = file.data(name)
        assert np.array_equal(data.view(np.float32).reshape(values.shape), values)
        file.release(data)
    assert len(file.parts) == 3 and base_digest(first) == base_digest(file)


def test_a_split_model_is_refused_where_a_file_is_missing_or_another(tmp_path: Path) -> None:
    first, second, third = write_split(tmp_path)
    with pytest.raises(ModelError, match=r"it is file 2 of 3 of a model: give the first, model-Q8_0-00001-of-00003"):
        GgufFile.open(second)
    digest = base_digest(first)
    third.write_bytes(third.read_bytes()[:-4] + b"\0\0\0\0")
    assert base_digest(first) != digest
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf is not file 2 of 3"):
        GgufFile.open(first)
    second.unlink()
    with pytest.raises(ModelError, match=r"is one of 3 files of a model, but .*00002-of-00003\.gguf is missing"):
        GgufFile.open(first)
    renamed = first.rename(tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"must be named \.\.\.-00001-of-00003\.gguf"):
        GgufFile.open(renamed)


def test_the_tensors_of_a_split_model_are_counted(tmp_path: Path) -> None:
    first, *_ = write_split(tmp_path, num_tensors=5)
    with pytest.raises(ModelError, match="tensors together"):
        GgufFile.open(first)
