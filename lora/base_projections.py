"""Base projections: the linear modules of the base model that adapters change, with their shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

SCORE = "score"
"""Name of a classification head, which the base model need not have."""
EMBEDDING = "model.embed_tokens"
HEAD = "lm_head"


def language_model_name(name: str) -> str:
    """Return the name that a multimodal model's module or tensor would have if the language model stood alone."""
    if name.startswith(("language_model.model.", "language_model.lm_head")):
        return name.removeprefix("language_model.")
    if name.startswith("model.language_model."):
        return f"model.{name.removeprefix('model.language_model.')}"
    return name


def usual_name(name: str, names: tuple[tuple[str, str], ...]) -> str:
    """Return the name used here for a module or tensor.

    Args:
        name: name in a checkpoint or an adapter.
        names: regular expressions for parts of its names, each with its replacement, applied one after the other.
    """
    for pattern, part in names:
        name = re.sub(pattern, part, name)
    return name


# Names of modules in transformers 5 as PEFT used them in training, where they differ from names in checkpoints.
_RENAMED = ((".block_sparse_moe.router", ".block_sparse_moe.router.layer"), (".mlp.", ".block_sparse_moe."))


def in_tower(name: str, towers: tuple[str, ...]) -> bool:
    """Return whether a module or tensor belongs to a part of a model that does not process text.

    Args:
        towers: names of modules outside a multimodal model's language model, and of modules within layers. The latter
            contain a dot, such as ``self_attn.indexer``.
    """
    inner = (tower for tower in towers if "." in tower)
    return name.removeprefix("model.").partition(".")[0] in towers or any(f".{each}." in f"{name}." for each in inner)


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """The position of one expert in the grouped matrix product of all experts in a layer.

    Attributes:
        product: key in ``LoraStep`` of the product of all experts in a layer.
        expert: index of the expert.
        count: number of experts.
    """

    product: str
    expert: int
    count: int


@dataclass(frozen=True, slots=True)
class AbsorbedHeads:
    """Heads of a module that is computed as two matrix products for each head (``kv_b_proj`` of MLA).

    The module's rows are ordered by head: first the rows for keys, then the rows for values. A head's query is
    multiplied by its rows for keys, transposed. The head's weighted sum of the module's inputs is multiplied by its
    rows for values.

    Attributes:
        count: number of heads.
        plain: number of a head's rows for keys.
        value: number of a head's rows for values.
        queries: key in ``LoraStep`` of the products with the rows for keys.
        values: key in ``LoraStep`` of the products with the rows for values.
    """

    count: int
    plain: int
    value: int
    queries: str
    values: str


StoredExperts = Literal["outputs first", "inputs first", "marked"]
"""Shape in which the matrices of all experts of a layer are stored: [E, out, in]; [E, in, out]; or [E, in, out] in a
module whose ``is_transposed`` is true."""


@dataclass(frozen=True, slots=True)
class ExpertModules:
    """The experts of a layer. PEFT trains their weights as two tensors: one for gate and up, and one for down.

    Attributes:
        count: number of experts.
        gate, up, down: names of the experts' modules, as in ``ProjectionShape``.
        size: intermediate size of an expert.
        hidden: hidden size of the model.
        interleaved: whether rows of gate and up alternate in storage.
        stored: layouts in which the versions of transformers store the experts' matrices when PEFT trains them.
    """

    count: int
    gate: tuple[str, ...]
    up: tuple[str, ...]
    down: tuple[str, ...]
    size: int
    hidden: int
    interleaved: bool = False
    stored: tuple[StoredExperts, ...] = ("outputs first",)


@dataclass(frozen=True, slots=True)
class ProjectionShape:
    """One fused matrix product of the base model.

    Attributes:
        modules: names of its modules in the checkpoint, in the order of their outputs.
        sizes: number of output columns of each module.
        width: number of inputs; for the embedding the size of the vocabulary.
        place: position of an expert's product among the products of all experts of the layer; None for a product that
            is computed for all tokens.
        heads: the heads of a module that is computed as two products for each head (``kv_b_proj`` of MLA); None for
            other projections.
    """

    modules: tuple[str, ...]
    sizes: tuple[int, ...]
    width: int
    place: ExpertPlace | None = None
    heads: AbsorbedHeads | None = None

    @property
    def name(self) -> str:
        """Key of the projection in ``LoraStep``: the name of its first module."""
        return self.modules[0]

    @property
    def products(self) -> tuple[ProjectionShape, ...]:
        """The products that are computed: this one, or two for each head, with indices like those of experts."""
        if (heads := self.heads) is None:
            return (self,)
        kinds = ((heads.queries, self.width, heads.plain), (heads.values, heads.value, self.width))
        return tuple(
            ProjectionShape((f"{key}.{head}",), (size,), width, ExpertPlace(key, head, heads.count))
            for key, size, width in kinds
            for head in range(heads.count)
        )


