"""``ForwardInputs``: the tensors that one forward pass over a ragged batch reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ...kernels.layouts.state_arguments import StateBatch
from ...kernels.ops import PagedBatch
from ...lora.lora_step import LoraStep
from ...lora.own.own_weights import OwnStep
from ...lora.own.static_own_rows import StaticOwnRows


@dataclass(slots=True)
class ChosenTokens:
    """The choice of an index in a pass, for the later layers that share it.

    Attributes:
        cells: result of ``kernels.index_ops.choose_tokens``, written by each layer with an index; None if each token
            attends to all tokens.
    """

    cells: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs(PagedBatch):
    """Tensors of one forward pass over R rows and T tokens, on the model's device.

    Attributes:
        token_ids: [T] int64, ids of the tokens.
        positions: [T] int64, the position of each token in its sequence, as a row of the rotary tables: in a long
            sequence ``DecoderModel.long_offset`` is added.
        kv_loc: [T] int64, the cell for the token's K and V: ``page * page_size + position % page_size``.
        lora: the adapters of this step, None if absent.
        layer_inputs: [T, L * P], the inputs of the L layers for each token beside the residual stream
            (``LayerInputs``); None in a model without such inputs.
        embedded: [T, H], the token embeddings in the model's type, in a model with shared blocks; else None.
        own: weights of adapters in place of the model's in this step, None if absent.
        own_rows: the rows of adapters' own embeddings in a captured pass; None in other passes.
        kept: [S] int64, the tokens whose hidden states are needed, None for all.
        states: slots of recurrent states; None in a model without recurrent states.
        beside: states or index keys of layers that also have K and V, by the layer's index: see ``KvPool.beside``.
        num_tokens: [1] int32, number of tokens of a captured step, which is padded to T; None without padding.
        chosen: the choice of the last index, for layers that share it; None in a model without such layers.
        of_kept: inputs of the last layer for the kept tokens, without their ids, positions and cells.
    """

    token_ids: Tensor
    positions: Tensor
    kv_loc: Tensor
    lora: LoraStep | None = None
    states: StateBatch | None = None
    beside: Mapping[int, tuple[Tensor, Tensor]] | None = None
    layer_inputs: Tensor | None = None
    embedded: Tensor | None = None
    own: OwnStep | None = None
    own_rows: StaticOwnRows | None = None
    kept: Tensor | None = None
    num_tokens: Tensor | None = None
    chosen: ChosenTokens | None = None
    of_kept: ForwardInputs | None = None
