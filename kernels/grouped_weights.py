"""Packing of stored weights of 4 to 8 bits for a GPU, and reading them back in plain torch.

A product is ``sum over groups of scale * (sum of x * number)`` with exact products and fp32 sums. So it is as precise
as with the dequantised weight in fp32. If a matrix fits no form, because of its width or because its groups have
unequal sizes, ``pack_grouped`` returns None, and the caller widens it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from .layouts.grouped_forms import (
    LEAST_CHUNK,
    MOST_CHUNK,
    SUPER_BLOCK,
    GroupedLinear,
    GroupedPart,
    GroupForm,
    NumberForm,
    Offsets,
    Scales,
    StoredNumbers,
)

__all__ = [
    "GroupForm",
    "GroupedLinear",
    "GroupedPart",
    "NumberForm",
    "Offsets",
    "Scales",
    "StoredNumbers",
    "by_module",
    "dequantise",
    "group_form",
    "grouped_linear",
    "pack_grouped",
    "rows",
]

_NOT_A_NUMBER: Final = 0x7F  # bits of NaN in E4M3, without the sign
_FLOAT_TYPES: Final = (torch.float16, torch.bfloat16)
_SMALL_GROUP: Final = 16


def group_form(stored: StoredNumbers) -> GroupForm | None:
    """Return the form in which a stored matrix is kept; None if the kernels support none for it."""
    width = stored.shape[1]
    groups = 1 if stored.scales is None else stored.scales.shape[1]
    group = stored.group or (width // groups if width % groups == 0 else 0)
    if not group or -(-width // group) != groups:
        return None
    whole = groups == 1 and stored.offsets is None and stored.scale_kind is Scales.FLOATS
    chunk = _chunk(width, width if groups == 1 else group, stored.numbers)
    if chunk is None or (stored.scale_kind is Scales.PRODUCTS and width % SUPER_BLOCK):
        return None
    scales = Scales.NONE if whole else stored.scale_kind
    return GroupForm(stored.numbers, scales, stored.offset_kind, 0 if whole else group, chunk)


def _chunk(width: int, group: int, numbers: NumberForm) -> int | None:
    """Return the number of inputs multiplied at once: one group, or two of 16 for numbers of fewer than 8 bits."""
    if numbers.bits < 8 and group == _SMALL_GROUP:
        return LEAST_CHUNK if width % LEAST_CHUNK == 0 else None
    least = LEAST_CHUNK if numbers.bits < 8 else _SMALL_GROUP
    most = LEAST_CHUNK if numbers.high_bits else MOST_CHUNK
    sizes = [size for size in (128, 64, 32, 16) if least <= size <= most]
    return next((size for size in sizes if width % size == 0 and group % size == 0), None)


def pack_grouped(
    stored: Sequence[StoredNumbers | Tensor], device: torch.device, dtype: torch.dtype, bias: Tensor | None = None
) -> GroupedLinear | None:
    """Pack matrices [n, K], one below the other, for ``kernels.ops.linear`` on a device.

    Args:
        stored: the matrices, all of one width; a tensor is a plain matrix on the device.
        dtype: type of x.
        bias: [N] or None.

    Returns:
        The weight; None if no form fits one of the stored matrices, or if all matrices are plain.
    """
    parts = [each if isinstance(each, Tensor) else _pack_part(each, device) for each in stored]
    if any(part is None for part in parts) or all(isinstance(part, Tensor) for part in parts):
        return None
    found = [part for part in parts if part is not None]
    widths = {each.shape[1] for each in stored}
    assert len(widths) == 1
    count = sum(each.shape[0] for each in stored)
    return GroupedLinear(widths.pop(), count, dtype, _joined(found), bias)


def by_module(stored: StoredNumbers, turns: int) -> StoredNumbers:
    """Return the rows, which belong to ``turns`` modules in turn, sorted by module."""
    if turns == 1:
        return stored
    order = torch.arange(stored.shape[0]).view(-1, turns).T.flatten()

    def ordered(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[order]

    return replace(
        stored,
        pieces=[torch.cat(list(stored.pieces))[order]],
        scales=ordered(stored.scales),
        super_scales=ordered(stored.super_scales),
        offsets=ordered(stored.offsets),
        super_offsets=ordered(stored.super_offsets),
        factors=ordered(stored.factors),
    )


def _pack_part(stored: StoredNumbers, device: torch.device) -> GroupedPart | None:
    form = group_form(stored)
    if form is None:
        return None
    permutation = None
    if stored.group_of is not None:
        counts = torch.bincount(stored.group_of, minlength=stored.shape[1] // max(1, form.group))
        if not form.group or not bool((counts == form.group).all()):
            return None
        permutation = torch.argsort(stored.group_of, stable=True)
    packed = _pack_numbers(stored, form, permutation, device)
    if packed is None:
        return None
    factors, scales = stored.factors, stored.scales
    if form.scales is Scales.NONE and scales is not None:
        rows = scales[:, 0].float()
        factors, scales = rows if factors is None else factors * rows, None
    if scales is not None and form.scales is Scales.FLOATS:
        scales = narrowed(scales)

    def placed(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.T.contiguous().to(device)

    return GroupedPart(
        form,
        *packed,
        scales=placed(scales),
        super_scales=placed(stored.super_scales),
        offsets=placed(stored.offsets),
        super_offsets=placed(stored.super_offsets),
        factors=None if factors is None else factors.float().contiguous().to(device),
        table=None if stored.table is None else stored.table.float().to(device),
        permutation=None if permutation is None else permutation.to(device),
    )


def narrowed(values: Tensor) -> Tensor:
    """Return numbers in the narrowest type that represents all of them exactly."""
    exact = values.float()
    fitting = (each for each in _FLOAT_TYPES if torch.equal(exact.to(each).float(), exact))
    return values.to(next(fitting, torch.float32))


def _pack_numbers(
    stored: StoredNumbers, form: GroupForm, permutation: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor | None] | None:
    """Return the lowest four bits, or all eight, and the bits above four; None if an E4M3 number is NaN."""
    rows, width = stored.shape
    chunks, numbers = width // form.chunk, form.numbers
    low_bytes = form.chunk if numbers.bits == 8 else form.chunk // 2
    low = torch.empty(chunks, rows, low_bytes, dtype=torch.uint8, device=device)
    high_bytes = form.chunk * numbers.high_bits // 8
    high = torch.empty(chunks, rows, high_bytes, dtype=torch.uint8, device=device) if high_bytes else None
    first = 0
    for piece in stored.pieces:
        end = first + len(piece)
        if numbers is NumberForm.E4M3 and bool(((piece & _NOT_A_NUMBER) == _NOT_A_NUMBER).any()):
            return None
        codes = (piece if permutation is None else piece[:, permutation]).view(len(piece), chunks, form.chunk)
        codes = codes.transpose(0, 1)
        low[:, first:end] = (codes if numbers.bits == 8 else _nibbles(codes)).to(device)
        if high is not None:
            high[:, first:end] = _high_planes(codes >> 4, numbers.high_bits).to(device)
        first = end
    assert first == rows
    return low, high


def _nibbles(codes: Tensor) -> Tensor:
    """[..., chunk] -> [..., chunk / 2] bytes: the second half of a chunk is in the upper four bits."""
    low, high = codes.unflatten(-1, (2, -1)).unbind(-2)
    packed: Tensor = (low & 15) | (high << 4)
    return packed


def _high_planes(bits: Tensor, count: int) -> Tensor:
    """[..., chunk] of ``count`` bits -> [..., chunk * count / 8]: a byte has adjacent inputs of both halves."""
    each = 4 // count
    low, high = bits.unflatten(-1, (2, -1, each)).unbind(-3)  # [..., bytes, each]
    out = torch.zeros(low.shape[:-1], dtype=torch.uint8)
    for index in range(each):
        shift = 2 * count * index
        out |= (low[..., index] << shift) | (high[..., index] << (shift + count))
    return out


def _joined(parts: list[GroupedPart | Tensor]) -> tuple[GroupedPart | Tensor, ...]:
    """Return the parts, with neighbours of equal form, type and permutation joined."""
    first = parts[0]
    if len(parts) == 1 or not all(isinstance(each, GroupedPart) and _is_alike(first, each) for each in parts):
        return tuple(parts)
    grouped = [each for each in parts if isinstance(each, GroupedPart)]
    assert isinstance(first, GroupedPart)

    def joined(name: str, dim: int) -> Tensor | None:
        tensors = [getattr(each, name) for each in grouped]
        return None if tensors[0] is None else torch.cat(tensors, dim)

    weight = joined("weight", 1)
    assert weight is not None
    fields = ("high", "scales", "super_scales", "offsets", "super_offsets")
    others = {name: joined(name, 1) for name in fields}
    return (
        GroupedPart(
            first.form, weight, **others, factors=joined("factors", 0), table=first.table, permutation=first.permutation
        ),
    )


def _is_alike(first: GroupedPart | Tensor, other: GroupedPart) -> bool:
    if isinstance(first, Tensor) or first.form != other.form:
        return False
    types = [tuple(None if tensor is None else tensor.dtype for tensor in each.tensors) for each in (first, other)]
    pairs = (first.table, other.table), (first.permutation, other.permutation)
    return types[0] == types[1] and all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs
    )


# Reading packed weights back.


def dequantise(layer: GroupedLinear) -> Tensor:
    """Return the weight [N, K] in fp32, as the oracle of products and for widening the weight."""
    return torch.cat([_dequantised(each) for each in layer.parts])


def rows(layer: GroupedLinear, ids: Tensor) -> Tensor:
    """Dequantise rows of the weight for an embedding: [T] int64 -> [T, K] fp32, without waiting for the device."""
    (part,) = layer.parts
    if isinstance(part, Tensor):
        return part[ids].float()
    return _dequantised(_some_rows(part, ids))


def _some_rows(part: GroupedPart, ids: Tensor) -> GroupedPart:
    def chosen(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[:, ids]

    factors = None if part.factors is None else part.factors[ids]
    return GroupedPart(
        part.form,
        part.weight[:, ids],
        chosen(part.high),
        chosen(part.scales),
        chosen(part.super_scales),
        chosen(part.offsets),
        chosen(part.super_offsets),
        factors,
        part.table,
        part.permutation,
    )


def _dequantised(part: GroupedPart | Tensor) -> Tensor:
    if isinstance(part, Tensor):
        return part.float()
    form = part.form
    values = _values(part)  # [N, K]
    width = values.shape[1]

    def spread(tensor: Tensor) -> Tensor:
        """[G, N] of any type -> [N, K]."""
        group = -(-width // tensor.shape[0]) if form.group == 0 else form.group
        size = SUPER_BLOCK if tensor is part.super_scales or tensor is part.super_offsets else group
        return tensor.float().T.repeat_interleave(size, dim=1)[:, :width]

    if part.offsets is not None and form.offsets is Offsets.ZERO_POINTS:
        values = values - spread(part.offsets)
    if part.scales is not None:
        values = values * (spread(part.scales) if form.scales is Scales.FLOATS else _scales(part, spread))
    if part.offsets is not None and form.offsets is Offsets.MINIMA:
        values = values + spread(part.offsets)
    if part.offsets is not None and part.super_offsets is not None:
        values = values - spread(part.super_offsets) * spread(part.offsets)
    if part.factors is not None:
        values = values * part.factors[:, None]
    if part.permutation is None:
        return values
    return torch.empty_like(values).index_copy_(1, part.permutation, values)


def _scales(part: GroupedPart, spread: object) -> Tensor:
    """Return scales that are not plain numbers, expanded for each input."""
    assert part.scales is not None and callable(spread)
    found: Tensor
    match part.form.scales:
        case Scales.E8M0:
            exponents = spread(part.scales).int() - 127
            found = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
        case Scales.E4M3:
            wide = part.scales.view(torch.float8_e4m3fn).float()
            found = wide.T.repeat_interleave(part.form.group, dim=1)
        case _:
            assert part.super_scales is not None
            found = spread(part.super_scales) * spread(part.scales)
    return found


def _values(part: GroupedPart) -> Tensor:
    """Return the numbers [N, K] in fp32. Zero points are not subtracted yet."""
    numbers, weight = part.form.numbers, part.weight
    if numbers is NumberForm.INT8:
        signed = part.form.offsets is Offsets.MIDDLE
        return _by_rows(weight.view(torch.int8) if signed else weight).float()
    if numbers is NumberForm.E4M3:
        return _by_rows(weight.view(torch.float8_e4m3fn).float())
    codes = torch.cat((weight & 15, weight >> 4), dim=-1)
    if part.high is not None:
        codes = codes | (_read_planes(part.high, numbers.high_bits) << 4)
    values = _by_rows(codes)
    if numbers is NumberForm.E2M1:
        magnitude = values & 7
        normal = torch.ldexp(((magnitude & 1) + 2).float(), (magnitude.int() >> 1) - 2)
        return torch.where(magnitude < 2, magnitude * 0.5, normal) * (1.0 - (values >> 3) * 2.0)
    if numbers is NumberForm.TABLE:
        assert part.table is not None
        found: Tensor = part.table[values.int()]
        return found
    middle = numbers.middle if part.form.offsets is Offsets.MIDDLE else 0
    return values.float() - middle


def _by_rows(values: Tensor) -> Tensor:
    """[chunks, N, chunk] -> [N, K]."""
    return values.transpose(0, 1).flatten(1)


def _read_planes(planes: Tensor, count: int) -> Tensor:
    """[..., bytes] -> [..., chunk] numbers of ``count`` bits."""
    each, mask = 4 // count, (1 << count) - 1
    halves = [
        torch.stack([(planes >> (2 * count * index + half * count)) & mask for index in range(each)], -1).flatten(-2)
        for half in (0, 1)
    ]
    return torch.cat(halves, -1)


def grouped_linear(x: Tensor, layer: GroupedLinear, out_dtype: torch.dtype) -> Tensor:
    """``kernels.ops.linear`` in plain torch: sums in fp32 over the dequantised weight."""
    out = torch.nn.functional.linear(x.float(), dequantise(layer).to(x.device))
    return (out if layer.bias is None else out + layer.bias.float()).to(out_dtype)
