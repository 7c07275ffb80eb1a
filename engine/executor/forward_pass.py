"""Choice of a model's forward pass: CUDA graphs, CPU graphs, or eager."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..config import EngineConfig
from ..models.decoder import DecoderModel
from ..models.kv_pool import KvPool
from ..models.model import Model
from .cpu_graphs import CpuGraphs
from .cuda_graphs import graphs_for
from .input_builder import HostInputs, InputBuilder


def choose_forward(
    config: EngineConfig, model: Model, kv: KvPool, inputs: InputBuilder
) -> Callable[[HostInputs], Tensor]:
    """Return the forward pass, with all its CUDA graphs captured."""
    if graphs := graphs_for(config, model, kv, inputs):
        graphs.capture(graphs.variants)
        return graphs.forward
    if isinstance(model, DecoderModel) and model.device.type == "cpu" and not config.enforce_eager:
        return CpuGraphs(model, kv, inputs, config.max_num_seqs).forward
    return partial(_forward_eagerly, model, kv, inputs)


def _forward_eagerly(model: Model, kv: KvPool, inputs: InputBuilder, step: HostInputs) -> Tensor:
    return model.forward(inputs.to_tensors(step), kv)
