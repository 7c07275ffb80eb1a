"""Messages of rank 0 that bring a part of an adapter: a head in JSON, and the bytes of all tensors."""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
from torch import Tensor

from ...kernels.lora_ops import Factors
from ...kernels.memory import lazy_zeros
from ...lora.own.own_weights import OwnRows, OwnWeights, TokenPart
from ...lora.prepare_factors import PreparedAdapter
from ...lora.published.saved_modules import NormWeights

_Place = tuple[int, str, list[int]]  # offset, type and shape of a tensor
_LENGTH = struct.Struct("<q")


def pack_adapter(slot: int, adapter: PreparedAdapter) -> bytes:
    """Return the message for a rank: a slot, and an adapter's factors and own embedding and norms.

    An adapter's own head is left out, because only rank 0 has the head.
    """
    places = {name: (list(part.ranks), _places(adapter.block, part)) for name, part in adapter.factors.items()}
    tensors = [adapter.block]
    own = None if adapter.own is None else _own_places(adapter.own, tensors)
    head = json.dumps([slot, adapter.digest, adapter.block.nbytes, places, own]).encode()
    return b"".join((_LENGTH.pack(len(head)), head, *map(_bytes, tensors)))


def unpack_adapter(content: bytes, *, pinned: bool) -> tuple[int, PreparedAdapter]:
    """Invert ``pack_adapter``; for a GPU the adapter's memory is ``pinned``."""
    (length,) = _LENGTH.unpack_from(content)
    begin = _LENGTH.size + length
    slot, digest, size, places, own_places = json.loads(content[_LENGTH.size : begin])
    block = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else lazy_zeros((size,), torch.uint8)
    if size:
        block.copy_(torch.frombuffer(bytearray(content[begin : begin + size]), dtype=torch.uint8))
    factors = {name: _factors(block, ranks, parts) for name, (ranks, parts) in places.items()}
    own = None if own_places is None else _own_weights(content[begin + size :], *own_places)
    return slot, PreparedAdapter(factors, digest, (), 0, block.nbytes + (own.num_bytes if own else 0), block, own)


def _own_places(own: OwnWeights, tensors: list[Tensor]) -> tuple[Any, Any]:
    """Add an adapter's own weights to ``tensors``; return the places of embedding and norms, counted from the first."""
    offset = 0

    def place(tensor: Tensor | None) -> _Place | None:
        nonlocal offset
        if tensor is None:
            return None
        tensors.append(tensor)
        found = offset, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        offset += tensor.nbytes
        return found

    part = own.embedding
    embedding = None if part is None else (part.own.key, place(part.own.rows), place(part.ids))
    return embedding, {name: (place(norm.weight), place(norm.bias)) for name, norm in own.norms.items()}


def _own_weights(content: bytes, embedding: Any, norms: Any) -> OwnWeights:
    block = torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def tensor(place: _Place | None) -> Tensor | None:
        return None if place is None else _tensor(block, *place)

    part = None
    if embedding is not None:
        key, rows, ids = embedding
        part = TokenPart(OwnRows(key, tensor(rows), None), tensor(ids))
    return OwnWeights(
        embedding=part,
        norms={name: NormWeights(tensor(weight), tensor(bias)) for name, (weight, bias) in norms.items()},
    )


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _places(block: Tensor, part: Factors) -> list[_Place | None]:
    """Return the place of each tensor of ``Factors`` in the block: offset, type and shape."""
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
    part = block[offset : offset + size]
    # Numbers begin at whole multiples of their size, as factors do.
    return (part.clone() if offset % kind.itemsize else part).view(kind).view(shape)
