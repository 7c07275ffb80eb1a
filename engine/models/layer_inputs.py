"""Inputs that each layer gets for each token beside the residual stream (per-layer embeddings, Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from ...kernels.column_ops import ColumnRuns, take_columns
from ...kernels.ops import add_scaled, copy_residual, gated_activation, rms_norm
from ...lora.lora_step import LoraStep
from ..checkpoint.model_config import Activation
from .forward_inputs import ForwardInputs
from .layers import Projection
from .norms import Norm, normed


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """``(norm(product_factor * projection(x)) + scale * embedding(token)) * sum_factor`` for the L layers of a model.

    Attributes:
        embedding: [V, L * P], P values of each token for each layer.
        scale: factor of the embedding.
        projection: projection of the model's embeddings to L * P values.
        product_factor: factor of the projection's result.
        norm: [P], weight of the RMS norm over the values of each layer.
        eps: epsilon of this norm.
        sum_factor: factor of the sum of both.
    """

    embedding: Tensor
    scale: float
    projection: Projection
    product_factor: float
    norm: Tensor
    eps: float
    sum_factor: float

    @property
    def width(self) -> int:
        """L * P."""
        return self.embedding.shape[1]

    def __call__(self, token_ids: Tensor, embedded: Tensor, lora: LoraStep | None) -> Tensor:
        """Return the inputs of all layers in the model's type, side by side: [T], [T, H] fp32 -> [T, L * P]."""
        x = embedded.to(self.embedding.dtype)
        projected = (self.projection(x, lora) * self.product_factor).view(-1, len(self.norm))
        of_context = rms_norm(projected, self.norm, self.eps).view(len(x), -1)
        of_token = functional.embedding(token_ids, self.embedding) * self.scale
        return (of_context + of_token) * self.sum_factor


@dataclass(frozen=True, slots=True)
class LayerInput:
    """A layer's addition after its MLP: ``norm(output(act(gate(h)) * input))``.

    Attributes:
        columns: columns of the gate, and of this layer's part of the inputs of all layers.
        norm: the norm after the output projection.
    """

    gate: Projection
    output: Projection
    columns: ColumnRuns
    activation: Activation
    norm: Norm

    @classmethod
    def of(cls, gate: Projection, output: Projection, index: int, activation: Activation, norm: Norm) -> LayerInput:
        """Return the input of the layer with this index."""
        (size,) = gate.sizes
        return cls(gate, output, ColumnRuns.of([(0, 0, size), (1, index * size, size)]), activation, norm)

    def __call__(self, x: Tensor, residual: Tensor, inputs: ForwardInputs) -> Tensor:
        """Add the MLP's output x [T, H] to the residual stream, and return the next addition [T, H]."""
        assert inputs.layer_inputs is not None
        add_scaled(x, residual, 1.0)
        gate = self.gate(copy_residual(residual, x.dtype), inputs.lora)
        y = gated_activation(take_columns(self.columns, gate, inputs.layer_inputs), self.activation)
        return normed(self.norm, self.output(y, inputs.lora), inputs.own)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The products, in the order of the pass."""
        return self.gate, self.output
