"""Shards: what each tensor-parallel rank has of a model, and the tensors of a checkpoint as that rank reads them.

Query heads, the MLP's inner dimension and the vocabulary of the head are split evenly; KV heads too, or each is on
several ranks where there are more ranks. Output projections are split by their inputs, and their results are added up.
Embedding and norms are whole on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.collectives import Ranks
from ...lora.base_projections import HEAD as HEAD_MODULE
from ...lora.split_factors import ModuleSplit
from ..checkpoint.model_config import ModelConfig
from ..errors import ConfigError
from .tensor_names import (
    EMBEDDING,
    HEAD,
    SINKS,
    Shape,
    down_module,
    head_norm_shapes,
    output_modules,
    qkv_modules,
    up_modules,
)
from .weight_readers import SafetensorsFolder, WeightSource

_WEIGHT, _BIAS = ".weight", ".bias"


def check_split(config: ModelConfig, size: int) -> None:
    """Check that so many ranks can compute a model.

    Raises:
        ConfigError: it has a part that is not split, or a number that the ranks do not divide.
    """
    option = f"--tensor-parallel-size {size}"
    parts = {
        "a mixture of experts": any(layer.mixture is not None for layer in config.layers),
        "latent attention": config.latent is not None,
        "recurrent layers": config.has_states,
        "a gate of attention's results in a module of its own": config.gated_attention == "module",
        "norms over all query heads together": config.qk_norm == "projection",
        "heads of several sizes": len({*config.kv_shapes} - {None}) > 1,
        "keys and values of several layers together": any(layer.kv_source is not None for layer in config.layers),
        "values that are the keys": any(layer.shares_values for layer in config.layers),
        "inputs of each layer beside the residual stream": config.layer_inputs is not None,
    }
    for name, is_there in parts.items():
        if is_there:
            raise ConfigError(f"{option}: {name} cannot be split over ranks. Leave it out, or take a dense model.")
    if config.num_heads % size or config.intermediate_size % size:
        counts = f"{config.num_heads} heads and the MLP's {config.intermediate_size} columns"
        raise ConfigError(f"{option} does not divide the model's {counts}. {_advice(config)}")
    if config.num_kv_heads % size and size % config.num_kv_heads:
        raise ConfigError(
            f"{option} neither divides the model's {config.num_kv_heads} KV heads nor is a multiple of "
            f"them. {_advice(config)}"
        )


def _advice(config: ModelConfig) -> str:
    """Return the sizes that the model can be split by."""
    kv = config.num_kv_heads
    fitting = [
        size
        for size in range(2, config.num_heads + 1)
        if not config.num_heads % size and not config.intermediate_size % size and not (kv % size and size % kv)
    ]
    return f"It takes {', '.join(map(str, fitting))}." if fitting else "Leave it out: no size divides this model."


@dataclass(frozen=True, slots=True)
class Shard:
    """What a rank has of a model that ``check_split`` has passed.

    Attributes:
        whole: the model.
        ranks: the group, of which this process is one.
        config: the model as this rank computes it. Its vocabulary is whole.
        splits: by module, for the modules that are split.
        vocab_sizes: rows of the head on each rank.
    """

    whole: ModelConfig
    ranks: Ranks
    config: ModelConfig
    splits: Mapping[str, ModuleSplit]

    @classmethod
    def of(cls, config: ModelConfig, ranks: Ranks) -> Shard:
        """Return the part of one rank."""
        kv_heads = max(1, config.num_kv_heads // ranks.size)
        part = replace(
            config,
            num_heads=config.num_heads // ranks.size,
            num_kv_heads=kv_heads,
            intermediate_size=config.intermediate_size // ranks.size,
        )
        return cls(config, ranks, part, dict(module_splits(config, ranks.rank, ranks.size)))

    @property
    def vocab_sizes(self) -> tuple[int, ...]:
        runs = (_head_run(self.whole, rank, self.ranks.size) for rank in range(self.ranks.size))
        return tuple(end - first for first, end in runs)


def module_splits(config: ModelConfig, rank: int, size: int) -> Iterator[tuple[str, ModuleSplit]]:
    """Return the part that a rank of so many has of each module that is split."""
    yield HEAD_MODULE, ModuleSplit("outputs", (_head_run(config, rank, size),))
    queries, keys = _query_run(config, rank, size), _kv_run(config, rank, size)
    width, kv_size = config.query_size, config.kv_size
    if len(config.qkv_modules) == 1:
        shifted = [(width + at + keys[0], width + at + keys[1]) for at in (0, kv_size)]
        qkv = [ModuleSplit("outputs", (queries, *shifted))]
    else:
        qkv = [ModuleSplit("outputs", (queries,)), *[ModuleSplit("outputs", (keys,))] * 2]
    inner = config.intermediate_size // size
    part = rank * inner, (rank + 1) * inner
    fused = config.gated_mlp and len(config.mlp_modules) == 2
    both = (part, (config.intermediate_size + part[0], config.intermediate_size + part[1])) if fused else (part,)
    heads = config.num_heads // size * config.head_dim
    for index in range(config.num_layers):
        prefix, block = f"model.layers.{index}.self_attn", f"model.layers.{index}.{config.mlp_block}"
        yield from ((f"{prefix}.{name}", split) for name, split in zip(qkv_modules(config, index), qkv, strict=True))
        yield from ((f"{block}.{name}", ModuleSplit("outputs", both)) for name in up_modules(config, index))
        for name in output_modules(config):
            yield f"{prefix}.{name}", ModuleSplit("inputs", ((rank * heads, (rank + 1) * heads),))
        for name in down_module(config):
            yield f"{block}.{name}", ModuleSplit("inputs", (part,))


def _head_run(config: ModelConfig, rank: int, size: int) -> tuple[int, int]:
    """A rank's tokens of the vocabulary."""
    return config.vocab_size * rank // size, config.vocab_size * (rank + 1) // size


