"""The pool's memory, before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import kv_pool
from engine.kv_pool import KvPool
from engine.loading.model_config import read_model_config


@pytest.fixture
def pool(tiny_llama: Path) -> KvPool:
    return KvPool(read_model_config(tiny_llama), 40, 16, torch.float32, torch.device("cpu"))


def test_memory_of_the_first_pages_is_taken_and_values_stay(pool, monkeypatch):
    taken = []
    monkeypatch.setattr(kv_pool, "populate", lambda part: taken.append((part.data_ptr(), part.nbytes)))
    monkeypatch.setattr(kv_pool, "_POPULATED_AT_ONCE", 8 * pool.k_layers[0][0].nbytes)
    pool.populate(20)
    layers = (*pool.k_layers, *pool.v_layers)
    assert {address for address, _ in taken} == {layer[first].data_ptr() for layer in layers for first in (0, 8, 16)}
    monkeypatch.undo()
    pool.k[:, 3] = 5
    pool.populate(1000)
    assert (pool.k[:, 3] == 5).all()
    assert pool.k.sum() == pool.k[:, 3].sum()


def test_where_memory_cannot_be_taken_nothing_happens(pool, monkeypatch):
    def refuse(part: torch.Tensor) -> None:
        raise OSError("not here")

    monkeypatch.setattr(kv_pool, "populate", refuse)
    pool.populate(20)
    assert not pool.k.any()
