"""Weighted sum of adapters: one adapter whose factors are the factors of all parts, side by side.

Its change of a weight is ``sum_i w_i s_i B_i A_i``: PEFT's ``add_weighted_adapter(combination_type="cat")``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from .adapter_weights import AdapterWeights
from .errors import AdapterError
from .published.module_weights import ModuleWeights
from .published.saved_modules import SavedModules
from .sum_parts import SumPart


def weighted_sum(parts: Sequence[SumPart], adapters: Sequence[AdapterWeights], most_rank: int) -> AdapterWeights:
    """Return the weighted sum of several adapters.

    Args:
        adapters: the weights of each part.
        most_rank: limit of a module's rank, for all parts together.

    Raises:
        AdapterError: a part has more than low-rank pairs, of which there is no sum, or the rank is too large.
    """
    for part, adapter in zip(parts, adapters, strict=True):
        _check_plain(part.name, adapter)
    modules = {}
    for name in sorted({name for adapter in adapters for name in adapter.modules}):
        pairs = [
            (part.weight, adapter.modules[name])
            for part, adapter in zip(parts, adapters, strict=True)
            if name in adapter.modules
        ]
        modules[name] = _side_by_side(pairs)
        if (rank := modules[name].rank) > most_rank:
            raise AdapterError(
                f"Together the adapters have rank {rank} in {name}; the limit is {most_rank} (--max-lora-rank)."
            )
    return AdapterWeights(modules, SavedModules(), (), sum_digest(parts))


def sum_digest(parts: Sequence[SumPart]) -> str:
    """Return the identity of a sum, from contents and weights, regardless of the adapters' names."""
    contents = [(part.digest, part.weight) for part in parts]
    return hashlib.sha256(repr(("rootgraft weighted sum", contents)).encode()).hexdigest()


def _check_plain(name: str, adapter: AdapterWeights) -> None:
    """Refuse an adapter with weights that cannot be added, or with options that PEFT adds differently."""
    modules = adapter.modules.values()
    options = {
        "alora_invocation_tokens": bool(adapter.invocation_tokens),
        "use_dora": any(module.magnitude is not None for module in modules),
        "lora_bias": any(module.bias is not None for module in modules),
        "bias": any(module.own_bias is not None for module in modules),
        "modules_to_save or trainable_token_indices": bool(adapter.saved.tensors()),
    }
    for option, is_used in options.items():
        if is_used:
            raise AdapterError(f"The adapter {name!r} has {option}, and cannot be combined with others: use it alone.")


def _side_by_side(pairs: Sequence[tuple[float, ModuleWeights]]) -> ModuleWeights:
    return ModuleWeights(
        1.0,
        torch.cat([module.a for _, module in pairs]),
        torch.cat([module.b for _, module in pairs], dim=1),
        None,
        None,
        rank_scales=torch.cat([weight * module.scales for weight, module in pairs]),
    )
