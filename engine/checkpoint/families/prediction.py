"""``PredictionModule``: how a family's checkpoints store an MTP module, a layer that predicts further tokens."""

from __future__ import annotations

from dataclasses import dataclass

COUNT_KEY = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True)
class PredictionModule:
    """Names of an MTP module's tensors, and what it reads. Its layer has the names of the model's layers.

    Attributes:
        block: the modules, counted from 0, or with a ``layer`` the one module; None where they are counted with the
            layers, behind the last.
        token_norm: the norm of embeddings.
        hidden_norm: the norm of hidden states.
        product: of both side by side.
        last_norm: the norm behind the layer.
        embedding: its own, a copy of the model's that some checkpoints leave out; None where there is none.
        head: the same of the head.
        hidden_first: hidden states come before embeddings in the product's input.
        reads_normed: it reads the model's hidden states behind the model's last norm.
        leaves_normed: for the token after the next it reads its own hidden states behind its last norm, else before.
        layer: its layers, below the module; empty where the module is a layer itself.
        count_key: of the number of modules, in config.json.
        count: that number where the key is absent.
    """

    block: str | None = None
    token_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    product: str = "eh_proj"
    last_norm: str = "shared_head.norm"
    embedding: str | None = "embed_tokens"
    head: str | None = "shared_head.head"
    hidden_first: bool = False
    reads_normed: bool = True
    leaves_normed: bool = False
    layer: str = ""
    count_key: str = COUNT_KEY
    count: int = 0

    def prefix(self, index: int, num_layers: int) -> str:
        """Return what the names of a module's tensors begin with, in a model of so many layers."""
        if self.block is None:
            return f"model.layers.{num_layers + index}"
        return self.block if self.layer else f"{self.block}.{index}"

    def layer_prefix(self, index: int, num_layers: int) -> str:
        """Return what the names of the tensors of a module's layer begin with."""
        prefix = self.prefix(index, num_layers)
        return f"{prefix}.{self.layer}.{index}" if self.layer else prefix
