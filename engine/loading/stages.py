"""Stages: the layers of a model on each pipeline-parallel rank, and the checkpoint's tensors for a stage.

The last rank has the embedding and the first layers, and rank 0 has the last layers and the head. So hidden states are
sent in one direction, to the rank that draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from ...kernels.collectives import Ranks
from ...kernels.grouped_weights import StoredNumbers
from ...kernels.quantised_weights import BlockType
from ..checkpoint.model_config import ModelConfig
from ..errors import ConfigError
from .tensor_names import EMBEDDING, HEAD, HEAD_BIAS, Shape
from .weight_readers import WeightSource

LAYERS = "model.layers."


def check_stages(config: ModelConfig, size: int) -> None:
    """Check that the layers of a model can be distributed over a number of pipeline-parallel ranks.

    Raises:
        ConfigError: there are fewer layers than ranks, or a layer reads more from earlier layers than the residual
            stream.
    """
    option = f"--pipeline-parallel-size {size}"
    if size > config.num_layers:
        raise ConfigError(f"{option} is more than the model's {config.num_layers} layers. Use at most that number.")
    parts = {
        "recurrent layers": config.has_states,
        "layers that read K and V of other layers": any(layer.kv_source is not None for layer in config.layers),
        "layers that share an index": config.shares_index,
        "inputs of each layer": config.layer_inputs is not None,
    }
    for name, is_there in parts.items():
        if is_there:
            raise ConfigError(
                f"{option}: {name} cannot be split into stages. Leave the option out, or use another model."
            )


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of a rank, of a model that ``check_stages`` has passed.

    Attributes:
        ranks: the group of ranks, which includes this process.
        width: number of ranks that have the same layers, each a shard of them.
        config: configuration of the model with only these layers.
        first: index of the first of these layers in the whole model.
    """

    ranks: Ranks
    width: int
    config: ModelConfig
    first: int

    @classmethod
    def of(cls, config: ModelConfig, ranks: Ranks, width: int = 1) -> Stage:
        """Return the part of one rank: layers are divided evenly."""
        layers = stage_layers(config.num_layers, ranks.rank // width, ranks.size // width)
        return cls(ranks, width, replace(config, layers=config.layers[layers.start : layers.stop]), layers.start)

    @property
    def count(self) -> int:
        """Stages of the model."""
        return self.ranks.size // self.width

    @property
    def has_embedding(self) -> bool:
        return self.ranks.rank // self.width == self.count - 1

    @property
    def has_head(self) -> bool:
        return self.ranks.rank < self.width

    @property
    def layers(self) -> range:
        """The layers by their numbers in the whole model."""
        return range(self.first, self.first + self.config.num_layers)


def stage_layers(num_layers: int, stage: int, count: int) -> range:
    """Return the layers of a stage, given the number of stages; the first stage has the last layers."""
    place = count - 1 - stage
    return range(num_layers * place // count, num_layers * (place + 1) // count)


class StageSource:
    """The tensors of a checkpoint under the names that they have in a model of one stage's layers.

    An embedding or a head that another stage has is a tensor of zero rows here.

    Args:
        source: the whole checkpoint, whose shapes have been checked.
    """

    def __init__(self, source: WeightSource, stage: Stage) -> None:
        self._source = source
        self._names = {own: name for name in source.shapes if (own := stage_name(name, stage.layers)) is not None}
        self.shapes: dict[str, Shape] = {own: source.shapes[name] for own, name in self._names.items()}
        elsewhere = [] if stage.has_embedding or stage.config.tied_head else [EMBEDDING]
        elsewhere += [] if stage.has_head else [name for name in (HEAD, HEAD_BIAS) if name in self.shapes]
        self.shapes |= {name: (0, *self.shapes[name][1:]) for name in elsewhere}

    def read(self, name: str, out: Tensor, part: int | None = None) -> None:
        self._source.read(self._names[name], out, part)

    def blocks(self, name: str) -> tuple[str, Iterable[Tensor]] | None:
        return self._source.blocks(self._names[name])

    def part_rows(self, name: str, part: int) -> tuple[BlockType, Tensor] | None:
        return self._source.part_rows(self._names[name], part)

    def stored(self, name: str) -> tuple[str, int] | None:
        return self._source.stored(self._names[name])

    def numbers(self, name: str, part: int | None = None) -> StoredNumbers | None:
        return self._source.numbers(self._names[name], part)

    def storage(self, name: str) -> str:
        return self._source.storage(self._names[name])

    def byte_rows(self, name: str) -> StoredNumbers | None:
        return self._source.byte_rows(self._names[name])

    def byte_scales(self, name: str) -> int:
        return self._source.byte_scales(self._names[name])

    def rounds_inputs(self, name: str) -> bool:
        return self._source.rounds_inputs(self._names[name])

    def grouped_bytes(self, name: str) -> int | None:
        return self._source.grouped_bytes(self._names[name])


def stage_name(name: str, layers: range) -> str | None:
    """Return the name that a tensor or module has in a model of only these layers; None if it is in another layer."""
    if not name.startswith(LAYERS):
        return name
    number, _, rest = name.removeprefix(LAYERS).partition(".")
    return f"{LAYERS}{int(number) - layers.start}.{rest}" if int(number) in layers else None
