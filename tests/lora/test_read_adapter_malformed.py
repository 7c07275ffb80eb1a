"""Malformed, hostile and unsupported adapters: refused with an error that names the cause, and touching nobody."""

from __future__ import annotations

import tracemalloc
from concurrent import futures
from typing import Any

import pytest
import torch
from support.models.bad_adapters import (
    CASES,
)
from support.models.lora_folders import (
    file_of,
    good_config,
    good_tensors,
    small_reader,
    write_folder,
)

from rootgraft.lora.adapter_pool import AdapterPool
from rootgraft.lora.errors import AdapterError
from rootgraft.lora.safetensors_file import read_tensors

OF_VALUES = [
    CASES[name][0]
    for name in ("a whole linear", "a full matrix", "a base weight of another model", "values NaN", "values infinite")
]


def test_the_corpus_is_large():
    assert len(CASES) >= 120


@pytest.mark.parametrize(("write", "cause"), CASES.values(), ids=CASES.keys())
def test_refused(write, cause, tmp_path):
    root = tmp_path / "adapters"
    root.mkdir()
    write(root / "bad")
    with pytest.raises(AdapterError, match=cause) as refused:
        small_reader(root).read("bad")
    assert str(tmp_path) not in str(refused.value)
    if write not in OF_VALUES:  # all others are told before the base model is loaded
        with pytest.raises(AdapterError) as early:
            small_reader(root).check("bad")
        assert str(early.value) == str(refused.value)
    assert len(str(refused.value)) <= 600
    str(refused.value).encode()


@pytest.mark.parametrize(
    ("base", "told"),
    [
        ("Qwen/Qwen2.5-0.5B", " was trained on Qwen/Qwen2.5-0.5B."),
        ("/home/ann/models/qwen/", " was trained on qwen."),
        ("C:\\models\\qwen", " was trained on qwen."),
        (None, "sizes it must be [2, 6]."),
        (7, "sizes it must be [2, 6]."),
    ],
)
def test_an_adapter_of_another_base_names_it(base, told, tmp_path):
    tensors = good_tensors()
    name = next(iter(tensors))
    tensors[name] = torch.ones(2, tensors[name].shape[1] + 1)
    write_folder(tmp_path / "bad", good_config(base_model_name_or_path=base), file_of(tensors))
    with pytest.raises(AdapterError) as refused:
        small_reader(tmp_path).read("bad")
    assert str(refused.value).endswith(told)


@pytest.mark.parametrize(
    "head",
    [bytes(8), (1 << 19).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"{}"],
    ids=["empty header", "header of zeros", "no tensors"],
)
def test_a_header_is_checked_before_memory_is_taken_for_the_tensors(head, tmp_path):
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(head)
    with weights.open("r+b") as file:
        file.truncate(3 << 30)  # sparse
    tracemalloc.start()
    try:
        with pytest.raises(AdapterError, match=r"malformed header|holds no tensors"):
            read_tensors(weights, 4 << 30)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "path", ["../outside", "/etc", "a/../../outside", "", "\0", "x" * 5000, "a" * 300, "loop", "\ud800"]
)
def test_paths_that_lead_nowhere_or_out(path, tmp_path):
    root = tmp_path / "adapters"
    root.mkdir()
    write_folder(tmp_path / "outside")
    (root / "loop").symlink_to(root / "loop")
    with pytest.raises(AdapterError):
        small_reader(root).read(path)


def test_all_of_them_touch_nobody(tmp_path):
    """The whole corpus, under the good adapter's name and others: the good one stays, with its slot and its bits."""
    root = tmp_path / "adapters"
    write_folder(root / "good")
    adapters = AdapterPool(small_reader(root), max_loras=2, max_adapters=500, max_cpu_bytes=1 << 20, patience=4)
    adapters.load("good", "good")
    wait(adapters)
    good = adapters.registry.get("good")
    assert good is not None
    adapters.registry.pin(good)
    slot = adapters.slots.acquire(good.load_id)
    before = adapters.cache.get(good.digest)
    for index, (write, _) in enumerate(CASES.values()):
        write(root / f"bad{index}")
        adapters.load("good" if index % 2 else f"name{index}", f"bad{index}")
    results = wait(adapters)
    assert len(results) == len(CASES) and all(result.error and not result.version for result in results)
    assert list(adapters.registry) == [good] and good.pins == 1
    assert adapters.cache.get(good.digest) is before and len(adapters.cache) == 1
    assert adapters.slots.num_resident == 1 and adapters.slots.pins(good.load_id) == 1
    adapters.slots.release(slot)
    adapters.slots.check()
    adapters.registry.check()
    adapters.close()


def wait(adapters: AdapterPool) -> list[Any]:
    """Poll until nothing is being loaded."""
    results = adapters.poll()
    while adapters.loading:
        futures.wait([load.future for load in adapters._loads], return_when=futures.FIRST_COMPLETED)
        results += adapters.poll()
    return results


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/x", "x/", "a//b", "x y", "x\n", "é", "x" * 257, "-x", "a/.b"]
)
def test_names_that_are_refused(name, tmp_path):
    adapters = AdapterPool(small_reader(), max_loras=1, max_adapters=1, max_cpu_bytes=0, patience=1)
    with pytest.raises(AdapterError) as refused:
        adapters.load(name, str(tmp_path))
    assert refused.value.option == "name"
    adapters.close()
