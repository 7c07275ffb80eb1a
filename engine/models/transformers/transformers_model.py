"""``TransformersModel``: a causal model of the transformers library over our KV pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from ....kernels.ops import Largest, largest
from ....lora.base_projections import BaseLayout
from ....lora.lora_step import LoraStep
from ....lora.own.own_weights import OwnStep
from ..forward_inputs import ForwardInputs
from ..kv_pool import KvPool
from .adapted_modules import AdaptedModules
from .paged_attention import CurrentStep
from .transformers_config import TransformersConfig


@dataclass(frozen=True, slots=True)
class TransformersModel:
    """A model's own modules, and a forward pass that runs them. Made by ``load_transformers_model``.

    Attributes:
        decoder: the layers, from token ids to hidden states after the last norm.
        head: the causal model with ``GivenHidden`` in the place of the decoder: from hidden states to logits.
        given: the module in the place of the decoder.
        adapted: the modules that adapters may change.
        step: inputs that the modules' hooks and attention read.
        notice: a line for people to read: which class computes, and that it is slower than ours.
    """

    config: TransformersConfig
    dtype: torch.dtype
    device: torch.device
    max_positions: int
    decoder: Any
    head: Any
    given: GivenHidden
    adapted: AdaptedModules
    step: CurrentStep
    notice: str

    @property
    def long_offset(self) -> int:
        """0, as there is one rotary embedding for all lengths."""
        return 0

    @property
    def layout(self) -> BaseLayout:
        """The layout of the base model for adapters."""
        return self.adapted.layout(self.dtype, self.device)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs, kv: KvPool) -> Tensor:
        """Compute the KV of all tokens of a step, and the last hidden states of the kept ones: [S, H]."""
        step = self.step
        step.inputs, step.kv, step.lora = inputs, kv, inputs.lora
        try:
            out = self.decoder(
                input_ids=inputs.token_ids[None],
                position_ids=inputs.positions[None],
                use_cache=False,
                return_dict=True,
            )
        finally:
            step.inputs = step.kv = step.lora = None
        hidden: Tensor = out.last_hidden_state[0]
        return hidden if inputs.kept is None else hidden[inputs.kept]

    @torch.inference_mode()
    def logits(self, hidden: Tensor, lora: LoraStep | None = None, own: OwnStep | None = None) -> Tensor:
        """Return the logits [S, V] fp32 of hidden states [S, H], by the causal model's modules after its decoder.

        ``lora`` are the adapters of these rows, if any of them changes the head; none has an own head (``takes_own``).
        """
        assert own is None
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        self.step.lora, self.given.hidden = lora, hidden[None]
        try:
            logits: Tensor = self.head(input_ids=ids, use_cache=False, return_dict=True).logits
        finally:
            self.step.lora = self.given.hidden = None
        return logits[0].float()

    def best(self, hidden: Tensor, lora: LoraStep | None = None, own: OwnStep | None = None) -> Largest:
        """Return the largest of ``logits(hidden, lora)`` and their tokens, [S] each."""
        return largest(self.logits(hidden, lora, own))


class GivenHidden(nn.Module):
    """Replaces a decoder: it has the decoder's other attributes, and returns hidden states computed before.

    Attributes:
        hidden: [1, S, H], the next result.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.hidden: Tensor | None = None
        # A tuple keeps the decoder from becoming a submodule of this module.
        self._of = (decoder,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_of"][0], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Return ``hidden`` in the form of a decoder's output."""
        return _Output(last_hidden_state=self.hidden)


class _Output(BaseModelOutputWithPast):  # type: ignore[misc]
    """A decoder's output; further fields of a family (router logits, for example) are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        return
