"""Shards: the part of a model on each tensor-parallel rank, and the tensors of a checkpoint as the rank reads them.

Output projections are split by their inputs, and the ranks' results are added up. Every rank holds the whole embedding
and all norms. ``rank_splits`` defines which tensors are split, and how.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from ...kernels.collectives import Ranks
from ...kernels.grouped_weights import StoredNumbers
from ...kernels.quantised_weights import BLOCK_SIZES, FLOAT8_GROUP, BlockType
from ...lora.split_factors import ModuleSplit
from ..checkpoint.families.recurrent import (
    DeltaLayer,
    KimiDeltaLayer,
    Mamba2Layer,
    MambaLayer,
    RecurrentLayer,
    ShortConvLayer,
)
from ..checkpoint.model_config import KvShape, LayerConfig, ModelConfig
from ..errors import ConfigError
from .matrix_cuts import MatrixCut, Run, cut_blocks, cut_numbers
from .rank_splits import added_biases, has_plain_mlp, head_run, module_splits, tensor_splits
from .tensor_names import EMBEDDING, HEAD, Shape
from .upload import upload
from .weight_readers import SafetensorsFolder, WeightSource

_WEIGHT, _BIAS = ".weight", ".bias"


def check_split(config: ModelConfig, size: int) -> None:
    """Check that a number of ranks can compute a model.

    Raises:
        ConfigError: the model has a part that cannot be split, or a size that the number of ranks does not divide.
    """
    option = f"--tensor-parallel-size {size}"
    parts = {
        "norms over all query heads together": config.qk_norm == "projection",
        "blocks that layers share": config.shares_blocks,
        "an index of blocks": config.block_index is not None,
        "short convolutions": any(isinstance(layer.recurrent, ShortConvLayer) for layer in config.layers),
    }
    for name, is_there in parts.items():
        if is_there:
            raise ConfigError(
                f"{option}: {name} cannot be split over ranks. Leave the option out, or use another model."
            )
    found = [what.format(count) for count, what in dict.fromkeys(_counts(config)) if count % size]
    if found:
        listed = " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
        raise ConfigError(f"{option} does not divide {listed}. {_advice(config)}")
    for heads in _kv_heads(config):
        if heads % size and size % heads:
            raise ConfigError(
                f"{option} neither divides the model's {heads} KV heads nor is a multiple of them. {_advice(config)}"
            )


def _counts(config: ModelConfig) -> Iterator[tuple[int, str]]:
    """Numbers that the ranks must divide, and how to name them."""
    if any(config.attends):
        yield from ((config.num_heads_of(index), "the model's {} heads") for index in range(config.num_layers))
        if config.grouped_qkv:
            yield config.num_kv_heads, "the model's {} KV heads, which are stored in one tensor with their queries"
    for index, layer in enumerate(config.layers):
        if has_plain_mlp(config, index):
            yield config.mlp_size_of(index), "the MLP's {} columns"
        if layer.mixture is not None:
            yield layer.mixture.size, "an expert's {} columns"
            if layer.mixture.shared_size:
                yield layer.mixture.shared_size, "the shared expert's {} columns"
        match layer.recurrent:
            case MambaLayer():
                yield layer.recurrent.width, "Mamba's {} channels"
            case Mamba2Layer():
                yield layer.recurrent.num_heads, "Mamba-2's {} heads"
                if layer.recurrent.normed:  # its norm is over the heads of a group
                    yield layer.recurrent.num_groups, "Mamba-2's {} groups"
            case DeltaLayer():
                yield layer.recurrent.num_key_heads, "the delta net's {} key heads"
            case KimiDeltaLayer():
                yield layer.recurrent.num_heads, "Kimi delta attention's {} heads"


def _kv_heads(config: ModelConfig) -> set[int]:
    """Numbers of KV heads, and of groups like them, that are split, or are on several ranks each."""
    layers = [config.heads_of(index).heads for index, attends in enumerate(config.attends) if attends]
    mixers = (layer.recurrent for layer in config.layers)
    return {*layers, *(mixer.num_groups for mixer in mixers if isinstance(mixer, Mamba2Layer))}


def fitting_sizes(config: ModelConfig) -> list[int]:
    """Return the sizes that divide a model, of whose parts each can be split."""
    counts, kv = {count for count, _ in _counts(config)}, _kv_heads(config)
    return [
        size
        for size in range(2, min(counts) + 1)
        if not any(count % size for count in counts) and not any(heads % size and size % heads for heads in kv)
    ]


def _advice(config: ModelConfig) -> str:
    fitting = fitting_sizes(config)
    return f"It takes {', '.join(map(str, fitting))}." if fitting else "Leave it out: no size divides this model."


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model on one rank; ``check_split`` has passed the model.

    Attributes:
        whole: the model.
        ranks: the group of ranks, which includes this process.
        config: the model as this rank computes it. Its vocabulary is whole.
        splits: how each module is split, for the modules that are split.
        vocab_sizes: rows of the head on each rank.
    """

    whole: ModelConfig
    ranks: Ranks
    config: ModelConfig
    splits: Mapping[str, ModuleSplit]

    @classmethod
    def of(cls, config: ModelConfig, ranks: Ranks) -> Shard:
        """Return the part of one rank."""
        size = ranks.size
        part = replace(
            config,
            num_heads=config.num_heads // size,
            num_kv_heads=max(1, config.num_kv_heads // size),
            intermediate_size=config.intermediate_size // size,
            layers=tuple(_layer(layer, size) for layer in config.layers),
        )
        return cls(config, ranks, part, dict(module_splits(config, ranks.rank, size)))

    @property
    def vocab_sizes(self) -> tuple[int, ...]:
        runs = (head_run(self.whole, rank, self.ranks.size) for rank in range(self.ranks.size))
        return tuple(end - first for first, end in runs)


def _layer(layer: LayerConfig, size: int) -> LayerConfig:
    """Return the configuration of a layer as each of ``size`` ranks computes it."""
    kv, mixture = layer.kv_heads, layer.mixture
    return replace(
        layer,
        kv_heads=None if kv is None else KvShape(max(1, kv.heads // size), kv.dim),
        mlp_size=None if layer.mlp_size is None else layer.mlp_size // size,
        num_heads=None if layer.num_heads is None else layer.num_heads // size,
        mixture=mixture and replace(mixture, size=mixture.size // size, shared_size=mixture.shared_size // size),
        recurrent=_recurrent(layer.recurrent, size),
    )


def _recurrent(layer: RecurrentLayer | None, size: int) -> RecurrentLayer | None:
    match layer:
        case MambaLayer():
            return replace(layer, width=layer.width // size)
        case Mamba2Layer():
            groups = max(1, layer.num_groups // size)
            return replace(layer, num_heads=layer.num_heads // size, num_groups=groups)
        case DeltaLayer():
            return replace(layer, num_heads=layer.num_heads // size, num_key_heads=layer.num_key_heads // size)
        case KimiDeltaLayer():
            return replace(layer, num_heads=layer.num_heads // size)
    return layer


class ShardSource:
    """The part of a checkpoint's tensors that one rank holds. At most one whole tensor is in memory beside them.

    A quantised matrix stays in its blocks or numbers unless a cut of its columns is within a block; then it is
    dequantised to the model's type. If the model ties the head to the embedding, the rank's part of the head is a
    separate tensor, because the embedding is not split.

    Args:
        source: the whole checkpoint, whose shapes have been checked.
    """

    def __init__(self, source: WeightSource, shard: Shard) -> None:
        self._source = source
        self._rank = shard.ranks.rank
        self._splits = shard.splits
        group = shard.whole, shard.ranks.rank, shard.ranks.size
        self._tensors = {name: (dim, runs) for name, dim, runs in tensor_splits(*group)}
        self._added = frozenset(added_biases(shard.whole))
        self._tied = shard.whole.tied_head
        stored = {**source.shapes, HEAD: source.shapes[EMBEDDING]} if self._tied else dict(source.shapes)
        self.shapes: dict[str, Shape] = {name: self._shape(name, shape) for name, shape in stored.items()}

    def read(self, name: str, out: Tensor, part: int | None = None) -> None:
        """Write the rank's part of a tensor, or of a part of it along its first dimension."""
        dim, runs = self._split(name)
        if runs:
            self._read_runs(self._stored(name), out, dim, runs, part)
        elif self._rank and self._is_added(name):  # rank 0 adds it
            out.zero_()
        else:
            self._source.read(self._stored(name), out, part)

    def blocks(self, name: str) -> tuple[str, Iterable[Tensor]] | None:
        """Return the rank's part of a matrix in blocks, None if a block is cut."""
        found = self._source.blocks(self._stored(name))
        cut = self._cut(name)
        if found is None or cut is None:
            return found
        kind, pieces = found
        block = BLOCK_SIZES.get(cast(BlockType, kind))
        if block is None or not cut.is_between(block[0]):
            return None
        return kind, cut_blocks(pieces, cut, block)

    def part_rows(self, name: str, part: int) -> tuple[BlockType, Tensor] | None:
        """Return the rank's part of one matrix of a stack in blocks, None if a block is cut."""
        found = self._source.part_rows(name, part)
        cut = self._cut(name)
        if found is None or cut is None:
            return found
        kind, rows = found
        block = BLOCK_SIZES[kind]
        return (kind, torch.cat(list(cut_blocks([rows], cut, block)))) if cut.is_between(block[0]) else None

    def stored(self, name: str) -> tuple[str, int] | None:
        """Return the type of blocks of the rank's part, and their bytes."""
        found = self._source.stored(self._stored(name))
        cut = self._cut(name)
        if found is None or cut is None:
            return found
        kind, num_bytes = found
        values, _ = BLOCK_SIZES.get(cast(BlockType, kind), (1, 1))
        return (kind, self._share(name, num_bytes)) if cut.is_between(values) else None

    def numbers(self, name: str, part: int | None = None) -> StoredNumbers | None:
        """Return the rank's part of a matrix as it is stored."""
        found = self._source.numbers(self._stored(name), part)
        cut = self._cut(name)
        return found if found is None or cut is None else cut_numbers(found, cut)

    def storage(self, name: str) -> str:
        return self._source.storage(self._stored(name))

    def byte_rows(self, name: str) -> StoredNumbers | None:
        """Return the rank's part of a matrix in 8 bits; None if a block of FP8 is cut."""
        found = self._source.byte_rows(self._stored(name))
        cut = self._cut(name)
        if found is None or cut is None:
            return found
        kept = cut_numbers(found, cut)
        if kept is None or kept.group != found.group:
            return None
        return kept if cut.dim else replace(kept, pieces=[torch.cat(list(kept.pieces))])

    def byte_scales(self, name: str) -> int:
        """Return the number of scales of the rank's part of a row; 0 if a block of FP8 is cut."""
        found = self._source.byte_scales(self._stored(name))
        cut = self._cut(name)
        if found < 2 or cut is None or cut.dim == 0:
            return found
        width = self._source.shapes[self._stored(name)][1]
        is_between = not any(edge % FLOAT8_GROUP for run in cut.runs for edge in run if edge != width)
        return -(-cut.size // FLOAT8_GROUP) if is_between else 0

    def rounds_inputs(self, name: str) -> bool:
        """Return whether inputs are rounded. Inputs that are cut are not: no rank knows the largest input of a row."""
        cut = self._cut(name)
        return (cut is None or cut.dim == 0) and self._source.rounds_inputs(self._stored(name))

    def grouped_bytes(self, name: str) -> int | None:
        found = self._source.grouped_bytes(self._stored(name))
        return None if found is None else self._share(name, found)

    def _stored(self, name: str) -> str:
        """Return the name that a tensor has in the checkpoint."""
        return EMBEDDING if name == HEAD and self._tied else name

    def _cut(self, name: str) -> MatrixCut | None:
        """Return the rank's part of a matrix, or of each of a stack of transposed matrices; None for all of it."""
        dim, runs = self._split(name)
        if not runs:
            return None
        return MatrixCut(dim if len(self._source.shapes[self._stored(name)]) == 2 else 2 - dim, runs)

    def _share(self, name: str, num_bytes: int) -> int:
        """Return the rank's part of the bytes of a tensor."""
        return num_bytes * math.prod(self.shapes[name]) // math.prod(self._source.shapes[self._stored(name)])

    def _read_runs(self, name: str, out: Tensor, dim: int, runs: tuple[Run, ...], part: int | None) -> None:
        if part is not None:
            whole = torch.empty(self._source.shapes[name][1:], dtype=out.dtype, device=out.device)
            self._source.read(name, whole, part)
            torch.cat([whole.narrow(dim - 1, first, end - first) for first, end in runs], dim - 1, out=out)
            return
        if isinstance(self._source, SafetensorsFolder) and (view := self._source.plain_slices(name)) is not None:
            at = 0
            for first, end in runs:
                upload(out.narrow(dim, at, end - first), view[(*(slice(None),) * dim, slice(first, end))])
                at += end - first
            return
        whole = torch.empty(self._source.shapes[name], dtype=out.dtype, device=out.device)
        self._source.read(name, whole)
        torch.cat([whole.narrow(dim, first, end - first) for first, end in runs], dim, out=out)

    def _split(self, name: str) -> tuple[int, tuple[Run, ...]]:
        """Return the dimension and the runs of a tensor that the rank has; no runs for all of it."""
        if name in self._tensors:
            return self._tensors[name]
        split = self._splits.get(name.removesuffix(_WEIGHT).removesuffix(_BIAS))
        if split is None or (split.side == "inputs" and name.endswith(_BIAS)):
            return 0, ()
        return (0 if split.side == "outputs" else 1), split.runs

    def _is_added(self, name: str) -> bool:
        """Return whether a tensor is the bias of a product whose partial results are added up."""
        split = self._splits.get(name.removesuffix(_BIAS))
        return name in self._added or (split is not None and split.side == "inputs")

    def _shape(self, name: str, shape: Shape) -> Shape:
        dim, runs = self._split(name)
        if not runs:
            return shape
        size = sum(end - first for first, end in runs)
        return (*shape[:dim], size, *shape[dim + 1 :])
