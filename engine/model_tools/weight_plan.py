"""Plan of a model's weights: how they are stored, what they will take in memory, and how they will be computed here.

Only headers and configurations are read, before anything is loaded.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from ...kernels import ops
from ..checkpoint.gguf import GgufFile
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.read_config import open_checkpoint, read_model_config
from ..config import EngineConfig
from ..executor.device import choose_device, choose_dtype
from ..executor.kv_budget import weight_room
from ..loading.load_model import open_source
from ..loading.weight_forms import WeightForm, choose_weight_form
from ..loading.weight_memory import weight_bytes
from ..loading.weight_readers import WeightSource

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


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """What ``rootgraft doctor MODEL`` tells.

    Attributes:
        shape: family, layers and sizes in a few words.
        stored: each way in which weights are stored, and its share of them, largest first.
        stored_bytes: of all tensors in the files.
        memory_bytes: of the weights in memory.
        room_bytes: that weights may take here.
        computed: how products are computed.
        device: where, and by which kernels.
    """

    shape: str
    stored: tuple[tuple[str, float], ...]
    stored_bytes: int
    memory_bytes: int
    room_bytes: int
    computed: str
    device: str


def plan_weights(config: EngineConfig, path: Path) -> WeightPlan:
    """Plan the weights of a folder in Hugging Face format or of a GGUF file.

    Raises:
        ModelError: the model is not supported, or its files are malformed.
        ConfigError: the options do not fit the device.
    """
    config = replace(config, model=str(path))
    device = choose_device(config)
    dtype = choose_dtype(config, device)
    checkpoint = open_checkpoint(path)
    model = read_model_config(checkpoint)
    source = open_source(checkpoint, model, dummy=False)
    room = weight_room(config, model, device, dtype)
    form = choose_weight_form(config, device, dtype, checkpoint, available=room)
    name = str(dtype).removeprefix("torch.")
    return WeightPlan(
        shape=_shape(model),
        stored=_stored(source),
        stored_bytes=_file_bytes(path, checkpoint),
        memory_bytes=weight_bytes(source, model, dtype, form),
        room_bytes=room,
        computed=_COMPUTED[form].format(dtype=name),
        device=ops.native_status() if device.type == "cpu" else ops.triton_status(device),
    )


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
