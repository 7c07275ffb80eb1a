"""The least times of this machine for a random model's steps: bytes to read, and products to make."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rootgraft.engine.checkpoint.model_config import ModelConfig
from rootgraft.kernels import machine_limits

_BYTES = 2  # Bytes of a number in bfloat16.


@dataclass(frozen=True, slots=True)
class MachineBounds:
    """Rates of the machine for a model in bfloat16.

    Attributes:
        reading: bytes read from memory in a second.
        products: multiplications in a second.
        weights: of all linear layers without the head.
        head: weights of the head.
        token: bytes of KV of a token.
    """

    model: ModelConfig
    reading: float
    products: float
    weights: int
    head: int
    token: int

    @classmethod
    def measure(cls, model: ModelConfig) -> MachineBounds:
        """Measure the rates with the threads that the kernels have."""
        hidden, inner = model.hidden_size, model.intermediate_size
        layer = hidden * (2 * model.query_size + 2 * model.kv_size) + 3 * hidden * inner
        return cls(
            model,
            machine_limits.reading_rate(),
            machine_limits.products_rate(torch.bfloat16),
            model.num_layers * layer,
            hidden * model.vocab_size,
            2 * model.num_layers * model.kv_size * _BYTES,
        )

    def measured_again(self) -> MachineBounds:
        """Return these bounds at the better of their rates and those of now, as a machine's speed changes."""
        now = MachineBounds.measure(self.model)
        return replace(self, reading=max(self.reading, now.reading), products=max(self.products, now.products))

    def decode(self, rows: int, context: int) -> float:
        """Return the least seconds of a step of rows that share nothing: weights and KV read, or products made."""
        weights = self.weights + self.head
        linears = max(weights * _BYTES / self.reading, rows * weights / self.products)
        return linears + rows * context * self.token / self.reading

    def prefill(self, tokens: int) -> float:
        """Return the least seconds of a prompt: products of linear layers and of causal attention."""
        pairs = tokens * (tokens + 1) // 2
        attention = pairs * 2 * self.model.query_size * self.model.num_layers
        return (tokens * self.weights + attention + self.head) / self.products
