"""LoRA in a model of the transformers library: hooks that add the adapters' part to the outputs of linear modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ....lora.base_projections import EMBEDDING, HEAD, BaseLayout, ProjectionShape
from .packed_modules import plain_weight
from .paged_attention import CurrentStep

_OF_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class AdaptedModules:
    """The modules that adapters may change.

    Attributes:
        modules: modules by the name that adapters use; embedding and head have the names that are usual in most models.
        renamed: the model's own names of embedding and head, by the usual names.
        towers: modules of the checkpoint that are not computed; an adapter's weights for them change no text.
    """

    modules: Mapping[str, nn.Module]
    renamed: Mapping[str, str]
    towers: tuple[str, ...]

    def layout(self, dtype: torch.dtype, device: torch.device) -> BaseLayout:
        """Return the layout of the base model for adapters."""
        return BaseLayout(
            projections=tuple(ProjectionShape((name,), *_sizes(module)) for name, module in self.modules.items()),
            dtype=dtype,
            device=device,
            read_weight=lambda name: plain_weight(self.modules[name]),
            read_bias=lambda name: _bias(self.modules[name]),
            renamed=self.renamed,
            towers=self.towers,
            takes_own=False,
        )

    def hook(self, step: CurrentStep, dtype: torch.dtype) -> None:
        """Register hooks that add the part of the current step's adapters, with factors in ``dtype``."""
        for name, module in self.modules.items():
            module.register_forward_hook(_embedding_hook(step) if name == EMBEDDING else _hook(name, step, dtype))


@contextmanager
def observed_rows(model: nn.Module) -> Iterator[dict[nn.Module, set[int]]]:
    """Yield a table that passes inside the block fill: for each linear module and embedding, numbers of output rows.

    0 means that the module's output is not a single tensor, as for a router that returns several.
    """
    rows: dict[nn.Module, set[int]] = {}

    def observe(module: nn.Module, _: tuple[Tensor, ...], output: Any) -> None:
        count = output.numel() // output.shape[-1] if isinstance(output, Tensor) else 0
        rows.setdefault(module, set()).add(count)

    kinds = (nn.Linear, Conv1D, nn.Embedding)
    hooks = [each.register_forward_hook(observe) for each in model.modules() if isinstance(each, kinds)]
    try:
        yield rows
    finally:
        for hook in hooks:
            hook.remove()


def adapted_modules(
    model: Any, rows: Mapping[nn.Module, set[int]], num_tokens: int, towers: tuple[str, ...]
) -> AdaptedModules:
    """Return the modules of a causal model whose input is all tokens of a step, in the step's order.

    Other modules are left out: an expert's input is the tokens routed to it, which only the model knows.

    Args:
        rows: output rows from ``observed_rows``, in a pass over ``num_tokens`` tokens of the model without its head.
        towers: as in ``AdaptedModules``.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    modules: dict[str, nn.Module] = {}
    renamed: dict[str, str] = {}
    for name, module in model.named_modules():
        sees_all = rows.get(module) == {num_tokens}
        if module is head or (module is embedding and type(module) is nn.Embedding and sees_all):
            known = HEAD if module is head else EMBEDDING
            modules[known], renamed[name] = module, known
        elif isinstance(module, nn.Linear | Conv1D) and sees_all and not _OF_ONE_EXPERT.search(name):
            modules[name] = module
    return AdaptedModules(modules, renamed, towers)


def _hook(name: str, step: CurrentStep, dtype: torch.dtype) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def add(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if step.lora is not None:
            x = args[0].reshape(-1, args[0].shape[-1]).to(dtype).contiguous()
            step.lora.project(name, x, output.view(-1, output.shape[-1]))

    return add


def _embedding_hook(step: CurrentStep) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def add(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if step.lora is not None:
            step.lora.embed(args[0].flatten(), output.view(-1, output.shape[-1]))

    return add


def _sizes(module: Any) -> tuple[tuple[int], int]:
    """Return the outputs and inputs of a module; for an embedding its width and the size of the vocabulary."""
    rows, columns = module.weight.shape
    return ((columns,), rows) if isinstance(module, nn.Embedding | Conv1D) else ((rows,), columns)


def _bias(module: Any) -> Tensor | None:
    bias: Tensor | None = getattr(module, "bias", None)
    return None if bias is None else bias.detach()