@dataclass(frozen=True, slots=True)
class BaseLayout:
    """The properties of the base model on which adapters depend.

    Attributes:
        projections: projections that adapters may change; the embedding has the single module ``EMBEDDING``.
        dtype: type of the factors on the device, the same as the model's.
        device: device of the factors.
        read_weight: returns the weight of a module as used, [out, in] (for the embedding [V, H]), of any floating type.
            Called from background threads, for DoRA and to compare a weight in an adapter's file with it.
        read_bias: returns the bias [out] of a module; None if the module has no bias. Called from background threads,
            for DoRA.
        names: regular expressions for parts of names in checkpoints and adapters, with replacements, as in
            ``usual_name``.
        towers: modules of the checkpoint that do not process text, as in ``in_tower``. An adapter's tensors for them
            are ignored.
        experts: the layers' experts, by the name of the module that contains them.
        fused: modules in which transformers computes several of the model's modules, whose outputs are side by side in
            the order given.
        renamed: names of ``EMBEDDING`` and ``HEAD`` in models that use other names.
        norms: shapes of the norms' weights by name.
        tied: whether the head's weight is the embedding's.
        takes_own: whether an adapter may replace weights of the model (``modules_to_save``).
        without_own: the option or kind of model that excludes own weights of adapters, for error messages.
    """

    projections: tuple[ProjectionShape, ...]
    dtype: torch.dtype
    device: torch.device
    read_weight: Callable[[str], Tensor]
    read_bias: Callable[[str], Tensor | None]
    towers: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    experts: Mapping[str, ExpertModules] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    norms: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    tied: bool = False
    takes_own: bool = True
    without_own: str = "--model-impl transformers"
    modules: Mapping[str, tuple[int, int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Map each module's name to (out, in)."""
        shapes = {
            module: (size, shape.width)
            for shape in self.projections
            for module, size in zip(shape.modules, shape.sizes, strict=True)
        }
        object.__setattr__(self, "modules", shapes)

    @property
    def products(self) -> Iterator[ProjectionShape]:
        """The products that adapters may change."""
        for shape in self.projections:
            yield from shape.products

    def module_of(self, trained: str) -> str | None:
        """Return a module's name in the base model, given its name in training; None if there is no such module."""
        return next(
            (name for name in self._published(self.renamed.get(trained, trained)) if name in self.modules), None
        )

    @property
    def head_trained(self) -> str:
        """The head's name in the model that PEFT trains."""
        return next((trained for trained, name in self.renamed.items() if name == HEAD), HEAD)

    def fused_of(self, trained: str) -> tuple[str, ...]:
        """Return the base model's modules that are one module where it was trained; empty for any other module."""
        return next((self.fused[name] for name in self._published(trained) if name in self.fused), ())

    def norm_of(self, trained: str) -> str | None:
        """Return a norm's name in the base model, given its name in training; None if there is no such norm."""
        return next((name for name in self._published(trained) if name in self.norms), None)

    def experts_of(self, trained: str) -> ExpertModules | None:
        """Return the experts whose tensors PEFT trains as a module of this name; None if there are none.

        If PEFT adapts several tensors of one module, it nests wrappers. The inner wrapper has the suffix
        ``base_layer``.
        """
        names = self._published(trained.removesuffix(".base_layer"))
        return next((self.experts[name] for name in names if name in self.experts), None)

    def _published(self, trained: str) -> tuple[str, ...]:
        return _published(usual_name(trained, self.names))


def _published(trained: str) -> tuple[str, ...]:
    """Return names that a module may have in the checkpoint."""
    name = language_model_name(trained)
    # The name lacks the prefix if the adapter was trained on the model without its head.
    bare = () if name.startswith("model.") else (f"model.{name}",)
    return tuple(
        each
        for first in (name, *bare)
        for each in (first, *(first.replace(new, published) for new, published in _RENAMED))
    )
