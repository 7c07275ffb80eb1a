"""``Model``: the interface of a model on its device, for all implementations."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...kernels.ops import Largest
from ...lora.lora_step import LoraStep
from ...lora.own.own_weights import OwnStep
from ..checkpoint.model_config import ModelShape
from .forward_inputs import ForwardInputs
from .kv_pool import KvPool


class Model(Protocol):
    """A model: ``DecoderModel``, or ``TransformersModel``, whose modules are the transformers library's.

    Attributes and methods are described in ``DecoderModel``.
    """

    @property
    def config(self) -> ModelShape: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def long_offset(self) -> int: ...

    def forward(self, inputs: ForwardInputs, kv: KvPool) -> Tensor: ...

    def logits(self, hidden: Tensor, lora: LoraStep | None = None, own: OwnStep | None = None) -> Tensor: ...

    def best(self, hidden: Tensor, lora: LoraStep | None = None, own: OwnStep | None = None) -> Largest: ...
