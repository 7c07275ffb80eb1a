"""``PredictionModule``: how a family's checkpoints store an MTP module, a layer that predicts further tokens."""

from __future__ import annotations

from dataclasses import dataclass

COUNT_KEY = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True)
class PredictionModule:
    """Names of an MTP module's tensors, and its inputs. The layer in it has the tensor names of the model's layers.

    Attributes:
        block: name of the modules, which are counted from 0, or with ``layer`` the name of the only module; None if the
            modules are counted together with the layers, after the last layer.
        token_norm: the norm of embeddings.
        hidden_norm: the norm of hidden states.
        product: the projection of the two normed vectors, side by side.
        last_norm: the norm after the layer.
        embedding: the module's own embedding, a copy of the model's that some checkpoints leave out; None if absent.
        head: the module's own head, likewise.
        hidden_first: whether hidden states come before embeddings in the product's input.
        reads_normed: whether the module reads the model's hidden states after the model's last norm, else before that
            norm.
        leaves_normed: whether, for the token after the next, the module reads its own hidden states after its last
            norm, else before that norm.
        layer: name of the module's layers, relative to the module; empty if the module itself is a layer.
        count_key: key of the number of modules in config.json.
        count: number of modules if the key is absent.
        is_computed: whether the module is computed; if not, its tensors are left out.
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
    is_computed: bool = True

    def prefix(self, index: int, num_layers: int) -> str:
        """Return the prefix of the names of a module's tensors, in a model of ``num_layers`` layers."""
        if self.block is None:
            return f"model.layers.{num_layers + index}"
        return self.block if self.layer else f"{self.block}.{index}"

    def layer_prefix(self, index: int, num_layers: int) -> str:
        """Return the prefix of the names of the tensors of a module's layer."""
        prefix = self.prefix(index, num_layers)
        return f"{prefix}.{self.layer}.{index}" if self.layer else prefix
