"""The digest of a base model: equal for copies, different for any other configuration, layout or weights."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.models.small_gguf import tensors, write

from rootgraft.engine.checkpoint.base_digest import BLOCK, base_digest
from rootgraft.engine.errors import ModelError

SIZE = 10 * BLOCK  # bytes of the large tensor


def arrays() -> dict[str, Any]:
    return {"large": np.zeros(SIZE // 2, np.float16), "small": np.ones(3, np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text('{"model_type": "llama"}')
    save_file(arrays(), made / "model.safetensors")
    return made


def test_it_is_of_the_content_and_not_of_the_place(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere"
    shutil.copytree(folder, copy)
    os.utime(copy / "model.safetensors", (1, 1))
    (copy / "README.md").write_text("text that no weight depends on")
    digest = base_digest(folder)
    assert re.fullmatch("[0-9a-f]{32}", digest) and base_digest(copy) == digest == base_digest(folder)


def change_tensor(name: str, at: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = arrays()
        content[name][at] += 1
        save_file(content, folder / "model.safetensors")

    return change


def rename(folder: Path) -> None:
    content = arrays()
    save_file({"other": content["large"], "small": content["small"]}, folder / "model.safetensors")


def retype(folder: Path) -> None:
    save_file(arrays() | {"large": np.zeros(SIZE // 4, np.float32)}, folder / "model.safetensors")


def shard(folder: Path) -> None:
    """The same tensors in two files."""
    (folder / "model.safetensors").unlink()
    for name, value in arrays().items():
        save_file({name: value}, folder / f"{name}.safetensors")
    table = {name: f"{name}.safetensors" for name in arrays()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "config": lambda folder: (folder / "config.json").write_text('{"model_type": "llama", "rope_theta": 1}'),
    "the first number of a tensor": change_tensor("large", 0),
    "one in its middle": change_tensor("large", SIZE // 4),
    "the last one": change_tensor("large", -1),
    "a tensor smaller than a sample": change_tensor("small", 1),
    "a tensor's name": rename,
    "a tensor's type": retype,
    "shards": shard,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_another_model_has_another_digest(folder: Path, change: Callable[[Path], Any]) -> None:
    before = base_digest(folder)
    change(folder)
    assert base_digest(folder) != before


def test_what_it_does_not_see(folder: Path) -> None:
    """A single number between the samples, as its docstring says."""
    before = base_digest(folder)
    change_tensor("large", 3 * BLOCK)(folder)
    assert base_digest(folder) == before


def test_random_weights_follow_from_the_configuration(folder: Path) -> None:
    digest = base_digest(folder, dummy=True)
    (folder / "model.safetensors").unlink()
    assert base_digest(folder, dummy=True) == digest
    CHANGES["config"](folder)
    assert base_digest(folder, dummy=True) != digest


def test_a_gguf_file(tmp_path: Path) -> None:
    content = tensors()
    one, same = (write(tmp_path / name, content) for name in ("one.gguf", "same.gguf"))
    digest = base_digest(one)
    assert base_digest(same) == digest != base_digest(one, dummy=True)
    assert base_digest(write(tmp_path / "context.gguf", content, context_length=64)) != digest
    content["blk.0.attn_v.weight"][5, 5] += 1
    assert base_digest(write(tmp_path / "value.gguf", content)) != digest


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{}", (2).to_bytes(8, "little") + b"[]", b"\xff" * 20])
def test_malformed_headers_are_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        base_digest(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files_are_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError, match=re.escape(name) if name != "config.json" else "No such file"):
        base_digest(folder)
