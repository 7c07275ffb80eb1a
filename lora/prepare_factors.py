"""Prepare factors: converts an adapter as PEFT saves it to the kernels' factors, one set for each fused projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from ..kernels.lora_ops import Factors, pack_expansion
from ..kernels.memory import lazy_zeros
from ..kernels.side_stream import side_stream
from .adapter_weights import AdapterWeights
from .base_projections import EMBEDDING, HEAD, BaseLayout, ProjectionShape
from .errors import AdapterError
from .own.own_weights import OwnWeights
from .published.absorbed_heads import head_factors
from .published.module_weights import ModuleWeights

_ROWS = 4096
_DEVICE_CELLS = 1 << 22
_ON_GPU = Lock()

NORM_BYTES = 5 * 4 * _DEVICE_CELLS
"""Size in bytes of the GPU memory that the computation of DoRA's norms needs: some blocks in fp32, and the factors."""
# Alignment of factors in bytes, so that they begin at whole cache lines.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """An adapter ready for a slot.

    Attributes:
        factors: factors by the name of the projection, for the projections that the adapter changes.
        digest: digest of the adapter's content, its identity.
        invocation_tokens: invocation tokens of an activated LoRA; empty for an ordinary adapter.
        rank: the largest rank of a module.
        num_bytes: size of its factors and its own weights in bytes.
        block: one block of memory that contains all its factors.
        own: the adapter's weights that replace the base model's; None if there are none.
    """

    factors: Mapping[str, Factors]
    digest: str
    invocation_tokens: tuple[int, ...]
    rank: int
    num_bytes: int
    block: Tensor
    own: OwnWeights | None = None

    @property
    def has_matrix(self) -> bool:
        """Whether the adapter has a whole embedding or head."""
        return self.own is not None and self.own.has_matrix


@torch.inference_mode()
def prepare(weights: AdapterWeights, layout: BaseLayout, own: OwnWeights | None = None) -> PreparedAdapter:
    """Convert an adapter to factors of the base model's projections and type, in host memory.

    Args:
        own: the adapter's weights that replace the base model's. LoRA of a whole embedding or head is merged into them.

    Raises:
        AdapterError: values leave the range of the model's type, a DoRA norm is zero, or ``head_factors`` refuses the
            adapter.
    """
    merged = () if own is None else (own.embedding and EMBEDDING, own.head and HEAD)
    factors: dict[str, Factors] = {}
    for shape in layout.projections:
        if shape.name in merged or not any(module in weights.modules for module in shape.modules):
            continue
        if shape.heads is None:
            factors[shape.name] = _factors(shape, weights.modules, layout)
        else:
            module, activated = weights.modules[shape.name], bool(weights.invocation_tokens)
            factors |= head_factors(shape, shape.heads, module, layout, activated=activated)
    block, factors = join_factors(factors, pinned=layout.device.type == "cuda")
    return PreparedAdapter(
        factors=factors,
        digest=weights.digest,
        invocation_tokens=weights.invocation_tokens,
        rank=weights.rank,
        num_bytes=block.nbytes + (own.num_bytes if own else 0),
        block=block,
        own=own,
    )


def join_factors(factors: Mapping[str, Factors], *, pinned: bool) -> tuple[Tensor, dict[str, Factors]]:
    """Copy all factors to one block of memory, in the order of a forward pass. Shared tensors are copied once.

    On a CPU the block may be in huge pages, which speeds up a decode step that reads every byte once. For a GPU the
    block is ``pinned``, so that one asynchronous copy transfers the adapter.
    """
    distinct = {tensor.data_ptr(): tensor for part in factors.values() for tensor in part.tensors()}
    size = sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in distinct.values())
    block = torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else lazy_zeros((size,), torch.uint8)
    used = 0
    moved: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        nonlocal used
        if (known := moved.get(tensor.data_ptr())) is not None:
            return known
        target = block[used : used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        used += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        moved[tensor.data_ptr()] = target.copy_(tensor)
        return target

    return block, {name: part.map(move) for name, part in factors.items()}


def _factors(shape: ProjectionShape, modules: Mapping[str, ModuleWeights], layout: BaseLayout) -> Factors:
    found = [modules.get(name) for name in shape.modules]
    present = [module for module in found if module is not None]
    a = torch.cat([module.a.to(layout.dtype) for module in present])
    b = torch.cat([pack_expansion(module.b.to(layout.dtype)) for module in present])
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise AdapterError(f"Weights of {shape.name} are beyond the range of {layout.dtype}.", shape.name)
    gain, add = _epilogue(shape, found, layout)
    if shape.name == EMBEDDING:
        a = a.T
    return Factors(
        a=a.contiguous(),
        scale=torch.cat([module.scales for module in present]),
        ranks=tuple(0 if module is None else module.rank for module in found),
        b=b,
        gain=gain,
        add=add,
    )


def _epilogue(
    shape: ProjectionShape, modules: list[ModuleWeights | None], layout: BaseLayout
) -> tuple[Tensor | None, Tensor | None]:
    """Return gain and addend of a projection, [N] fp32; None for a gain of ones or an addend of zeros.

    DoRA computes ``g * (W x + s B A x) + bias``. With ``y = W x + base_bias`` this equals ``g * (y + s B A x) + bias -
    g * base_bias``, where bias is the adapter's or else the base model's. A bias b of B adds ``s * b``.
    """
    gains: list[Tensor] = []
    adds: list[Tensor] = []
    for name, size, module in zip(shape.modules, shape.sizes, modules, strict=True):
        gain, add = torch.ones(size), torch.zeros(size)
        if module is not None and module.magnitude is not None:
            gain = module.magnitude.float() / _norm(name, module, layout)
        changes_bias = module is not None and (module.magnitude is not None or module.own_bias is not None)
        if changes_bias and (bias := layout.read_bias(name)) is not None:
            own = bias if module is None or module.own_bias is None else module.own_bias
            add = own.float().cpu() - gain * bias.float().cpu()
        if module is not None and module.bias is not None:
            add = add + module.scale * module.bias.float()
        gains.append(gain)
        adds.append(add)
    gain, add = torch.cat(gains), torch.cat(adds)
    if not (torch.isfinite(gain).all() and torch.isfinite(add).all()):
        raise AdapterError(f"The magnitude or bias of {shape.name} is out of range.", shape.name)
    return (gain if (gain != 1).any() else None), (add if (add != 0).any() else None)


def _norm(name: str, module: ModuleWeights, layout: BaseLayout) -> Tensor:
    """Return ``row_norms`` of a module, computed on the layout's device, on a GPU parallel to the steps."""
    weight = layout.read_weight(name)
    if layout.device.type == "cuda":
        block = max(1, _DEVICE_CELLS // weight.shape[1])
        # Only one conversion runs at a time, because the memory for it is reserved only once.
        with _ON_GPU, side_stream(layout.device).work():
            norm = row_norms(weight, module, layout.device, block, transposed=name == EMBEDDING).cpu()
    else:
        norm = row_norms(weight, module, layout.device, _ROWS, transposed=name == EMBEDDING)
    if not (norm > 0).all():
        raise AdapterError(f"DoRA of {name} divides by the norm of a row that is zero.", name)
    return norm


def row_norms(weight: Tensor, module: ModuleWeights, device: torch.device, block: int, *, transposed: bool) -> Tensor:
    """Return the norm of each row of ``W + s B A``, [N] fp32, computed on ``device``.

    Args:
        weight: W [N, K] on any device; [V, N] if ``transposed``, as an embedding is stored.
        block: number of rows of ``weight`` that are processed at once, because a whole head in fp32 would need
            gigabytes.
    """
    a, b = module.a.to(device).float(), module.scale * module.b.to(device).float()
    left, right = (a.T, b.T) if transposed else (b, a)
    sums = (
        weight[first : first + block].to(device).float() + left[first : first + block] @ right
        for first in range(0, weight.shape[0], block)
    )
    if transposed:
        return torch.as_tensor(sum(each.square().sum(0) for each in sums)).sqrt()
    return torch.cat([torch.linalg.vector_norm(each, dim=1) for each in sums])
