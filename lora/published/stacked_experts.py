"""Stacked experts: adapters on all experts of a layer together, as PEFT trains the stacked tensors of their weights.

For E experts, a tensor with K inputs and N outputs, and rank r for each expert, PEFT stores

    A [E * r, K]    rows of the experts, one expert after the other
    B [N, r * E]    column i * E + e is rank i of expert e

or A [E * r, N] and B [K, r * E], with which the change of an expert's matrix is the transpose of B A, as described in
``expert_layouts``. PEFT stores a pair under the name of the module that has the tensor, or of its ``base_layer`` if two
tensors of the module are adapted. The shapes show which tensor a pair belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from ..base_projections import ExpertModules
from ..config import AdapterConfig
from ..errors import AdapterError
from .expert_layouts import DOWN, Layout, layout_of_file, tensors_of
from .module_weights import ModuleWeights


def expert_modules(
    stacked: Mapping[str, Mapping[str, Tensor]],
    config: AdapterConfig,
    experts_of: Callable[[str], ExpertModules | None],
    most_rank: int,
) -> Iterator[tuple[str, ModuleWeights]]:
    """Yield the LoRA pairs of the experts' gate and up, or down, modules, each with its module's name.

    Args:
        stacked: "lora_A" and "lora_B" of each module with a tensor, by the module's name in training.
        experts_of: returns the experts of such a module.
        most_rank: limit of an expert's rank.

    Raises:
        AdapterError: A or B is missing, their shapes fit neither tensor, PEFT has no such combination of options, or
            version and shapes do not determine the orientation of A and B.
    """
    if not stacked:
        return
    experts: dict[str, ExpertModules] = {}
    for trained in sorted(stacked):
        _check_parts(trained, stacked[trained], config)
        found = experts_of(trained)
        assert found is not None
        experts[trained] = found
    layout = layout_of_file(stacked, experts, config)
    for trained in experts:
        yield from _modules_of(trained, stacked[trained], config, experts[trained], layout, most_rank)


def _check_parts(trained: str, parts: Mapping[str, Tensor], config: AdapterConfig) -> None:
    if parts.keys() != {"lora_A", "lora_B"}:
        raise AdapterError(
            f"An adapter's {trained} must have lora_A and lora_B, not {', '.join(sorted(parts))}.", trained
        )
    if config.dora or config.lora_bias or config.invocation_tokens:
        option = "use_dora" if config.dora else "lora_bias" if config.lora_bias else "alora_invocation_tokens"
        raise AdapterError(f"{option} is set and {trained} is adapted; PEFT has no such combination.", option)


def _modules_of(
    trained: str,
    parts: Mapping[str, Tensor],
    config: AdapterConfig,
    experts: ExpertModules,
    layout: Layout,
    most_rank: int,
) -> Iterator[tuple[str, ModuleWeights]]:
    a, b = parts["lora_A"], parts["lora_B"]
    tensor = tensors_of(trained, a, b, experts)[layout]
    name = f"{trained.removesuffix('.base_layer')}.{tensor}"
    if not any(name == suffix or name.endswith(f".{suffix}") for suffix in config.parameters):
        raise AdapterError(
            f"The adapter has tensors for {name}, which target_parameters does not name.", "target_parameters"
        )
    rank = config.rank_of(name)
    if rank > most_rank:
        raise AdapterError(f"{name} has rank {rank}; the limit is {most_rank} (--max-lora-rank).", "r")
    if a.shape[0] != rank * experts.count or b.shape[1] != rank * experts.count:
        raise AdapterError(
            f"A and B of {name} have shapes {list(a.shape)} and {list(b.shape)}; with the config's rank {rank} and "
            f"{experts.count} experts, {rank * experts.count} rows and columns are needed.",
            name,
        )
    scale = config.scale_of(name, rank)
    for expert, (own_a, own_b) in enumerate(zip(a.split(rank), _of_experts(b, experts.count), strict=True)):
        if layout == "outputs":
            own_a, own_b = own_b.T.contiguous(), own_a.T.contiguous()
        if tensor == DOWN:
            yield experts.down[expert], ModuleWeights(scale, own_a, own_b, None, None)
            continue
        for module, rows in zip((experts.gate, experts.up), _gate_and_up(own_b, experts), strict=True):
            yield module[expert], ModuleWeights(scale, own_a, rows, None, None)


def _of_experts(b: Tensor, count: int) -> list[Tensor]:
    return [b[:, expert::count].contiguous() for expert in range(count)]


def _gate_and_up(b: Tensor, experts: ExpertModules) -> tuple[Tensor, Tensor]:
    if experts.interleaved:
        return b[0::2].contiguous(), b[1::2].contiguous()
    return b[: experts.size], b[experts.size :]
