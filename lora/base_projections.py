"""What an adapter must fit: the projections of the base model, as the engine describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


@dataclass(frozen=True, slots=True)
class ProjectionShape:
    """One fused matrix product of the base model.

    Attributes:
        modules: the published names of the modules that it serves, side by side in its output.
        sizes: output columns of each.
        width: inputs; for the embedding the number of its tokens.
    """

    modules: tuple[str, ...]
    sizes: tuple[int, ...]
    width: int

    @property
    def name(self) -> str:
        """By which ``LoraStep`` knows it: its first module."""
        return self.modules[0]


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """The base model, as far as adapters are concerned.

    Attributes:
        projections: all that can be adapted; the embedding is one with the single module ``EMBEDDING``.
        dtype: of the factors on the device: the model's own.
        device: where the factors go.
        read_weight: the weight of a module as it is computed with, [out, in] (for the embedding [V, H]), any floating
            type. Called from background threads, for DoRA and to compare a weight that came with an adapter.
        read_bias: the bias [out] of a module, or None if it has none. Called from background threads, for DoRA.
    """

    projections: tuple[ProjectionShape, ...]
    dtype: torch.dtype
    device: torch.device
    read_weight: Callable[[str], Tensor]
    read_bias: Callable[[str], Tensor | None]
    modules: Mapping[str, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Index the modules: name -> (out, in)."""
        shapes = {
            module: (size, shape.width)
            for shape in self.projections
            for module, size in zip(shape.modules, shape.sizes, strict=True)
        }
        object.__setattr__(self, "modules", shapes)
