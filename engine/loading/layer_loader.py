"""``LayerLoader``: builds a decoder layer by layer, and reads each tensor when it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ...kernels import memory
from ...kernels.ops import AnyLinear, AttentionParams, GroupedLinear, QuantisedLinear, RopeParams, StaticScales
from ..checkpoint.model_config import ModelConfig, PerLayerInputs, QueryScaling, Rope
from ..models.decoder import DecoderModel
from ..models.decoder_layer import DecoderLayer
from ..models.experts import BesideMlp
from ..models.latent_attention import LatentAttention
from ..models.layer_inputs import LayerInput, LayerInputs
from ..models.layers import (
    Attention,
    ClampedMlp,
    LayerMixer,
    LayerMlp,
    Mlp,
    PlainMlp,
    Projection,
    ScaledMlp,
    SplitHead,
    XieluMlp,
)
from ..models.norms import LayerNorm, NoNorm, Norm, RmsNorm, ScaledSum
from ..models.rope import cos_sin_table, query_scale_table
from .head_columns import narrowed_columns, position_pairs, position_rotation, query_gate, spread_columns
from .load_experts import clamped_swiglu, load_experts
from .load_latent import load_block_index, load_latent
from .load_progress import LoadProgress
from .load_recurrent import behind_shared_block, load_recurrent, side_by_side
from .shards import Shard
from .tensor_names import (
    BEFORE_EXPERTS,
    BEHIND_EXPERTS,
    BEHIND_MLP,
    EMBEDDING,
    LAYER_EMBEDDING,
    LAYER_GATE,
    LAYER_NORM,
    LAYER_OUTPUT,
    LAYER_PROJECTION,
    LAYER_PROJECTION_NORM,
    LAYER_SCALAR,
    POSITIONS,
    ROUTER_SCALE,
    SCORE,
    SINKS,
    XIELU,
    XIELU_CONSTANTS,
    down_module,
    final_norm,
    gate_module,
    head_norm_shapes,
    output_modules,
    qkv_modules,
    shared_name,
    up_modules,
)
from .weight_forms import WeightReader


class LayerLoader:
    """Builds a decoder layer by layer, and reads each tensor when it is needed.

    Attributes:
        ranks: ranks that the model is split over; None for a single rank.
        kv_scales: static scales of keys and values, by layer.
        shared: packed matrices that were read, by the names of their stored weights, so that layers with a shared block
            (Zamba 2) use the same ones; empty for other models.
    """

    def __init__(
        self, config: ModelConfig, weights: WeightReader, max_positions: int, shard: Shard | None = None
    ) -> None:
        self.config = config
        self.shard = shard
        self.ranks = None if shard is None else shard.ranks
        self.weights = weights
        self.max_positions = max_positions
        self.kv_scales: Mapping[int, StaticScales] = {}
        self.tables: dict[Rope, Tensor] = {}
        self.positions: Tensor | None = None
        self.query_scales: dict[QueryScaling, Tensor] = {}
        self.shared: dict[tuple[str, ...], AnyLinear] = {}
        self.has_two_ropes = config.rope_switch is not None and max_positions > config.rope_switch

    def model(self, progress: LoadProgress) -> DecoderModel:
        """Read the whole model, and report progress by layers."""
        config = self.config
        embedding, head = self.embedding_and_head()
        progress.read(None)
        norms = [self.norm(self.norm_before(index)) for index in range(config.num_layers)]
        norms.append(self.last_norm())
        behind = [self.scaled(index, norm) for index, norm in enumerate(norms[1:])]
        scale = config.embedding_scale
        if config.rounds_embedding_scale:
            scale = torch.tensor(scale, dtype=self.weights.dtype).item()
        return DecoderModel(
            config=config,
            dtype=self.weights.dtype,
            device=self.weights.device,
            embedding=embedding,
            embedding_scale=scale,
            first_norm=norms[0],
            layers=tuple(self._layers(norms, behind, progress)),
            head=head,
            max_positions=self.max_positions,
            long_offset=self.max_positions if self.has_two_ropes else 0,
            positions=self.weights.tensor(POSITIONS) if config.learned_positions else None,
            layer_inputs=None if config.layer_inputs is None else self.layer_inputs(config.layer_inputs),
            score=self.weights.exact(SCORE) if config.num_classes else None,
            embedding_norm=self.norm(f"model.{config.embedding_norm}") if config.embedding_norm else None,
        )

    def norm_before(self, index: int) -> str | None:
        """Return the name of the norm before a layer, or None; a layer with a shared block has a norm of its own."""
        name = self.config.norms_of(index).before_attention
        is_behind_block = self.config.layers[index].shared_block is not None
        return None if name is None or is_behind_block else f"model.layers.{index}.{name}"

    def _layers(self, norms: list[Norm], behind: list[Norm], progress: LoadProgress) -> Iterator[DecoderLayer]:
        for index in range(self.config.num_layers):
            yield self.layer(index, norms[index], behind[index])
            progress.read(index)

    def layer(self, index: int, own_norm: Norm, next_norm: Norm, prefix: str | None = None) -> DecoderLayer:
        """Read a layer, between the norm in front of it and the next one.

        Args:
            prefix: prefix of the names of the layer's tensors; by default the prefix of the model's layers.
        """
        memory.trim_heap()  # buffers of the layer before: some hundred MiB in all
        norms, prefix = self.config.norms_of(index), prefix or f"model.layers.{index}"
        is_parallel, has_mlp = self.config.parallel_block, self.config.layers[index].has_mlp
        has_two = not is_parallel or norms.before_mlp != norms.before_attention
        return DecoderLayer(
            attention=self.mixer(index, prefix),
            mlp=self.mlp(index, prefix) if has_mlp else None,
            post_attention=self.norm(f"{prefix}.{norms.after_attention}") if norms.after_attention else None,
            post_mlp=self.norm(f"{prefix}.{norms.after_mlp}") if norms.after_mlp else None,
            mlp_norm=self.norm(norms.before_mlp and f"{prefix}.{norms.before_mlp}") if has_two else own_norm,
            next_norm=next_norm,
            is_parallel=is_parallel,
            beside=self.beside_mlp(index, prefix),
            input=None if self.config.layer_inputs is None else self.layer_input(index, prefix),
        )

    def scaled(self, index: int, norm: Norm) -> Norm:
        """Return the norm after a layer; it also multiplies the residual stream by the layer's scalar, if any."""
        if not self.config.has_layer_scalars:
            return norm
        scalar = self.weights.exact(f"model.layers.{index}.{LAYER_SCALAR}")
        factor = 1.0 if scalar.is_meta else scalar.item()
        return ScaledSum(norm, factor, kept=factor)

    def layer_inputs(self, sizes: PerLayerInputs) -> LayerInputs:
        """Read the weights that compute the layers' further inputs for each token (per-layer inputs)."""
        config, embedding = self.config, self.weights.tensor(LAYER_EMBEDDING)
        return LayerInputs(
            embedding=embedding,
            scale=torch.tensor(sizes.size**0.5, dtype=self.weights.dtype).item(),
            projection=self.projection("", {LAYER_PROJECTION: embedding.shape[1]}, bias=False),
            product_factor=config.hidden_size**-0.5,
            norm=self.weights.tensor(LAYER_PROJECTION_NORM),
            eps=config.norm_eps,
            sum_factor=2**-0.5,
        )

    def layer_input(self, index: int, prefix: str) -> LayerInput:
        """Read the weights that a layer applies to its further input (``layer_inputs``)."""
        config, sizes = self.config, self.config.layer_inputs
        assert sizes is not None and config.activation != "xielu"
        return LayerInput.of(
            gate=self.projection(prefix, {LAYER_GATE: sizes.size}, bias=False),
            output=self.projection(prefix, {LAYER_OUTPUT: config.hidden_size}, bias=False),
            index=index,
            activation=config.activation,
            norm=self.norm(f"{prefix}.{LAYER_NORM}"),
        )

    def mlp(self, index: int, prefix: str) -> LayerMlp:
        """Read the MLP of a layer, or its mixture of experts."""
        config = self.config
        if (mixture := config.layers[index].mixture) is not None and not mixture.is_beside_mlp:
            block = f"{prefix}.{mixture.names.block}"
            return load_experts(self.weights, block, mixture, config.hidden_size, self.ranks)
        block = f"{prefix}.{config.mlp_block}"
        up = self.projection(block, up_modules(config, index), config.mlp_bias)
        down = self.projection(block, down_module(config), config.mlp_bias)
        if config.activation == "xielu":
            return XieluMlp(up, down, self._xielu(block))
        if (clamp := config.layers[index].mlp_clamp or config.mlp_clamp) is not None:
            return ClampedMlp(up, down, clamped_swiglu(clamp))
        if (scales := config.parallel_scales) is not None:
            return ScaledMlp.of(up, down, config.activation, scales.gate, scales.down)
        return Mlp(up, down, config.activation) if config.gated_mlp else PlainMlp(up, down, config.activation)

    def _xielu(self, block: str) -> Tensor:
        """Read the factors of an MLP's activation, [4] fp32: see ``kernels.ops.xielu``."""
        above, below = (softplus(self.weights.tensor(f"{block}.{name}").float()) for name in XIELU)
        line, highest = (self.weights.number(f"{block}.{name}").float() for name in XIELU_CONSTANTS)
        return torch.cat((above, below + line, line[None], highest[None]))

    def beside_mlp(self, index: int, prefix: str) -> BesideMlp | None:
        """Read the mixture of experts that a layer has in addition to its MLP; None if it has none."""
        config, mixture = self.config, self.config.layers[index].mixture
        if mixture is None or not mixture.is_beside_mlp:
            return None
        block = f"{prefix}.{mixture.names.block}"
        return BesideMlp(
            experts=load_experts(self.weights, block, mixture, config.hidden_size, self.ranks),
            router_norm=self.weights.exact(f"{block}.{ROUTER_SCALE}") * config.hidden_size**-0.5,
            eps=config.norm_eps,
            before=self.norm(f"{prefix}.{BEFORE_EXPERTS}"),
            behind=self.norm(f"{prefix}.{BEHIND_EXPERTS}"),
            behind_mlp=self.norm(f"{prefix}.{BEHIND_MLP}"),
        )

    def mixer(self, index: int, prefix: str) -> LayerMixer | None:
        """Read the attention of a layer, or the mixer in its place; None for a layer that is only an MLP."""
        config, layer = self.config, self.config.layers[index]
        attention = self.attention(index, f"{prefix}.self_attn") if layer.has_attention else None
        if layer.block_index is not None and layer.rope is not None:
            assert isinstance(attention, Attention)
            table = self.table(layer.rope)
            return load_block_index(self.weights, f"{prefix}.self_attn", config, index, attention, table)
        if layer.recurrent is None:
            return attention
        scales, hidden = config.parallel_scales, config.hidden_size
        state = load_recurrent(self.weights, prefix, layer.recurrent, hidden, config.norm_eps, scales, self.ranks)
        if attention is None:
            return state
        assert isinstance(attention, Attention)
        if layer.shared_block is not None:
            mlp = self.mlp(index, prefix)
            return behind_shared_block(config, index, attention, mlp, state, self.norm, self.projection)
        return side_by_side(config, index, attention, state)

    def attention(self, index: int, prefix: str) -> Attention | LatentAttention:
        """Read the attention of a layer."""
        config = self.config
        layer = config.layers[index]
        if config.latent is not None:
            table = None if layer.rope is None else self.table(layer.rope)
            interleaved = layer.rope is not None and layer.rope.interleaved
            return load_latent(
                self.weights,
                prefix,
                config,
                config.latent,
                table,
                interleaved,
                self.ranks,
                query_scale=self.query_scale(layer.query_scaling) if layer.query_scaling else None,
                shares_index=layer.shares_index,
            )
        q_norm, k_norm = self.head_norms(index, prefix)
        return Attention(
            qkv=self.projection(prefix, qkv_modules(config, index), config.qkv_bias),
            output=self.projection(prefix, output_modules(config), config.output_bias),
            rope=RopeParams(
                num_heads=config.num_heads_of(index),
                num_kv_heads=config.heads_of(index).heads if layer.kv_source is None else 0,
                cos_sin=self.rotation(layer.rope),
                q_norm=q_norm,
                k_norm=k_norm,
                eps=config.norm_eps,
                offset=config.norm_offset,
                norm=config.qk_norm or "head",
                is_normed_last=config.is_qk_normed_last,
                is_interleaved=layer.rope is not None and layer.rope.interleaved,
                query_scale=self.query_scale(layer.query_scaling) if layer.query_scaling else None,
                has_v_norm=config.has_v_norm,
                kv_scales=self.static_scales(index),
            ),
            params=AttentionParams(
                scale=config.attention_scale,
                window=layer.window,
                soft_cap=config.attention_soft_cap,
                sinks=self.weights.exact(f"{prefix}.{SINKS}") if config.has_sinks(index) else None,
                chunk=layer.chunk,
            ),
            head_norms=tuple(f"{prefix}.{name}" for name in config.head_norms or () if config.qk_norm is not None),
            gate=query_gate(config, index),
            gating=self.projection(prefix, gate, bias=False) if (gate := gate_module(config, index)) else None,
            spread=spread_columns(config, index),
            narrowed=narrowed_columns(config, index),
            pairs=position_pairs(config, self.shard, self.weights.dtype, self.weights.device),
        )

    def static_scales(self, index: int) -> StaticScales | None:
        """Return the static scales of a layer's keys and values on the device, None without."""
        if (found := self.kv_scales.get(index)) is None:
            return None
        return StaticScales(found.form, found.values.to(self.weights.device))

    def head_norms(self, index: int, prefix: str) -> tuple[Tensor | None, Tensor | None]:
        """Return the weights of the norms of a layer's query and key heads, None for no norms."""
        config, layer = self.config, self.config.layers[index]
        if config.qk_norm is None or (config.head_norms is None and layer.rope is None):
            return None, None
        if config.head_norms is None:
            ones = torch.ones(config.head_dim, dtype=self.weights.dtype, device=self.weights.device)
            return ones, ones
        stored = head_norm_shapes(config, index)
        q_norm, k_norm = (self.head_norm(f"{prefix}.{name}") if name in stored else None for name in config.head_norms)
        return q_norm, k_norm

    def head_norm(self, name: str) -> Tensor:
        """Return the weight of a norm of heads, with its bias below it if it has one."""
        weight = self.weights.tensor(f"{name}.weight")
        return torch.stack((weight, self.weights.tensor(f"{name}.bias"))) if self.config.qk_norm == "biased" else weight

    def embedding_and_head(self) -> tuple[Tensor | QuantisedLinear | GroupedLinear, Projection]:
        """Return the embedding, plain or quantised, and the head. A tied quantised head is the embedding itself."""
        size = self.config.vocab_size
        if self.shard is not None:
            return self.embedding(), self.split_head(self.shard)
        if not self.config.tied_head:
            return self.embedding(), self.projection("", {"lm_head": size}, self.config.head_bias)
        packed = self.weights.packed(EMBEDDING)
        embedding = packed if isinstance(packed, QuantisedLinear | GroupedLinear) else self.weights.tensor(EMBEDDING)
        return embedding, Projection(("lm_head",), (size,), packed)

    def split_head(self, shard: Shard) -> SplitHead:
        """Read this rank's rows of the head."""
        sizes = shard.vocab_sizes
        own = self.projection("", {"lm_head": sizes[shard.ranks.rank]}, self.config.head_bias)
        return SplitHead(own.modules, own.sizes, own.packed, ranks=shard.ranks, vocab_sizes=sizes)

    def embedding(self) -> Tensor | QuantisedLinear | GroupedLinear:
        found = self.weights.grouped(EMBEDDING) or self.weights.stored(EMBEDDING)
        return self.weights.tensor(EMBEDDING) if found is None else found

    def projection(self, prefix: str, modules: dict[str, int], bias: bool) -> Projection:
        """Read modules side by side, given by their names behind ``prefix`` and their output columns."""
        names = tuple(f"{prefix}.{module}".lstrip(".") for module in modules)
        bias_vector = self.weights.tensor(*(f"{name}.bias" for name in names)) if bias else None
        stored = tuple(shared_name(f"{name}.weight", self.config) for name in names)
        if (packed := self.shared.get(stored)) is None:
            packed = self.weights.packed(*stored, bias=bias_vector)
        if self.config.shares_blocks:
            self.shared[stored] = packed
        split = None if self.shard is None else self.shard.splits.get(names[0])
        added_over = self.ranks if split is not None and split.side == "inputs" else None
        return Projection(names, tuple(modules.values()), packed, added_over)

    def last_norm(self) -> Norm:
        """Return the norm after the last layer."""
        return self.norm(final_norm(self.config))

    def norm(self, name: str | None) -> Norm:
        """Return the norm of this name; for none the identity."""
        norm = self._norm(name)
        return norm if self.config.residual_scale == 1.0 else ScaledSum(norm, self.config.residual_scale)

    def _norm(self, name: str | None) -> Norm:
        config = self.config
        if name is None:
            return NoNorm(self.weights.dtype)
        if config.weightless_norms:
            name, weight = "", torch.ones(config.hidden_size, dtype=self.weights.dtype, device=self.weights.device)
        else:
            weight = self.weights.tensor(shared_name(f"{name}.weight", config))
        if config.norm == "rms":
            return RmsNorm(name, weight, config.norm_eps, config.norm_offset)
        bias = self.weights.tensor(f"{name}.bias") if config.norm_bias else None
        return LayerNorm(name, weight, bias, config.norm_eps, config.norm_offset)

    def rotation(self, rope: Rope | None) -> Tensor | None:
        """Return the table of a layer's rotation: of its rotary embedding or of ALiBi; None without either."""
        if self.positions is None:
            self.positions = position_rotation(self.config, self.max_positions, self.weights.device)
        return self.positions if rope is None else self.table(rope)

    def table(self, rope: Rope) -> Tensor:
        """Return the rotary table of a kind, made once."""
        if rope not in self.tables:
            kinds = (False, True) if self.has_two_ropes else (False,)
            device = self.weights.device
            parts = [cos_sin_table(rope, self.max_positions, device, is_long=is_long) for is_long in kinds]
            self.tables[rope] = torch.cat(parts) if self.has_two_ropes else parts[0]
        return self.tables[rope]

    def query_scale(self, scaling: QueryScaling) -> Tensor:
        """Return the factors of queries by position, made once."""
        if scaling not in self.query_scales:
            part = query_scale_table(scaling, self.max_positions, self.weights.device)
            self.query_scales[scaling] = part.repeat(2 if self.has_two_ropes else 1)
        return self.query_scales[scaling]
