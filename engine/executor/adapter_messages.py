"""Messages of rank 0 that bring a shard of an adapter: a head in JSON, and the bytes of all factors."""

from __future__ import annotations

import json
import struct

import torch
from torch import Tensor

from ...kernels.lora_ops import Factors
from ...kernels.memory import lazy_zeros
from ...lora.prepare_factors import PreparedAdapter

_Place = tuple[int, str, list[int]]
_LENGTH = struct.Struct("<q")


def pack_adapter(slot: int, adapter: PreparedAdapter) -> bytes:
    """Return a slot and the factors of an adapter, which brings no weights of its own."""
    places = {name: (list(part.ranks), _places(adapter.block, part)) for name, part in adapter.factors.items()}
    head = json.dumps([slot, adapter.digest, places]).encode()
    return b"".join((_LENGTH.pack(len(head)), head, adapter.block.numpy().tobytes()))


def unpack_adapter(content: bytes, *, pinned: bool) -> tuple[int, PreparedAdapter]:
    """Invert ``pack_adapter``; for a GPU the adapter's memory is ``pinned``."""
    (length,) = _LENGTH.unpack_from(content)
    begin = _LENGTH.size + length
    slot, digest, places = json.loads(content[_LENGTH.size : begin])
    size = len(content) - begin
    block = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else lazy_zeros((size,), torch.uint8)
    if size:
        block.copy_(torch.frombuffer(bytearray(content[begin:]), dtype=torch.uint8))
    factors = {name: _factors(block, ranks, parts) for name, (ranks, parts) in places.items()}
    return slot, PreparedAdapter(factors, digest, (), 0, block.nbytes, block)


def _places(block: Tensor, part: Factors) -> list[_Place | None]:
    """Where the tensors of ``Factors`` are in the block, by offset, type and shape."""
    return [
        None
        if tensor is None
        else (tensor.data_ptr() - block.data_ptr(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for tensor in (part.a, part.scale, part.b, part.gain, part.add)
    ]


def _factors(block: Tensor, ranks: list[int], places: list[_Place | None]) -> Factors:
    found = [None if place is None else _tensor(block, *place) for place in places]
    a, scale, b, gain, add = found
    assert a is not None and scale is not None and b is not None
    return Factors(a, scale, tuple(ranks), b, gain, add)


def _tensor(block: Tensor, offset: int, dtype: str, shape: list[int]) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    size = torch.Size(shape).numel() * kind.itemsize
    return block[offset : offset + size].view(kind).view(shape)
