"""Plan of a model's weights: how they are stored, how much memory they will take, and how products are computed here.

Only headers and configurations are read, before anything is loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...kernels import ops
from ...kernels.collectives import Alone
from ...kernels.grouped_weights import NumberForm
from ..checkpoint.families.recurrent import MambaLayer
from ..checkpoint.gguf import GgufFile
from ..checkpoint.model_config import LayerConfig, ModelConfig
from ..checkpoint.read_config import open_checkpoint, read_model_config
from ..config import EngineConfig
from ..executor.device import choose_device, choose_dtype, choose_kv_dtype
from ..executor.gpu_memory import StepMemory
from ..executor.kv_budget import pool_bytes, weight_room
from ..loading.load_model import open_source
from ..loading.shards import Shard, ShardSource, check_split
from ..loading.stages import Stage, StageSource, check_stages
from ..loading.weight_forms import WeightForm, choose_weight_form
from ..loading.weight_memory import token_bytes, weight_bytes
from ..loading.weight_readers import WeightSource
from ..models.kv_pool import bytes_per_page

_H200_BYTES = 4.8e12  # in a second
_SUM_SECONDS = 10e-6, 15e-6
_COMPUTED: dict[WeightForm, str] = {
    "plain": "in {dtype}",
    "stored": "blocks as stored, activations of 15 bits",
    "stored_widened": "as stored, numbers rounded to {dtype} in products",
    "stored_both": "as stored for steps of few rows, in {dtype} for more",
    "stored_dynamic": "blocks as stored, activations of 8 bits",
    "grouped": "as stored, scaled in fp32",
    "int8_weight_only": "rounded to 8 bits",
    "int8_dynamic": "rounded to 8 bits, activations too",
}
_ROUNDED, _SCALED = "activations rounded to 8 bits too", "sums scaled in fp32"


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """The facts that ``rootgraft doctor MODEL`` and ``rootgraft serve --dry-run`` print, by rank if there are several.

    Attributes:
        shape: family, layers and sizes in a few words.
        stored: each way in which weights are stored, and its share of them, largest first.
        stored_bytes: bytes of all tensors in the files.
        memory_bytes: bytes of the weights in memory.
        room_bytes: bytes that weights may take on this machine.
        computed: arithmetic of the products.
        device: device of the computation, and its kernels.
        ranks: number of ranks that compute the model together.
        kv_token_bytes: bytes of KV of each token.
        kv_tokens: largest number of tokens that the KV pool holds; on a GPU, steps take memory from the same room.
        sums: number of sums of hidden states in each step, over the ranks that have the same layers; none for one rank.
        stages: number of parts of the layers, which compute a token one after another.
        h200_milliseconds: estimated time of a step of one token on as many H200 GPUs: reads of weights, with the least
            and the largest time for sums. Reads at the memory's 4.8 TB/s; 10 to 15 microseconds for a sum over NVLink.
            Both figures are published ones, not measured here.
    """

    shape: str
    stored: tuple[tuple[str, float], ...]
    stored_bytes: int
    memory_bytes: int
    room_bytes: int
    computed: str
    device: str
    ranks: int
    kv_token_bytes: int
    kv_tokens: int
    sums: int
    stages: int
    h200_milliseconds: tuple[float, float, float]


class _FirstRank(Alone):
    """Rank 0 of a group that is planned."""

    def __init__(self, size: int) -> None:
        self.size = size


def plan_weights(config: EngineConfig, path: Path) -> WeightPlan:
    """Plan the weights of a folder in Hugging Face format or of a GGUF file.

    Raises:
        ModelError: the model is not supported, or its files are malformed.
        ConfigError: the options do not fit the device, or the ranks do not divide the model.
    """
    config, size = replace(config, model=str(path)), config.num_ranks
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    checkpoint = open_checkpoint(path)
    model = read_model_config(checkpoint)
    model = model.up_to(config.max_model_len or model.max_position_embeddings)
    source = open_source(checkpoint, model, dummy=config.load_format == "dummy")
    room = weight_room(config, model, device, dtype) // (size if device.type == "cpu" else 1)
    part = model
    form = choose_weight_form(config, device, dtype, checkpoint, available=room)
    of_part: WeightSource = source
    if config.tensor_parallel_size > 1:
        check_split(model, config.tensor_parallel_size)
        shard = Shard.of(model, _FirstRank(config.tensor_parallel_size))
        of_part, part = ShardSource(source, shard), shard.config
    # Stages compute a token one after another: together they read, and add up, what one of them with all layers would.
    reads = token_bytes(of_part, part, dtype, form) / _H200_BYTES
    least, most = (_all_sums(config, part) * seconds for seconds in _SUM_SECONDS)
    if config.pipeline_parallel_size > 1:
        check_stages(model, config.pipeline_parallel_size)
        stage = Stage.of(part, _FirstRank(size), config.tensor_parallel_size)
        of_part, part = StageSource(of_part, stage), stage.config
    memory = weight_bytes(of_part, part, dtype, form)
    kv_dtype = choose_kv_dtype(config, model, device, dtype)
    kv_page = bytes_per_page(part, config.block_size, kv_dtype)
    beside = memory if device.type == "cuda" and config.kv_cache_memory is None else 0
    pages = max(0, pool_bytes(config, device, StepMemory(), 0) - beside) // kv_page
    return WeightPlan(
        shape=_shape(model),
        stored=_stored(source),
        stored_bytes=_file_bytes(path, checkpoint),
        memory_bytes=memory,
        room_bytes=room,
        computed=_computed(form, of_part, dtype),
        device=ops.native_status() if device.type == "cpu" else ops.triton_status(device),
        ranks=size,
        kv_token_bytes=kv_page // config.block_size,
        kv_tokens=(config.num_gpu_blocks_override or pages) * config.block_size,
        sums=_all_sums(config, part),
        stages=config.pipeline_parallel_size,
        h200_milliseconds=(1e3 * reads, 1e3 * least, 1e3 * most),
    )


def _all_sums(config: EngineConfig, part: ModelConfig) -> int:
    return sum(map(_sums, part.layers)) if config.tensor_parallel_size > 1 else 0


def _computed(form: WeightForm, source: WeightSource, dtype: torch.dtype) -> str:
    """Return how products are computed; of integers of 8 bits numbers are not rounded, but activations may be."""
    usual = _COMPUTED[form].format(dtype=str(dtype).removeprefix("torch."))
    if form not in ("stored_widened", "stored_both"):
        return usual
    found = set()
    for name in source.shapes:
        rows = source.byte_rows(name) if source.byte_scales(name) else None
        if rows is not None and rows.numbers is NumberForm.INT8:
            rounds = dtype is torch.bfloat16 and source.rounds_inputs(name)
            found.add(f"integers of 8 bits as stored, {_ROUNDED if rounds else _SCALED}")
        elif rows is not None or source.stored(name) is not None:
            found.add(usual)
    return "; ".join(sorted(found)) or usual


def _sums(layer: LayerConfig) -> int:
    """Return how often a layer adds up parts of its results over the ranks."""
    mixture = layer.mixture if layer.has_mlp else None
    of_mlp = 0 if mixture is None else 1 + bool(mixture.latent_size and mixture.shared_size)
    if layer.has_mlp and (mixture is None or mixture.is_beside_mlp):
        of_mlp += 1
    of_state = 0 if layer.recurrent is None else 1 + isinstance(layer.recurrent, MambaLayer)
    return layer.has_attention + of_state + of_mlp


def _shape(model: ModelConfig) -> str:
    return f"{model.family}, {model.num_layers} layers of {model.hidden_size}, vocabulary {model.vocab_size:,}"


def _stored(source: WeightSource) -> tuple[tuple[str, float], ...]:
    """Return how matrices are stored, with their shares of all values."""
    values: Counter[str] = Counter()
    for name, shape in source.shapes.items():
        if len(shape) > 1:
            values[source.storage(name)] += math.prod(shape)
    total = max(1, values.total())
    return tuple((kind, count / total) for kind, count in values.most_common())


def _file_bytes(path: Path, checkpoint: Path | GgufFile) -> int:
    if isinstance(checkpoint, GgufFile):
        return sum(part.path.stat().st_size for part in checkpoint.parts)
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))
