"""LoRA ops for many adapters in one call, on native kernels, Triton kernels or plain torch.

For each token t of a slot's segment, in place,

    y[t] = gain * (y[t] + B (scale * A x[t])) + add          x [T, K], y [T, N], A [R, K], B [N, R] block by block

N may be the columns of several modules side by side (q, k, v); each module has its own rank in B's blocks. The gain is
for DoRA, the addend for biases. Tokens outside of all segments keep their values. On the native path every sum has a
fixed order, so a token's bits do not depend on the other tokens, on the segments or on the number of threads. On a GPU
the bits are the same in every run of the same step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import lora_reference, ops
from .layouts.attention_arguments import RopeParams
from .layouts.lora_arguments import Factors, Segments, ShrunkInputs, SlotTable, Tiles, pack_expansion
from .triton import launch

__all__ = [
    "Factors",
    "Segments",
    "ShrunkInputs",
    "SlotTable",
    "Tiles",
    "lora_add_rms_norm",
    "lora_embed",
    "lora_experts",
    "lora_gated_activation",
    "lora_heads",
    "lora_rope_store_kv",
    "lora_shrink_beside",
    "lora_shrink_expand",
    "pack_expansion",
]


def lora_shrink_beside(x: Tensor, table: SlotTable, segments: Segments) -> ShrunkInputs | None:
    """Start to compute ``scale * A x`` on a GPU, for ``x`` [T, K].

    In a captured pass it runs parallel to the next launch, the base model's product of ``x``. ``lora_shrink_expand``
    then computes the rest, and must be called. Returns None if that call computes everything.

    Raises:
        ValueError: x has another shape or type than the table.
    """
    _check_inputs(x, x.shape[0], table)
    if segments.tiles is None or not _takes_triton(table, x):
        return None
    from .triton import lora_kernels

    return lora_kernels.shrink_beside(x, table, segments, invariant=ops.is_invariant(x.device))


def lora_shrink_expand(
    y: Tensor, x: Tensor, table: SlotTable, segments: Segments, shrunk: ShrunkInputs | None = None
) -> None:
    """Add the adapters' part of a projection to ``y`` [T, N], for inputs ``x`` [T, K] in the factors' type.

    ``y`` has the same type, or float32.

    Args:
        shrunk: result of ``lora_shrink_beside`` for the same x, table and segments.

    Raises:
        IndexError: a segment names a token or a slot that does not exist; nothing is written.
        ValueError: x or y has another shape or type than the table, or segments lack the slots that this path reads.
    """
    _run(y, x, None, table, segments, shrunk)


def lora_gated_activation(
    y: Tensor,
    x: Tensor,
    kind: ops.Activation,
    table: SlotTable,
    segments: Segments,
    shrunk: ShrunkInputs | None = None,
) -> Tensor:
    """Return ``gated_activation`` of ``y`` [T, 2 * I] plus the adapters' part of it, [T, I]. y is undefined afterwards.

    For arguments and errors see ``lora_shrink_expand``.
    """
    if (tiles := _fused_tiles(segments, shrunk, y)) is not None:
        from .triton import lora_activation

        if _takes_triton(table, y, x) and lora_activation.takes(y, table, tiles):
            assert shrunk is not None
            return lora_activation.expand_gated(y, kind, shrunk, table, segments)
    lora_shrink_expand(y, x, table, segments, shrunk)
    return ops.gated_activation(y, kind)


def lora_rope_store_kv(
    qkv: Tensor,
    x: Tensor,
    positions: Tensor,
    kv_loc: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    params: RopeParams,
    table: SlotTable,
    segments: Segments,
    shrunk: ShrunkInputs | None = None,
) -> Tensor:
    """Return ``ops.rope_store_kv`` of ``qkv`` [T, (Hq + 2 * Hkv) * D] plus the adapters' part of it, [T, Hq, D].

    qkv is undefined afterwards. For other arguments and errors see ``ops.rope_store_kv`` and ``lora_shrink_expand``.
    """
    if (tiles := _fused_tiles(segments, shrunk, qkv)) is not None:
        from .triton import lora_rope

        if _takes_triton(table, qkv, x) and lora_rope.takes(qkv, k_cache, v_cache, params, table, tiles):
            assert shrunk is not None
            return lora_rope.expand_rope_store(
                qkv, positions, kv_loc, k_cache, v_cache, params, shrunk, table, segments
            )
    lora_shrink_expand(qkv, x, table, segments, shrunk)
    return ops.rope_store_kv(qkv, positions, kv_loc, k_cache, v_cache, params)


def lora_add_rms_norm(
    y: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    table: SlotTable,
    segments: Segments,
    shrunk: ShrunkInputs | None = None,
) -> Tensor:
    """Return ``ops.add_rms_norm`` of ``y`` [T, H] plus the adapters' part of it, [T, H]; residual changes in place.

    y is undefined afterwards. For other arguments and errors see ``ops.add_rms_norm`` and ``lora_shrink_expand``.
    """
    if (tiles := _fused_tiles(segments, shrunk, y)) is not None:
        from .triton import lora_norm

        if _takes_triton(table, y, x) and lora_norm.takes(y, residual, weight, table, tiles):
            assert shrunk is not None
            return lora_norm.expand_add_norm(y, residual, weight, eps, offset, shrunk, table, segments)
    lora_shrink_expand(y, x, table, segments, shrunk)
    return ops.add_rms_norm(y, residual, weight, eps, offset)


def _fused_tiles(segments: Segments, shrunk: ShrunkInputs | None, y: Tensor) -> Tiles | None:
    """Return the step's tiles if what reads y may add the adapters' part to it.

    With batch invariance it may not, as the bits must be those of separate launches.
    """
    return None if shrunk is None or ops.is_invariant(y.device) else segments.tiles


def lora_embed(y: Tensor, token_ids: Tensor, table: SlotTable, segments: Segments) -> None:
    """Add the adapters' part of an embedding to ``y`` [T, H], for the tokens ``token_ids`` [T] int64.

    ``y`` is of the factors' type or float32.

    Raises:
        IndexError: a segment or a token id is out of range; nothing is written.
        ValueError: y or token_ids has another shape than the table's, or token_ids another type, or segments lack the
            slots that this path reads.
    """
    _run(y, None, token_ids, table, segments)


def lora_experts(y: Tensor, x: Tensor, experts: Tensor, table: SlotTable, num_experts: int, segments: Segments) -> None:
    """Add the adapters' part of a product of experts to ``y`` [T, k, N], for inputs ``x`` [T, K] or [T, k, K].

    Args:
        experts: [T, k] int32, from the router.
        table: slot ``s * num_experts + e`` has the factors of adapter slot s for expert e.
        num_experts: E.

    Raises:
        IndexError: a segment names a token or a slot that does not exist, or an expert does not exist; nothing is
            written.
        ValueError: x or y has another shape or type than the table, or segments lack slots.
    """
    shapes = (experts.shape[:1], experts.shape)
    if y.shape != (*experts.shape, sum(table.sizes)) or x.shape not in [(*shape, table.width) for shape in shapes]:
        raise ValueError(f"x {list(x.shape)} and y {list(y.shape)} do not fit {list(experts.shape)} experts")
    if x.dtype is not table.dtype or y.dtype is not table.dtype:
        raise ValueError(f"x and y are {x.dtype} and {y.dtype}, not {table.dtype}")
    if segments.tiles is not None and _takes_triton(table, y, x):
        from .triton import expert_lora

        expert_lora.shrink_expand(y, x, experts, table, num_experts, segments)
        return
    kernels = ops.native_kernels() if y.is_cpu else None
    if kernels is not None and kernels.lora.takes(table, y, x):
        kernels.lora.expert_shrink_expand(y, x, experts, table, num_experts, segments)
    else:
        lora_reference.expert_shrink_expand(y, x, experts, table, num_experts, segments)


def lora_heads(y: Tensor, x: Tensor, table: SlotTable, num_heads: int, segments: Segments) -> None:
    """Add the adapters' part of a product of heads to ``y``, for inputs ``x``. Both have H heads a token, side by side.

    Args:
        y: [T, H * (N + more)] in any division of the last dimension; the first N values of a head change.
        x: [T, H * (K + more)]; the first K values of a head are read.
        table: slot ``s * num_heads + h`` has the factors of adapter slot s for head h.
        num_heads: H.

    Raises:
        IndexError: a segment names a token or a slot that does not exist; nothing is written.
        ValueError: x or y has another shape or type than the table, or segments lack slots.
    """
    more = x.shape[1] // num_heads - table.width
    if more < 0 or y.numel() != len(x) * num_heads * (sum(table.sizes) + more) or len(y) != len(x):
        raise ValueError(f"x {list(x.shape)} and y {list(y.shape)} do not fit {num_heads} heads")
    if x.dtype is not table.dtype or y.dtype is not table.dtype:
        raise ValueError(f"x and y are {x.dtype} and {y.dtype}, not {table.dtype}")
    if segments.tiles is not None and _takes_triton(table, y, x):
        from .triton import expert_lora

        expert_lora.head_shrink_expand(y, x, table, num_heads, segments)
        return
    kernels = ops.native_kernels() if y.is_cpu else None
    if kernels is not None and kernels.lora.takes(table, y, x):
        kernels.lora.head_shrink_expand(y, x, table, num_heads, segments)
    else:
        lora_reference.head_shrink_expand(y, x, table, num_heads, segments)


def _run(
    y: Tensor,
    x: Tensor | None,
    token_ids: Tensor | None,
    table: SlotTable,
    segments: Segments,
    shrunk: ShrunkInputs | None = None,
) -> None:
    rows = y.shape[0]
    if y.shape[1] != sum(table.sizes):
        raise ValueError(f"y is {list(y.shape)}; the projection has {sum(table.sizes)} columns")
    if x is not None:
        _check_inputs(x, rows, table)
    if token_ids is not None and (token_ids.shape != (rows,) or token_ids.dtype is not torch.int64):
        raise ValueError(f"token_ids is {token_ids.dtype} {list(token_ids.shape)}, not torch.int64 [{rows}]")
    floats = (y,) if x is None else (y, x)
    if segments.tiles is not None and _takes_triton(table, *floats):
        from .triton import lora_kernels

        invariant = ops.is_invariant(y.device)
        if shrunk is None:
            lora_kernels.shrink_expand(y, x, token_ids, table, segments, invariant=invariant)
        else:
            lora_kernels.expand(y, shrunk, table, segments, invariant=invariant)
        return
    if shrunk is not None:
        shrunk.wait()
    kernels = ops.native_kernels() if y.is_cpu else None
    if kernels is not None and kernels.lora.takes(table, *floats):
        kernels.lora.shrink_expand(y, x, token_ids, table, segments)
    else:
        lora_reference.lora_shrink_expand(y, x, token_ids, table, segments)


def _check_inputs(x: Tensor, rows: int, table: SlotTable) -> None:
    if x.shape != (rows, table.width) or x.dtype is not table.dtype:
        raise ValueError(f"x is {x.dtype} {list(x.shape)}, not {table.dtype} [{rows}, {table.width}]")


def _takes_triton(table: SlotTable, y: Tensor, *others: Tensor) -> bool:
    """Return whether the kernels support the types: factors and x in a model's type, y in that type or fp32."""
    return (
        ops.on_triton(y.device)
        and launch.is_model_type(table.dtype, on_gpu=y.is_cuda)
        and launch.is_placed(y, *others)
        and y.dtype in (table.dtype, torch.float32)
    )
