"""``DecoderLayer``: a mixer and an MLP with their norms, up to the norm before the next layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...kernels.expert_ops import ExpertWeights
from ...kernels.ops import add_scaled
from .experts import BesideMlp
from .forward_inputs import ForwardInputs
from .layer_inputs import LayerInput
from .layers import Attention, LayerMixer, LayerMlp, Mlp, Projection
from .norms import Norm, normed, normed_sum


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer. Its input is already normed for it, and its output is normed for the next layer.

    So each addition to the residual stream and the norm after it are one op.

    Attributes:
        attention: the mixer: attention, or a layer with a recurrent state in its place; None in a layer that is only an
            MLP.
        mlp: the MLP; None in a layer that is only a mixer.
        post_attention: norm of attention's output before it is added, or None.
        post_mlp: norm of the MLP's output before it is added, or None.
        mlp_norm: the norm before the MLP; in a parallel block mostly the norm before the layer. A layer that is only a
            mixer or only an MLP has the norm before the layer and no other.
        next_norm: the norm before the next layer, or the model's last norm.
        is_parallel: whether the MLP's input is the residual stream before attention's output is added.
        beside: a mixture of experts beside the MLP, or None.
        input: the layer's input for each token beside the residual stream; None if absent.
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
        """Products that all tokens pass through, in the order of the pass."""
        return *(() if self.attention is None else self.attention.before_kv), *self.behind_kv

    @property
    def behind_kv(self) -> tuple[Projection, ...]:
        """Products of ``projections`` that come after K and V are stored."""
        of_mixer = () if self.attention is None else self.attention.behind_kv
        of_mlp = () if self.mlp is None else self.mlp.projections
        of_mlp += () if self.beside is None else self.beside.experts.projections
        return *of_mixer, *of_mlp, *(() if self.input is None else self.input.projections)

    @property
    def active(self) -> tuple[tuple[int, ExpertWeights], ...]:
        """Products with a weight for each part (head or expert): the parts of a token, and all parts' weights."""
        of_mixer = () if self.attention is None else self.attention.of_heads
        beside = () if self.beside is None else self.beside.experts.active
        return *of_mixer, *(() if self.mlp is None else self.mlp.active), *beside

    def __call__(self, x: Tensor, residual: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """[T, H] normed -> [T, H] normed; ``residual`` [T, H] fp32 is updated in place."""
        q = self.store(x, inputs, k_cache, v_cache)
        return self.finish(q, residual, inputs, k_cache, v_cache)

    def store(self, x: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Compute everything that later tokens need of these tokens: [T, H] normed -> [T, ...], for ``finish``."""
        return x if self.attention is None else self.attention.store(x, inputs, k_cache, v_cache)

    def finish(self, q: Tensor, residual: Tensor, inputs: ForwardInputs, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Compute the layer after its K and V are stored, for S of the queries: [S, ...] -> [S, H] normed."""
        x = q if self.attention is None else self._mixed(self.attention, q, residual, inputs, k_cache, v_cache)
        if self.mlp is None:
            return normed_sum(self.next_norm, x, residual, inputs.own)
        if isinstance(self.mlp, Mlp) and self.post_mlp is None and self.beside is None and self.input is None:
            gated = self.mlp.gated(x, inputs.lora)
            return self.mlp.down.normed_sum(gated, residual, self.next_norm, inputs.lora, inputs.own)
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
        """Return the MLP's input, [S, ...] -> [S, H] normed; without an MLP the mixer's output, not added yet."""
        if (
            isinstance(mixer, Attention)
            and self.post_attention is None
            and self.mlp is not None
            and not self.is_parallel
        ):
            attended = mixer.attended(q, inputs, k_cache, v_cache)
            return mixer.output.normed_sum(attended, residual, self.mlp_norm, inputs.lora, inputs.own)
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
