"""Absorbed heads: adapters on ``kv_b_proj`` of MLA, which is computed as two matrix products for each head.

The module's weight is ``W + s B A`` with A [r, K] and B [N, r]. Of head h, with B's rows P_h (for keys) and V_h (for
values), the products become

    (W_p + s P A)^T q = W_p^T q + s A^T (P^T q)           factors: P_h^T as A, A^T as B
    (W_v + s V A) c   = W_v c   + s V (A c)               factors: A, V_h

So the absorbed form computes the adapter's exact result at the adapter's rank. A and A^T are the same tensors for all
heads. A bias of B adds the same number to all scores of a query, which has no effect in a softmax. The bias is added to
the sum of the values in full, because the values' weights add up to one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.lora_ops import Factors, pack_expansion
from ..base_projections import AbsorbedHeads, BaseLayout, ProjectionShape
from ..errors import AdapterError
from .module_weights import ModuleWeights


def head_factors(
    shape: ProjectionShape, heads: AbsorbedHeads, module: ModuleWeights, layout: BaseLayout, *, activated: bool
) -> dict[str, Factors]:
    """Return the factors of each head's two products, by the products' names.

    Args:
        activated: whether the adapter is an activated LoRA.

    Raises:
        AdapterError: the adapter is an activated LoRA, has a DoRA magnitude, or values leave the type's range.
    """
    name = shape.name
    if module.magnitude is not None:
        raise AdapterError(
            f"use_dora is set and {name} is adapted, which is not supported in latent attention.", "use_dora"
        )
    if activated:
        raise AdapterError(
            f"alora_invocation_tokens is set and {name} is adapted: in latent attention it would change the keys of "
            "the tokens before the invocation too.",
            "alora_invocation_tokens",
        )
    a, b = module.a.to(layout.dtype), module.b.to(layout.dtype)
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise AdapterError(f"Weights of {name} are beyond the range of {layout.dtype}.", name)
    down, up = a.contiguous(), pack_expansion(a.T)
    rows = b.view(heads.count, heads.plain + heads.value, module.rank)
    biases = [None] * heads.count if module.bias is None else list(_value_bias(module, module.bias, heads))
    found: dict[str, Factors] = {}
    for head, (own, bias) in enumerate(zip(rows, biases, strict=True)):
        plain, value = own.split((heads.plain, heads.value))
        found[f"{heads.queries}.{head}"] = _factors(module, plain.T.contiguous(), up)
        found[f"{heads.values}.{head}"] = _factors(module, down, pack_expansion(value), bias)
    return found


def _value_bias(module: ModuleWeights, bias: Tensor, heads: AbsorbedHeads) -> Tensor:
    """Return the bias of the products with the rows for values, [heads, value] fp32."""
    rows = bias.float().view(heads.count, heads.plain + heads.value)
    return (module.scale * rows[:, heads.plain :]).contiguous()


def _factors(module: ModuleWeights, a: Tensor, b: Tensor, add: Tensor | None = None) -> Factors:
    return Factors(a, module.scales, (module.rank,), b, None, add)
