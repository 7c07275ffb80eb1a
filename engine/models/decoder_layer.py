"""``DecoderLayer``: a mixer and an MLP with their norms, from one layer's norm to the next one's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.expert_ops import ExpertWeights
from ...kernels.ops import add_scaled
from .experts import BesideMlp
from .forward_inputs import ForwardInputs
from .layer_inputs import LayerInput
from .layers import LayerMixer, LayerMlp, Projection
from .norms import Norm, normed, normed_sum


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: takes hidden states already normed for it and norms its result for the next layer.

    So each sum of the residual stream and the norm after it are one op.

    Attributes:
        attention: what stands in its place in a layer with a recurrent state too; None in a layer of an MLP alone.
        mlp: None in a layer of a mixer alone.
        post_attention: norm of attention's output before it is added, or None.
        post_mlp: the same for the MLP.
        mlp_norm: the norm in front of the MLP; in a parallel block that in front of the layer. A layer of a mixer or
            an MLP alone has the norm in front of the layer and no other.
        next_norm: the norm in front of the next layer, or the model's last.
        is_parallel: the MLP's input is the residual stream before attention's output is added.
        beside: a mixture of experts beside the MLP, or None.
        input: what it gets of a token beside the residual stream; None for nothing.
    """

    attention: LayerMixer | None
    mlp: LayerMlp | None
    post_attention: Norm | None
    post_mlp: Norm | None
    mlp_norm: Norm
    next_norm: Norm
    is_parallel: bool
    beside: BesideMlp | None = None
    input: LayerInput | None = None

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Products that all tokens pass, in the order of the pass."""
        return *(() if self.attention is None else self.attention.before_kv), *self.behind_kv

    @property
    def behind_kv(self) -> tuple[Projection, ...]:
        """Those of them behind the stored K and V."""
        of_mixer = () if self.attention is None else self.attention.behind_kv
        of_mlp = () if self.mlp is None else self.mlp.projections
        of_mlp += () if self.beside is None else self.beside.experts.projections
        return *of_mixer, *of_mlp, *(() if self.input is None else self.input.projections)

    @property
    def active(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products of which each part has a weight of its own: how many parts a token has, and the weights of all."""
        of_mixer = () if self.attention is None else self.attention.of_heads
        beside = () if self.beside is None else self.beside.experts.active
        return *of_mixer, *(() if self.mlp is None else self.mlp.active), *beside

    def __call__(self, x: Tensor, residual: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """[T, H] normed -> [T, H] normed; ``residual`` [T, H] fp32 is updated in place."""
        q = self.store(x, inputs, k_cache, v_cache)
        return self.finish(q, residual, inputs, k_cache, v_cache)

    def store(self, x: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Compute all that later tokens need of these: [T, H] normed -> [T, ...], for ``finish``."""
        return x if self.attention is None else self.attention.store(x, inputs, k_cache, v_cache)

    def finish(self, q: Tensor, residual: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Compute the layer after its K and V are stored, for S of the queries: [S, ...] -> [S, H] normed."""
        x = q if self.attention is None else self._mixed(self.attention, q, residual, inputs, k_cache, v_cache)
        if self.mlp is None:
            return normed_sum(self.next_norm, x, residual, inputs.own)
        x = self.mlp(x, inputs.lora, inputs.num_tokens)
        if self.beside is not None:
            x = self.beside(x, residual, inputs)
        if self.post_mlp is not None:
            x = normed(self.post_mlp, x, inputs.own)
        if self.input is not None:
            x = self.input(x, residual, inputs)
        return normed_sum(self.next_norm, x, residual, inputs.own)

    def _mixed(
        self,
        mixer: LayerMixer,
        q: Tensor,
        residual: Tensor,
        inputs: ForwardInputs,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        """The input of the MLP, [S, ...] -> [S, H] normed; without an MLP the mixer's output, which is still to add."""
        x = mixer(q, inputs, k_cache, v_cache)
        if self.post_attention is not None:
            x = normed(self.post_attention, x, inputs.own)
        if self.mlp is None:
            return x
        if not self.is_parallel:
            return normed_sum(self.mlp_norm, x, residual, inputs.own)
        of_mlp = normed(self.mlp_norm, residual, inputs.own)
        add_scaled(x, residual, 1.0)
        return of_mlp