def _query_run(config: ModelConfig, rank: int, size: int) -> tuple[int, int]:
    """Rows of a rank's query heads, a gate of each head included."""
    rows = config.query_size // size
    return rank * rows, (rank + 1) * rows


def _kv_heads(config: ModelConfig, rank: int, size: int) -> tuple[int, int]:
    """A rank's KV heads: those of its query heads."""
    first = rank * config.num_kv_heads // size
    return first, first + max(1, config.num_kv_heads // size)


def _kv_run(config: ModelConfig, rank: int, size: int) -> tuple[int, int]:
    first, end = _kv_heads(config, rank, size)
    return first * config.head_dim, end * config.head_dim


class ShardSource:
    """The tensors of a checkpoint as one rank has them. One tensor at most is read beside them.

    A quantised matrix has no blocks or numbers here: it is read in the model's type. The head of a model that ties it
    to its embedding is a tensor of its own.

    Args:
        source: the whole checkpoint, whose shapes have been checked.
    """

    def __init__(self, source: WeightSource, shard: Shard) -> None:
        self._source = source
        self._rank = shard.ranks.rank
        self._splits = shard.splits
        self._heads = dict(_head_parts(shard))
        self._tied = shard.whole.tied_head
        stored = {**source.shapes, HEAD: source.shapes[EMBEDDING]} if self._tied else dict(source.shapes)
        self.shapes: dict[str, Shape] = {name: self._shape(name, shape) for name, shape in stored.items()}

    def read(self, name: str, out: Tensor, part: int | None = None) -> None:
        """Write the rank's part of a tensor."""
        assert part is None
        stored = EMBEDDING if name == HEAD and self._tied else name
        dim, runs = self._split(name)
        if runs:
            self._read_runs(stored, out, dim, runs)
        elif self._rank and self._is_added(name):  # rank 0 adds it
            out.zero_()
        else:
            self._source.read(stored, out)

    def blocks(self, name: str) -> None:
        return None

    def stored(self, name: str) -> None:
        return None

    def numbers(self, name: str, part: int | None = None) -> None:
        return None

    def storage(self, name: str) -> str:
        return self._source.storage(EMBEDDING if name == HEAD and self._tied else name)

    def byte_rows(self, name: str) -> None:
        return None

    def is_bytes(self, name: str) -> bool:
        return False

    def grouped_bytes(self, name: str) -> None:
        return None

    def _read_runs(self, name: str, out: Tensor, dim: int, runs: tuple[tuple[int, int], ...]) -> None:
        if isinstance(self._source, SafetensorsFolder) and (view := self._source.plain_slices(name)) is not None:
            at = 0
            for first, end in runs:
                rows = view[first:end] if dim == 0 else view[:, first:end]
                out.narrow(dim, at, end - first).copy_(rows)
                at += end - first
            return
        whole = torch.empty(self._source.shapes[name], dtype=out.dtype, device=out.device)
        self._source.read(name, whole)
        torch.cat([whole.narrow(dim, first, end - first) for first, end in runs], dim, out=out)

    def _split(self, name: str) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Return the dimension and the runs of a tensor that the rank has; no runs for all of it."""
        if name in self._heads:
            return 0, (self._heads[name],)
        split = self._splits.get(name.removesuffix(_WEIGHT).removesuffix(_BIAS))
        if split is None or (split.side == "inputs" and name.endswith(_BIAS)):
            return 0, ()
        return (0 if split.side == "outputs" else 1), split.runs

    def _is_added(self, name: str) -> bool:
        """Whether a tensor is the bias of a product whose parts are added up."""
        split = self._splits.get(name.removesuffix(_BIAS))
        return split is not None and split.side == "inputs"

    def _shape(self, name: str, shape: Shape) -> Shape:
        dim, runs = self._split(name)
        if not runs:
            return shape
        size = sum(end - first for first, end in runs)
        return (*shape[:dim], size, *shape[dim + 1 :])


def _head_parts(shard: Shard) -> Iterator[tuple[str, tuple[int, int]]]:
    """Return the tensors with an entry for each head, and the entries of the rank."""
    config, rank, size = shard.whole, shard.ranks.rank, shard.ranks.size
    heads = config.num_heads // size
    queries, keys = (rank * heads, (rank + 1) * heads), _kv_heads(config, rank, size)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}.self_attn"
        if config.attention_sinks:
            yield f"{prefix}.{SINKS}", queries
        if config.qk_norm == "centred":
            for name, run in zip(head_norm_shapes(config, index), (queries, keys), strict=True):
                yield f"{prefix}.{name}.weight", run
