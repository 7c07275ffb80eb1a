"""``ModelConfig``: the architecture of a decoder as data, a field for every difference between model families.

One formula serves all families; a layer is

    h += residual_scale * post_norm(attention(norm(h)))         norms that ``norms`` lacks are the identity
    h += residual_scale * post_norm(mlp(norm(h)))

or, as a parallel block, ``h += attention(norm(h)) + mlp(norm(h))``, in which attention and MLP both read the old h.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from .families.mixture import ClampedGate, Mixture
from .families.norm_layout import HeadNorm, LayerNorms, QueryGating
from .families.recurrent import RecurrentLayer
from .quantization_config import Quantization

Activation = Literal["silu", "gelu_tanh", "relu2", "gelu"]
Norm = Literal["rms", "layer"]

ALIBI_DIMS = 16
"""Further dimensions of each head of a model with ALiBi: see ``engine.models.alibi``."""
MOST_ALIBI_POSITIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by ``factor`` (position interpolation, https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths are divided by ``factor``, short ones kept, the rest interpolated.

    Attributes:
        low_freq_factor: wavelengths above ``original_length / low_freq_factor`` are scaled in full.
        high_freq_factor: wavelengths below ``original_length / high_freq_factor`` are kept.
        original_length: length of the context before the extension, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): low frequencies divided by ``factor``, high ones kept.

    Attributes:
        beta_fast: frequencies with more rotations than this within ``original_length`` are kept.
        beta_slow: frequencies with fewer rotations than this are divided in full.
        original_length: length of the context before the extension, in tokens.
        attention_factor: factor of cosines and sines.
        truncate: whether the two bounds are widened to whole dimensions.
        score_factor: factor of the scores in latent attention, by "mscale_all_dim".
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_length: int
    attention_factor: float
    truncate: bool
    score_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """LongRoPE (https://arxiv.org/abs/2402.13753): one divisor per frequency, with others for long sequences.

    All tokens of a sequence are rotated alike: once a sequence has more than ``original_length`` tokens, the keys of
    its earlier tokens change, and so does all their KV.

    Attributes:
        short: divisors in sequences of at most ``original_length`` tokens.
        long: divisors in longer ones.
        attention_factor: factor of cosines and sines, for short and long sequences.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_length: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class FrequencyFactors:
    """One divisor for each of the dim / 2 frequencies, as GGUF files store Llama 3.1's scaling."""

    factors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Rotation of only the first ``pairs`` pairs of a head's dimensions, by the whole head's frequencies (Gemma 4).

    Attributes:
        factor: divisor of these frequencies.
    """

    pairs: int
    factor: float


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | FrequencyFactors | ProportionalScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding (https://arxiv.org/abs/2104.09864).

    Attributes:
        theta: base of the frequencies ``theta ** (-2 i / dim)``.
        dim: number of dimensions that are rotated, from a head's first one on.
        interleaved: whether dimension 2 i is paired with 2 i + 1, else i with i + dim / 2.
        rotates_back: whether angles are negative (nanochat).
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None
    interleaved: bool = False
    rotates_back: bool = False


@dataclass(frozen=True, slots=True)
class TokenIndex:
    """An index that chooses the tokens to which a token attends (https://arxiv.org/abs/2512.02556).

    Attributes:
        most: largest number of tokens to which a token attends: those with the highest scores of the index.
        heads: number of heads of the index.
        dim: dimensions of a head of the index, and of the index key that is cached for each token beside its latent
            vector.
        interleaved: whether the rotary embedding of the heads' first dimensions pairs neighbours.
    """

    most: int
    heads: int
    dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class BlockIndex:
    """An index that chooses the blocks of tokens to which each KV head of a token attends (MiniMax M3).

    Attributes:
        most: number of blocks that a token sees, if it has as many: those with the highest scores of the index.
        size: number of tokens of a block.
        local: number of blocks up to a token's own that it sees whatever their scores.
        dim: dimensions of a head of the index, of which there is one for each KV head, and of the index key that is
            cached for each token beside its K and V.
    """

    most: int
    size: int
    local: int
    dim: int

    @property
    def most_tokens(self) -> int:
        """Largest context in which the index chooses all tokens."""
        return self.most * self.size


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Multi-head latent attention (https://arxiv.org/abs/2405.04434).

    For each token one vector is cached for all heads: a latent vector and a rotated key. Each head's value, and the
    part of its key that is not rotated, are computed from the latent vector.

    Attributes:
        query_rank: width between the two projections of queries, None for a single projection.
        kv_rank: number of dimensions of the latent vector.
        plain_dim: number of dimensions of a query head that are not rotated.
        rotary_dim: number of dimensions of a query head that are rotated.
        value_dim: number of dimensions of a value head.
        index: the index that chooses the tokens to which a token attends, None for all tokens.
    """

    query_rank: int | None
    kv_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int
    index: TokenIndex | None = None

    @property
    def query_dim(self) -> int:
        """Number of dimensions of a query head."""
        return self.plain_dim + self.rotary_dim

    @property
    def cell_dim(self) -> int:
        """Number of dimensions that are cached for each token."""
        return self.kv_rank + self.rotary_dim


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """Queries times ``1 + beta * log(1 + floor((position + shift) / length))``: sharper attention in long contexts.

    Attributes:
        length: number of tokens; at smaller positions the factor is 1.
        shift: 1 if positions are counted from 1 (Llama 4), else 0.
    """

    beta: float
    length: int
    shift: int = 0


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """Inputs that each layer gets for each token beside the residual stream (Gemma 4).

    Attributes:
        size: number of values for a token in each layer.
        vocab_size: number of tokens that have an embedding of ``size`` values for each layer.
    """

    size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ParallelScales:
    """Factors of a layer with attention and a state space side by side (Falcon H1).

    Attributes:
        attention: factor of attention's output.
        state: factor of the state space's output.
        projected: factors of the columns of the state space's input projection: gate, x, B, C and steps.
        gate: factor of the MLP's gate.
        down: factor of the MLP's output.
    """

    attention: float
    state: float
    projected: tuple[float, ...]
    gate: float
    down: float


class KvShape(NamedTuple):
    """KV that a layer stores for each token: K and V of ``heads`` heads of ``dim`` dimensions."""

    heads: int
    dim: int


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """Attention and MLP in front of a layer's state space, with weights that several layers share (Zamba 2).

    What is added to the results of its projections by a product of two narrow matrices is the layer's own.

    Attributes:
        source: index of the first of these layers, under whose name checkpoints store the weights.
        number: position of the layer among all layers with such a block, by which its own matrices are named.
        rank: width between the narrow matrices.
        adapts_attention: whether the projections of queries, keys and values have such matrices, as gate and up do.
    """

    source: int
    number: int
    rank: int
    adapts_attention: bool


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """Parameters of one layer.

    Attributes:
        window: size of the sliding window, the token itself included; None for full attention.
        chunk: size of a chunk: a token sees only the keys of its own chunk; None for full attention.
        rope: the rotary embedding; None for a layer without positions.
        mixture: the experts that are the layer's MLP, None for an ordinary one.
        query_scaling: factor of queries by position, or None.
        recurrent: a mixer with a recurrent state, in place of attention or beside it; None if absent.
        has_attention: whether the layer has attention.
        kv_heads: number of KV heads and dimensions of all heads, if they differ from the model's; else None.
        kv_source: the earlier layer whose K and V this layer reads instead of computing its own; None for its own.
        shares_values: whether values are the keys before their norm and rotation.
        mlp_size: intermediate size of the MLP, if it differs from the model's; else None.
        num_heads: number of query heads, if it differs from the model's; else None.
        has_mlp: whether the layer has an MLP or a mixture; if not, it is a mixer alone (Nemotron-H).
        shares_index: whether the layer attends to the tokens chosen by the last earlier layer with an index (GLM-5.2).
        shared_block: attention and MLP in front of ``recurrent``, whose input is their sum with the residual stream;
            None if absent.
        norms: names of the layer's norms, if they differ from the model's; else None.
        block_index: the index that chooses the blocks of tokens to which a token attends; None for all tokens.
        mlp_clamp: the activation of the layer's ordinary MLP, if it differs from the model's; else None.
    """

    window: int | None
    rope: Rope | None
    mixture: Mixture | None = None
    query_scaling: QueryScaling | None = None
    chunk: int | None = None
    recurrent: RecurrentLayer | None = None
    kv_heads: KvShape | None = None
    kv_source: int | None = None
    shares_values: bool = False
    mlp_size: int | None = None
    num_heads: int | None = None
    has_attention: bool = True
    has_mlp: bool = True
    shares_index: bool = False
    shared_block: SharedBlock | None = None
    norms: LayerNorms | None = None
    block_index: BlockIndex | None = None
    mlp_clamp: ClampedGate | None = None


class ModelShape(Protocol):
    """The part of a model's configuration that the engine reads; ``ModelConfig`` explains each property."""

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def kv_shapes(self) -> tuple[KvShape | None, ...]: ...
    @property
    def kv_sources(self) -> tuple[int | None, ...]: ...
    @property
    def has_states(self) -> bool: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def rope_switch(self) -> int | None: ...
    @property
    def latent(self) -> LatentConfig | None: ...
    @property
    def index_keys(self) -> tuple[int | None, ...]: ...
    @property
    def has_position_keys(self) -> bool: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A supported model; made by ``engine.checkpoint.read_config.read_model_config``.

    Attributes:
        family: name of its family in ``engine.checkpoint.families``.
        num_kv_heads: number of KV heads; with ``latent`` 1, and the ``head_dim`` dimensions are the cached vector.
        max_position_embeddings: length of the longest sequence in training.
        layers: one entry for each decoder layer.
        norm: kind of the norms: RMS norms, or layer norms.
        norm_bias: whether norms have a bias (layer norms only).
        norm_offset: number that is added to the weight of every norm (Gemma stores weights less 1).
        norms: names of a layer's norms. In a parallel block ``before_mlp`` mostly equals ``before_attention``.
        parallel_block: whether attention and MLP have the same input (Cohere).
        qk_norm: kind of the norm of query and key heads, None if absent.
        head_norms: names of these norms; None for norms without weights, in layers with a rotary embedding (Llama 4).
        is_qk_normed_last: whether these norms come after the rotation (HunYuan), else before.
        qkv_modules: names of the projections of q, k and v, or of the one projection for all three (Phi-3).
        grouped_qkv: whether the one projection's rows are ordered by KV head: its queries, its key, its value (InternLM
            2).
        mlp_modules: names of the MLP's projections: gate and up, or one for both, or up alone; then down.
        mlp_block: name of the module that contains the MLP's projections.
        gated_mlp: whether the MLP is ``down(act(gate(x)) * up(x))``, else ``down(act(up(x)))``.
        qkv_bias: whether q, k and v projections have a bias; likewise ``output_bias`` and ``mlp_bias``.
        head_bias: whether the head has a bias (Phi-2).
        norm_head: whether columns of the stored head are divided by their lengths (Ling lite).
        attention_sinks: whether each head has a logit without a value that is part of the softmax (gpt-oss).
        windowed_sinks: whether only layers with a window have such logits (MiMo V2).
        attention_scale: factor of the scores ``q . k``.
        value_dim: dimensions of a value head that has fewer than ``head_dim``, for which the KV pool has room (MiMo
            V2); None for as many values without a factor. Latent attention has its own.
        value_scale: factor of the values; 1 where ``value_dim`` is None.
        alibi: exponent of the smallest slope of ALiBi, if the number of heads is a power of two; None without ALiBi.
            With it ``head_dim`` counts ``ALIBI_DIMS`` dimensions of positions.
        embedding_norm: name of the norm behind the embedding; None if absent (BLOOM and nanochat have one).
        attention_soft_cap: c of ``c * tanh(score / c)``, None for no cap.
        logit_soft_cap: the same for the logits, c of ``c * tanh(logit / c)``.
        logit_scale: factor of the logits, before the cap.
        embedding_scale: factor of the token embeddings.
        rounds_embedding_scale: whether that factor is rounded to the model's type, as in Gemma's published code: 55.5
            for 55.4256.
        residual_scale: factor of the additions to the residual stream.
        tied_head: whether the head is the embedding matrix.
        towers: modules of the checkpoint beside the language model, which are not loaded.
        bos_token_id: the begin token, None without one; the tokenizer decides whether prompts get it.
        eos_token_ids: the tokens that end an answer.
        prediction_layers: number of MTP modules: layers after the last one that predict further tokens and are not part
            of the model.
        output_module: name of attention's output projection.
        final_norm: name of the norm after the last layer.
        latent: parameters of latent attention, None for keys and values of their own.
        gated_attention: where the gate is stored whose sigmoid multiplies attention's results; None for no gate.
        softplus_gate: whether the gate's softplus multiplies them instead (Laguna).
        parallel_scales: factors of layers with attention and a state space side by side, None without such layers.
        quantization: how the stored numbers of the matrices are read, None for plain numbers.
        layer_inputs: inputs of each layer beside the residual stream, None if absent (Gemma 4).
        has_layer_scalars: whether each layer ends by multiplying the residual stream by a number of its own.
        has_v_norm: whether values have an RMS norm for each head, without a weight.
        generates: whether the checkpoint has a language head; without one ``tied_head`` has no meaning.
        num_classes: number of rows of the classification head, 0 without one.
        learned_positions: whether a trained vector of each position is added to the embeddings (GPT-2).
        transposed: whether checkpoints store the matrices of layers transposed, [in, out] (GPT-2).
        weightless_norms: whether norms, those of q and k apart, have no weights (nanochat).
        mlp_clamp: the activation of an MLP with a gate, in place of ``activation``; None for the latter.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    norm: Norm
    norm_bias: bool
    norm_eps: float
    norm_offset: float
    norms: LayerNorms
    parallel_block: bool
    qk_norm: HeadNorm | None
    head_norms: tuple[str, str] | None
    is_qk_normed_last: bool
    qkv_modules: tuple[str, ...]
    mlp_modules: tuple[str, ...]
    mlp_block: str
    gated_mlp: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    activation: Activation | Literal["xielu"]
    attention_sinks: bool
    attention_scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    logit_scale: float
    embedding_scale: float
    rounds_embedding_scale: bool
    residual_scale: float
    tied_head: bool
    towers: tuple[str, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    prediction_layers: int = 0
    output_module: str = "o_proj"
    final_norm: str = "norm"
    latent: LatentConfig | None = None
    gated_attention: QueryGating | None = None
    softplus_gate: bool = False
    parallel_scales: ParallelScales | None = None
    quantization: Quantization | None = None
    layer_inputs: PerLayerInputs | None = None
    has_layer_scalars: bool = False
    has_v_norm: bool = False
    grouped_qkv: bool = False
    head_bias: bool = False
    norm_head: bool = False
    windowed_sinks: bool = False
    value_dim: int | None = None
    value_scale: float = 1.0
    alibi: float | None = None
    embedding_norm: str | None = None
    generates: bool = True
    num_classes: int = 0
    learned_positions: bool = False
    transposed: bool = False
    weightless_norms: bool = False
    mlp_clamp: ClampedGate | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_shapes(self) -> tuple[KvShape | None, ...]:
        """KV that each layer stores for each token, None for a layer that stores nothing."""
        return tuple(self.heads_of(index) if source == index else None for index, source in enumerate(self.kv_sources))

    @property
    def kv_sources(self) -> tuple[int | None, ...]:
        """The layer whose K and V each layer reads, mostly itself; None for a layer without attention."""
        return tuple(
            None if not layer.has_attention else index if layer.kv_source is None else layer.kv_source
            for index, layer in enumerate(self.layers)
        )

    @property
    def index_keys(self) -> tuple[int | None, ...]:
        """Dimensions of the index key that each layer stores for each token, None for a layer without an index."""
        if self.latent is None:
            return tuple(None if layer.block_index is None else layer.block_index.dim for layer in self.layers)
        index = self.latent.index
        return tuple(None if index is None or layer.shares_index else index.dim for layer in self.layers)

    @property
    def block_index(self) -> BlockIndex | None:
        """The index of blocks that layers have, all of the same sizes; None in a model without."""
        return next((layer.block_index for layer in self.layers if layer.block_index is not None), None)

    @property
    def shares_index(self) -> bool:
        """Whether any layer attends to tokens that an index of an earlier layer has chosen."""
        return any(layer.shares_index for layer in self.layers)

    @property
    def shares_blocks(self) -> bool:
        """Whether any layer has attention and an MLP whose weights other layers have too."""
        return any(layer.shared_block is not None for layer in self.layers)

    def up_to(self, length: int) -> ModelConfig:
        """Return the model for at most ``length`` tokens, without an index if it would choose all of them."""
        if (blocks := self.block_index) is not None:
            layers = tuple(replace(layer, block_index=None) for layer in self.layers)
            return self if length > blocks.most_tokens else replace(self, layers=layers)
        if self.latent is None or self.latent.index is None or length > self.latent.index.most:
            return self
        layers = tuple(replace(layer, shares_index=False) for layer in self.layers)
        return replace(self, latent=replace(self.latent, index=None), layers=layers)

    def heads_of(self, index: int) -> KvShape:
        """Return the number of a layer's KV heads, and the dimensions of its heads."""
        return self.layers[index].kv_heads or KvShape(self.num_kv_heads, self.head_dim)

    def num_heads_of(self, index: int) -> int:
        """Return the number of a layer's query heads."""
        return self.layers[index].num_heads or self.num_heads

    def has_sinks(self, index: int) -> bool:
        """Return whether the heads of a layer's attention have sinks."""
        return self.attention_sinks and (not self.windowed_sinks or self.layers[index].window is not None)

    def value_size_of(self, index: int) -> int:
        """Return the number of rows of a layer's value projection."""
        heads = self.heads_of(index)
        return heads.heads * (heads.dim if self.value_dim is None else self.value_dim)

    def key_dim_of(self, index: int) -> int:
        """Return the rows that a layer's projections have for a query head, and for a key head."""
        return self.heads_of(index).dim - (ALIBI_DIMS if self.has_position_keys else 0)

    @property
    def has_position_keys(self) -> bool:
        """Whether cached keys contain their positions as numbers, which 8 bits would round (ALiBi)."""
        return self.alibi is not None

    def norms_of(self, index: int) -> LayerNorms:
        """Return the names of a layer's norms."""
        return self.layers[index].norms or self.norms

    @property
    def attends(self) -> tuple[bool, ...]:
        """Whether each layer has attention, layer by layer."""
        return tuple(layer.has_attention for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Whether any layer has a recurrent state."""
        return any(layer.recurrent is not None for layer in self.layers)

    @property
    def rope_switch(self) -> int | None:
        """The length beyond which a sequence needs another rotary embedding (LongRoPE); None for never."""
        scalings = (layer.rope.scaling for layer in self.layers if layer.rope is not None)
        return next((each.original_length for each in scalings if isinstance(each, LongRopeScaling)), None)

    @property
    def query_size(self) -> int:
        """Number of rows of the query projection, with the rows of the gate in it."""
        dim = self.head_dim - (ALIBI_DIMS if self.has_position_keys else 0)
        return self.num_heads * dim * (2 if self.gated_attention == "heads" else 1)

    def query_size_of(self, index: int) -> int:
        """Return the number of rows of a layer's query projection."""
        return self.num_heads_of(index) * self.key_dim_of(index) * (2 if self.gated_attention == "heads" else 1)

    def attention_size_of(self, index: int) -> int:
        """Return the number of inputs of the output projection of a layer's attention."""
        own = self.value_dim if self.latent is None else self.latent.value_dim
        return self.num_heads_of(index) * (self.heads_of(index).dim if own is None else own)

    def mlp_size_of(self, index: int) -> int:
        """Return the intermediate size of a layer's MLP."""
        return self.layers[index].mlp_size or self.intermediate_size

    @property
    def kv_size(self) -> int:
        """Number of rows of the key projection, and of the value projection."""
        return self.num_kv_heads * self.head_dim
