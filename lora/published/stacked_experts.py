"""Adapters on all experts of a layer together, as PEFT trains the stacked tensors of their weights.

For E experts, a tensor with K inputs and N outputs, and rank r for each expert, PEFT stores

    A [E * r, K]    the experts' one after the other
    B [N, r * E]    of column i * E + e, rank i of expert e

or, of matrices whose inputs it takes for their outputs, A [E * r, N] and B [K, r * E], where the change of an expert's
matrix is the transpose of its B A. They are stored under the module that the tensor is in, or its ``base_layer`` where
two tensors of a module are adapted. Which tensor it is follows from the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..base_projections import ExpertModules
from ..config import AdapterConfig
from ..errors import AdapterError
from .module_weights import ModuleWeights

GATE_UP, DOWN = "gate_up_proj", "down_proj"


def expert_modules(
    trained: str, parts: Mapping[str, Tensor], config: AdapterConfig, experts: ExpertModules, most_rank: int
) -> dict[str, ModuleWeights]:
    """Return the pairs of each expert's gate and up, or down, by module.

    Args:
        trained: name of the module that has the tensor, as it was trained.
        parts: "lora_A" and "lora_B".
        most_rank: limit of an expert's rank.

    Raises:
        AdapterError: a part is missing, shapes fit neither tensor, or PEFT has no such combination of options.
    """
    if parts.keys() != {"lora_A", "lora_B"}:
        raise AdapterError(
            f"An adapter's {trained} must have lora_A and lora_B, not {', '.join(sorted(parts))}.", trained
        )
    if config.dora or config.lora_bias or config.invocation_tokens:
        option = "use_dora" if config.dora else "lora_bias" if config.lora_bias else "alora_invocation_tokens"
        raise AdapterError(f"{option} is set and {trained} adapted; PEFT has no such combination.", option)
    a, b = parts["lora_A"], parts["lora_B"]
    tensor = _tensor(trained, a, b, experts)
    name = f"{trained.removesuffix('.base_layer')}.{tensor}"
    if not any(name == suffix or name.endswith(f".{suffix}") for suffix in config.parameters):
        raise AdapterError(
            f"The adapter has tensors for {name}, which target_parameters does not name.", "target_parameters"
        )
    rank = config.rank_of(name)
    if rank > most_rank:
        raise AdapterError(f"{name} has rank {rank}; at most {most_rank} is taken (--max-lora-rank).", "r")
    if a.shape[0] != rank * experts.count or b.shape[1] != rank * experts.count:
        raise AdapterError(
            f"A and B of {name} have shapes {list(a.shape)} and {list(b.shape)}; by the config's rank {rank} and "
            f"{experts.count} experts {rank * experts.count} rows and columns are needed.",
            name,
        )
    scale = config.scale_of(name, rank)
    found: dict[str, ModuleWeights] = {}
    for expert, (own_a, own_b) in enumerate(zip(a.split(rank), _of_experts(b, experts.count), strict=True)):
        if experts.swapped:
            own_a, own_b = own_b.T.contiguous(), own_a.T.contiguous()
        if tensor == DOWN:
            found[experts.down[expert]] = ModuleWeights(scale, own_a, own_b, None, None)
            continue
        for module, rows in zip((experts.gate, experts.up), _gate_and_up(own_b, experts), strict=True):
            found[module[expert]] = ModuleWeights(scale, own_a, rows, None, None)
    return found


def _tensor(trained: str, a: Tensor, b: Tensor, experts: ExpertModules) -> str:
    shapes = {GATE_UP: (experts.hidden, 2 * experts.size), DOWN: (experts.size, experts.hidden)}
    if a.dim() == b.dim() == 2:
        found = (b.shape[0], a.shape[1]) if experts.swapped else (a.shape[1], b.shape[0])
        for tensor, shape in shapes.items():
            if found == shape:
                return tensor
    raise AdapterError(
        f"A and B of {trained} have shapes {list(a.shape)} and {list(b.shape)}, which fit neither {GATE_UP} nor {DOWN} "
        "of its experts.",
        trained,
    )


def _of_experts(b: Tensor, count: int) -> list[Tensor]:
    return [b[:, expert::count].contiguous() for expert in range(count)]


def _gate_and_up(b: Tensor, experts: ExpertModules) -> tuple[Tensor, Tensor]:
    if experts.interleaved:
        return b[0::2].contiguous(), b[1::2].contiguous()
    return b[: experts.size], b[experts.size :]
