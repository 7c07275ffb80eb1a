"""Adapters of random numbers for a model that need not have a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from rootgraft.engine.loading.base_layout import base_layout
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.kernels.lora_ops import Factors, pack_expansion
from rootgraft.lora.base_projections import EMBEDDING, HEAD
from rootgraft.lora.lora_step import AdapterBank


def random_bank(model: DecoderModel, folder: Path, told: Callable[..., None] = lambda *tensors: None) -> AdapterBank:
    """Two adapters: one of all products but the head, one of the embedding and of queries, keys and values.

    Args:
        folder: the model's config.
        told: called with the tensors of each projection.
    """
    layout = base_layout(model, folder, dummy=True)
    bank = AdapterBank(layout, 2)
    generator = torch.Generator().manual_seed(1)
    for slot in range(2):
        used = set()
        for shape in layout.products:
            if shape.name == HEAD or (slot and "qkv" not in shape.name and shape.name != layout.projections[0].name):
                continue
            ranks = tuple(2 + slot for _ in shape.sizes)
            total = sum(ranks)
            a = torch.randn(
                (shape.width, total) if shape.name == EMBEDDING else (total, shape.width), generator=generator
            )
            b = [torch.randn(n, rank, generator=generator) for n, rank in zip(shape.sizes, ranks, strict=True)]
            packed = torch.cat([pack_expansion(matrix.to(layout.dtype)) for matrix in b])
            factors = Factors((a * 0.1).to(layout.dtype), torch.ones(total), ranks, packed)
            told(*factors.tensors())
            place = shape.place
            name, row = (shape.name, slot) if place is None else (place.product, slot * place.count + place.expert)
            bank._tables[name].put(row, factors)
            used.add(name)
        bank._used[slot] = frozenset(used)
    return bank
