"""Names and shapes of a model's tensors, in Hugging Face checkpoints and GGUF files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

from ..checkpoint.families.family_table import BY_NAME
from ..checkpoint.families.mixture import Mixture
from ..checkpoint.families.norm_layout import HeadNorm, LayerNorms
from ..checkpoint.families.recurrent import DeltaLayer, KimiDeltaLayer, MambaLayer, RecurrentLayer, ShortConvLayer
from ..checkpoint.model_config import LatentConfig, ModelConfig, PerLayerInputs
from ..errors import ModelError, shortened

Shape = tuple[int, ...]

EMBEDDING = "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"
SCORE = "score.weight"  # Weight of a classification head.
SINKS = "sinks"
GATE = "gate_proj"  # Module that gates attention's results.
FUSED_GATE_UP = "gate_up_proj"
CORRECTION = "e_score_correction_bias"  # Bias of a router.

# Tensors of the embedding that each layer of Gemma 4 adds for a token, and the factor behind the layer.
LAYER_EMBEDDING, LAYER_PROJECTION = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection"
LAYER_PROJECTION_NORM, LAYER_SCALAR = "model.per_layer_projection_norm.weight", "layer_scalar"
LAYER_GATE, LAYER_OUTPUT = "per_layer_input_gate", "per_layer_projection"
LAYER_NORM = "post_per_layer_input_norm"

# Tensors of layers that add a mixture of experts to an MLP.
BEHIND_MLP, BEHIND_EXPERTS = "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"
BEFORE_EXPERTS = "pre_feedforward_layernorm_2"
ROUTER_SCALE, EXPERT_SCALES = "router.scale", "router.per_expert_scale"

# Norms and the projection of a block that several layers share, in front of a state space (Zamba 2).
SHARED_NORM, SHARED_MLP_NORM, SHARED_LINEAR = "shared_layernorm", "pre_ff_layernorm", "linear"
_SHARED = re.compile(rf"model\.layers\.(\d+)\.((?:self_attn|mlp)\..+|{SHARED_NORM}\..+|{SHARED_MLP_NORM}\..+)")

# Tensors of Mamba.
SELECTION, STEPS = "x_proj", "dt_proj"
SELECTION_NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")

# Tensors of Kimi Linear's delta attention.
DELTA_QUERIES, DELTA_NARROW = ("q_proj", "k_proj", "v_proj"), ("b_proj", "f_a_proj", "g_a_proj")
FORGET, OUTPUT_GATE, DELTA_NORM = "f_b_proj", "g_b_proj", "o_norm"
DELTA_WIDE = ("b_proj", "f_proj", GATE)  # in place of ``DELTA_NARROW`` in Ling 3, which has no ``FORGET``
SEPARATE_GATE, SEPARATE_RATES = "g_proj", ("b_proj", "a_proj")  # beside ``DELTA_QUERIES`` in OLMo Hybrid
DELTA_CONVS = ("q_conv1d", "k_conv1d", "v_conv1d")

XIELU, XIELU_CONSTANTS = ("act_fn.alpha_p", "act_fn.alpha_n"), ("act_fn.beta", "act_fn.eps")
"""Parameters of an MLP's xIELU activation: trained numbers whose softplus gives its factors, and constants."""

INDEXER = "indexer"
"""Module that chooses the tokens in a layer of indexed attention. It is left out of a model whose longest sequence is
so short that all tokens would be chosen."""
INDEX_QUERY, INDEX_KEY, INDEX_NORM, INDEX_WEIGHTS = "wq_b", "wk", "k_norm", "weights_proj"
BLOCK_QUERY, BLOCK_KEY, BLOCK_NORMS = "q_proj", "k_proj", ("q_norm", "k_norm")  # Modules of an index of blocks.

# Tensors of latent attention.
QUERY, QUERY_DOWN, QUERY_NORM, QUERY_UP = "q_proj", "q_a_proj", "q_a_layernorm", "q_b_proj"
KV_DOWN, KV_NORM, KV_UP = "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"

KV_SCALES = (".k_scale", ".v_scale")
"""Ends of the names of tensors with scales of cached keys and values."""
_CACHE_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "prob_scale"})
# Old checkpoints store the rotary frequencies and causal masks, which follow from the config.
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.(?:rotary_emb\.inv_freq|bias|masked_bias)")


def stored_names(config: ModelConfig) -> tuple[tuple[str, str], ...]:
    """Return parts of names in the family's checkpoints and adapters, each with its usual name."""
    return BY_NAME[config.family].tensor_names


def qkv_modules(config: ModelConfig, index: int) -> dict[str, int]:
    """Return the number of rows of each of a layer's modules for q, k and v, by module name, in this order.

    A layer that reads the K and V of another layer has only q. A layer that uses its keys as values has only q and k.
    """
    layer, heads = config.layers[index], config.heads_of(index)
    q, kv = config.query_size_of(index), heads.heads * config.key_dim_of(index)
    if len(config.qkv_modules) == 1:
        return {config.qkv_modules[0]: q + 2 * kv}
    count = 1 if layer.kv_source is not None else 2 if layer.shares_values else 3
    return dict(zip(config.qkv_modules[:count], (q, kv, config.value_size_of(index))[:count], strict=True))


def shared_name(name: str, config: ModelConfig) -> str:
    """Return the name under which checkpoints store a layer's tensor: that of the first layer which shares it."""
    match = _SHARED.fullmatch(name) if config.shares_blocks else None
    block = None if match is None else config.layers[int(match[1])].shared_block
    return name if match is None or block is None else f"model.layers.{block.source}.{match[2]}"


def own_modules(config: ModelConfig, index: int) -> dict[str, str]:
    """Return a layer's own modules that add to the results of a shared block's modules (Zamba 2), by the shared module.

    Each name stands for two modules, with ``.0`` and ``.1`` after the name, which are like A and B of a LoRA: 0 reduces
    the inputs to a few numbers, from which 1 computes what is added.
    """
    block = config.layers[index].shared_block
    if block is None:
        return {}
    adapted = list(zip("qkv", config.qkv_modules, strict=True)) if block.adapts_attention else []
    names = {f"self_attn.{module}": f"self_attn.linear_{part}_adapter_list.{block.number}" for part, module in adapted}
    up = config.mlp_modules[0]
    return names | {f"{config.mlp_block}.{up}": f"{config.mlp_block}.{up}_adapter_list.{block.number}"}


def gate_module(config: ModelConfig, index: int) -> dict[str, int]:
    """Return the separate module for the gate of a layer's attention, if there is one, and its number of rows."""
    heads = {"module": config.query_size_of(index), "head_module": config.num_heads_of(index)}
    rows = heads.get(config.gated_attention or "")
    return {} if rows is None else {GATE: rows}


def up_modules(config: ModelConfig, index: int) -> dict[str, int]:
    """Return the modules of a layer's MLP's gate and up, in this order, or of up alone, and the rows of each."""
    names = config.mlp_modules[:-1]
    rows = config.mlp_size_of(index) * (2 if config.gated_mlp else 1)
    return dict.fromkeys(names, rows // len(names))


def down_module(config: ModelConfig) -> dict[str, int]:
    """Return the module of the MLP's down and its rows."""
    return {config.mlp_modules[-1]: config.hidden_size}


def head_norm_shapes(config: ModelConfig, index: int) -> dict[str, Shape]:
    """Return the names of the norms of a layer's query and key heads, if there are any, and their shapes."""
    if config.qk_norm is None or config.head_norms is None:
        return {}
    own = config.heads_of(index)
    heads = (config.num_heads_of(index), own.heads)
    shapes: dict[HeadNorm, tuple[Shape, ...]] = {
        "head": ((own.dim,),) * 2,
        "projection": tuple((count * own.dim,) for count in heads),
        "centred": tuple((count, own.dim) for count in heads),
        "biased": ((own.dim,),) * 2,
    }
    found = dict(zip(config.head_norms, shapes[config.qk_norm], strict=True))
    if config.layers[index].kv_source is not None:
        del found[config.head_norms[1]]
    return found


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the names and shapes of all tensors that a checkpoint of this model must have."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {EMBEDDING: (config.vocab_size, hidden), **_norm(final_norm(config), config)}
    if config.learned_positions:
        shapes[POSITIONS] = (config.max_position_embeddings, hidden)
    if config.embedding_norm is not None:
        shapes |= _norm(f"model.{config.embedding_norm}", config)
    if not config.tied_head:
        shapes[HEAD] = (config.vocab_size, hidden)
    if config.head_bias:
        shapes[HEAD_BIAS] = (config.vocab_size,)
    if config.num_classes:
        shapes[SCORE] = (config.num_classes, hidden)
    if config.layer_inputs is not None:
        shapes |= _layer_inputs(config, config.layer_inputs)
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        for name in filter(None, config.norms_of(index)):
            shapes |= _norm(f"{prefix}.{name}", config)
        if config.has_layer_scalars:
            shapes[f"{prefix}.{LAYER_SCALAR}"] = (1,)
        if config.layers[index].shared_block is not None:
            shapes |= _shared_block(config, index)
        elif config.layers[index].has_attention:
            shapes |= _attention(f"{prefix}.self_attn", config, index)
        if (recurrent := config.layers[index].recurrent) is not None:
            shapes |= _recurrent(f"{prefix}.{recurrent_block(recurrent)}", recurrent, hidden)
        if not config.layers[index].has_mlp:
            continue
        if (mixture := config.layers[index].mixture) is not None:
            shapes |= mixture_shapes(f"{prefix}.{mixture.names.block}", mixture, hidden)
            if not mixture.is_beside_mlp:
                continue
            shapes |= _norm(f"{prefix}.{BEHIND_MLP}", config) | _norm(f"{prefix}.{BEHIND_EXPERTS}", config)
            shapes |= _norm(f"{prefix}.{BEFORE_EXPERTS}", config)
        block = f"{prefix}.{config.mlp_block}"
        shapes |= _linears(block, up_modules(config, index), hidden, config.mlp_bias)
        shapes |= _linears(block, down_module(config), config.mlp_size_of(index), config.mlp_bias)
        if config.activation == "xielu":
            shapes |= {f"{block}.{name}": (1,) for name in XIELU} | {f"{block}.{name}": () for name in XIELU_CONSTANTS}
    return shapes


def _shared_block(config: ModelConfig, index: int) -> dict[str, Shape]:
    """The tensors of attention and MLP in front of a layer's state space, by the names under which they are stored."""
    prefix, hidden, block = f"model.layers.{index}", config.hidden_size, config.layers[index].shared_block
    assert block is not None
    attention, mlp = qkv_modules(config, index), up_modules(config, index)
    shapes = _linears(f"{prefix}.self_attn", attention, 2 * hidden, bias=False)
    shapes |= _linears(f"{prefix}.self_attn", output_modules(config), config.attention_size_of(index), bias=False)
    shapes |= _linears(f"{prefix}.{config.mlp_block}", mlp, hidden, bias=False)
    shapes |= _linears(f"{prefix}.{config.mlp_block}", down_module(config), config.intermediate_size, bias=False)
    shapes |= {f"{prefix}.{SHARED_NORM}.weight": (2 * hidden,), f"{prefix}.{SHARED_MLP_NORM}.weight": (hidden,)}
    for shared, own in own_modules(config, index).items():
        owner, _, module = shared.partition(".")
        rows, width = (attention[module], 2 * hidden) if owner == "self_attn" else (mlp[module], hidden)
        shapes |= _linears(f"{prefix}.{own}", {"0": block.rank}, width, bias=False)
        shapes |= _linears(f"{prefix}.{own}", {"1": rows}, block.rank, bias=False)
    shapes = {shared_name(name, config): shape for name, shape in shapes.items()}
    return shapes | _linears(prefix, {SHARED_LINEAR: hidden}, hidden, bias=False)


def _layer_inputs(config: ModelConfig, sizes: PerLayerInputs) -> dict[str, Shape]:
    """Return the tensors that compute the layers' further inputs for each token, with their shapes."""
    hidden, size, width = config.hidden_size, sizes.size, sizes.size * config.num_layers
    shapes: dict[str, Shape] = {
        LAYER_EMBEDDING: (sizes.vocab_size, width),
        f"{LAYER_PROJECTION}.weight": (width, hidden),
        LAYER_PROJECTION_NORM: (size,),
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        shapes |= _linears(prefix, {LAYER_GATE: size}, hidden, bias=False)
        shapes |= _linears(prefix, {LAYER_OUTPUT: hidden}, size, bias=False)
        shapes[f"{prefix}.{LAYER_NORM}.weight"] = (hidden,)
    return shapes


def latent_shapes(prefix: str, config: ModelConfig, latent: LatentConfig) -> dict[str, Shape]:
    """Return the names and shapes of latent attention's tensors in one layer, but for the output projection."""
    hidden, rank, biased = config.hidden_size, latent.query_rank, config.qkv_bias
    queries = config.num_heads * latent.query_dim
    if rank is None:
        shapes = _linears(prefix, {QUERY: queries}, hidden, bias=False)
    else:
        shapes = _linears(prefix, {QUERY_DOWN: rank}, hidden, biased) | {f"{prefix}.{QUERY_NORM}.weight": (rank,)}
        shapes |= _linears(prefix, {QUERY_UP: queries}, rank, bias=False)
    shapes |= _linears(prefix, {KV_DOWN: latent.cell_dim}, hidden, biased)
    shapes[f"{prefix}.{KV_NORM}.weight"] = (latent.kv_rank,)
    rows = config.num_heads * (latent.plain_dim + latent.value_dim)
    return shapes | _linears(prefix, {KV_UP: rows}, latent.kv_rank, bias=False)


def index_shapes(prefix: str, config: ModelConfig, latent: LatentConfig) -> dict[str, Shape]:
    """Return the names and shapes of the tensors of a layer's index; none in a model without."""
    if (index := latent.index) is None or latent.query_rank is None:
        return {}
    own = f"{prefix}.{INDEXER}"
    shapes = _linears(own, {INDEX_QUERY: index.heads * index.dim}, latent.query_rank, bias=False)
    shapes |= _linears(own, {INDEX_KEY: index.dim, INDEX_WEIGHTS: index.heads}, config.hidden_size, bias=False)
    norm: dict[str, Shape] = {f"{own}.{INDEX_NORM}.{name}": (index.dim,) for name in ("weight", "bias")}
    return shapes | norm


def _block_index(prefix: str, config: ModelConfig, index: int) -> dict[str, Shape]:
    """The tensors of a layer's index of blocks; none in a layer without."""
    if (blocks := config.layers[index].block_index) is None:
        return {}
    own, heads = f"{prefix}.{INDEXER}", config.heads_of(index).heads
    shapes = _linears(own, {BLOCK_QUERY: heads * blocks.dim, BLOCK_KEY: blocks.dim}, config.hidden_size, bias=False)
    return shapes | {f"{own}.{name}.weight": (blocks.dim,) for name in BLOCK_NORMS}


def norm_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the names of all norms, norms of query and key heads included, and the shapes of their weights."""
    if config.weightless_norms:
        return {}
    layers = range(config.num_layers)
    of_layers = [f"model.layers.{index}.{name}" for index in layers for name in filter(None, config.norms_of(index))]
    first = [] if config.embedding_norm is None else [f"model.{config.embedding_norm}"]
    shapes: dict[str, Shape] = dict.fromkeys([*first, final_norm(config), *of_layers], (config.hidden_size,))
    for index in (index for index in layers if config.attends[index]):
        heads = head_norm_shapes(config, index)
        shapes |= {f"model.layers.{index}.self_attn.{name}": shape for name, shape in heads.items()}
        if config.layers[index].shared_block is not None:
            shapes[f"model.layers.{index}.{SHARED_NORM}"] = (2 * config.hidden_size,)
            shapes[f"model.layers.{index}.{SHARED_MLP_NORM}"] = (config.hidden_size,)
    return shapes


def final_norm(config: ModelConfig) -> str:
    """Return the name of the norm after the last layer."""
    return f"model.{config.final_norm}"


def _attention(prefix: str, config: ModelConfig, index: int) -> dict[str, Shape]:
    """The tensors of a layer's attention."""
    norms = head_norm_shapes(config, index)
    kinds = ("weight", "bias") if config.qk_norm == "biased" else ("weight",)
    shapes: dict[str, Shape] = {f"{prefix}.{name}.{kind}": norms[name] for name in norms for kind in kinds}
    if config.has_sinks(index):
        shapes[f"{prefix}.{SINKS}"] = (config.num_heads_of(index),)
    if config.latent is None:
        shapes |= _linears(prefix, qkv_modules(config, index), config.hidden_size, config.qkv_bias)
        shapes |= _block_index(prefix, config, index)
    else:
        shapes |= latent_shapes(prefix, config, config.latent)
        shapes |= {} if config.layers[index].shares_index else index_shapes(prefix, config, config.latent)
    shapes |= _linears(prefix, gate_module(config, index), config.hidden_size, bias=False)
    return shapes | _linears(prefix, output_modules(config), config.attention_size_of(index), config.output_bias)


def output_modules(config: ModelConfig) -> dict[str, int]:
    """Return the module of attention's output and its rows."""
    return {config.output_module: config.hidden_size}


def recurrent_block(layer: RecurrentLayer) -> str:
    """Return the module that a layer has instead of attention."""
    if isinstance(layer, DeltaLayer):
        return "linear_attn"
    if isinstance(layer, KimiDeltaLayer):
        return "self_attn"
    return "conv" if isinstance(layer, ShortConvLayer) else "mamba"


def recurrent_inputs(layer: RecurrentLayer, hidden: int) -> dict[str, int]:
    """Return the modules of its projection of hidden states, side by side, and the rows of each."""
    if isinstance(layer, ShortConvLayer):
        return {"in_proj": 3 * hidden}
    if isinstance(layer, MambaLayer):
        return {"in_proj": 2 * layer.width}
    if isinstance(layer, KimiDeltaLayer):
        names, width = (DELTA_NARROW, layer.head_dim) if layer.narrow else (DELTA_WIDE, layer.width)
        others = dict(zip(names, (layer.num_heads, width, width), strict=True))
        return dict.fromkeys(DELTA_QUERIES, layer.width) | others
    if not isinstance(layer, DeltaLayer):
        return {"in_proj": layer.width + layer.conv_width + layer.num_heads}
    if layer.separate:
        wide = dict(zip(DELTA_QUERIES, (layer.key_width, layer.key_width, layer.width), strict=True))
        return {**wide, SEPARATE_GATE: layer.width, **dict.fromkeys(SEPARATE_RATES, layer.num_heads)}
    if layer.grouped:
        return {"in_proj_qkvz": layer.conv_width + layer.width, "in_proj_ba": 2 * layer.num_heads}
    rows = (layer.conv_width, layer.width, layer.num_heads, layer.num_heads)
    return dict(zip(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), rows, strict=True))


def recurrent_output(layer: RecurrentLayer, hidden: int) -> tuple[str, int]:
    """Return the module of its projection to hidden states, and its columns."""
    if isinstance(layer, KimiDeltaLayer) or (isinstance(layer, DeltaLayer) and layer.separate):
        return "o_proj", layer.width
    return "out_proj", hidden if isinstance(layer, ShortConvLayer) else layer.width


def recurrent_norm(layer: RecurrentLayer) -> str:
    """Return the name of the norm of its results."""
    return DELTA_NORM if isinstance(layer, DeltaLayer) and layer.separate else "norm"


def recurrent_bias(layer: RecurrentLayer) -> bool:
    """Return whether its projections have biases."""
    return not isinstance(layer, DeltaLayer | KimiDeltaLayer) and layer.biased


def _recurrent(prefix: str, layer: RecurrentLayer, hidden: int) -> dict[str, Shape]:
    """Return the tensors of a layer's mixer in place of attention."""
    biased = recurrent_bias(layer)
    output, columns = recurrent_output(layer, hidden)
    shapes = _linears(prefix, recurrent_inputs(layer, hidden), hidden, biased)
    shapes |= _linears(prefix, {output: hidden}, columns, biased)
    if isinstance(layer, ShortConvLayer):
        return shapes | _conv(f"{prefix}.conv", hidden, layer.taps, layer.biased)
    if isinstance(layer, MambaLayer):
        return shapes | _selection(prefix, layer)
    if isinstance(layer, KimiDeltaLayer):
        return shapes | _kimi_delta(prefix, layer)
    is_delta = isinstance(layer, DeltaLayer)
    shapes |= {f"{prefix}.{name}": (layer.num_heads,) for name in ("A_log", "dt_bias", *(() if is_delta else ("D",)))}
    if isinstance(layer, DeltaLayer) or layer.normed:
        shapes[f"{prefix}.{recurrent_norm(layer)}.weight"] = (layer.head_dim if is_delta else layer.width,)
    conv_biased = not isinstance(layer, DeltaLayer) and layer.conv_biased
    return shapes | _conv(f"{prefix}.conv1d", layer.conv_width, layer.taps, conv_biased)


def _kimi_delta(prefix: str, layer: KimiDeltaLayer) -> dict[str, Shape]:
    """The tensors of Kimi Linear's convolutions, gates and norm."""
    shapes: dict[str, Shape] = {
        f"{prefix}.A_log": (1, 1, layer.num_heads, 1) if layer.narrow else (layer.num_heads,),
        f"{prefix}.dt_bias": (layer.width,),
        f"{prefix}.{DELTA_NORM}.weight": (layer.head_dim,),
    }
    if layer.narrow:
        shapes |= _linears(prefix, dict.fromkeys((FORGET, OUTPUT_GATE), layer.width), layer.head_dim, bias=False)
    for name in DELTA_CONVS:
        shapes |= _conv(f"{prefix}.{name}", layer.width, layer.taps, biased=False)
    return shapes


def _selection(prefix: str, layer: MambaLayer) -> dict[str, Shape]:
    """The tensors of Mamba's convolution, and of what makes steps, B and C of its results."""
    shapes: dict[str, Shape] = {
        f"{prefix}.A_log": (layer.width, layer.state_size),
        f"{prefix}.D": (layer.width,),
        f"{prefix}.{SELECTION}.weight": (layer.step_rank + 2 * layer.state_size, layer.width),
        f"{prefix}.{STEPS}.weight": (layer.width, layer.step_rank),
        f"{prefix}.{STEPS}.bias": (layer.width,),
    }
    if layer.norms == "weighted":
        sizes = (layer.step_rank, layer.state_size, layer.state_size)
        shapes |= {f"{prefix}.{name}.weight": (size,) for name, size in zip(SELECTION_NORMS, sizes, strict=True)}
    return shapes | _conv(f"{prefix}.conv1d", layer.width, layer.taps, layer.conv_biased)


def _conv(name: str, width: int, taps: int, biased: bool) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (width, 1, taps)}
    return weight | {f"{name}.bias": (width,)} if biased else weight


def _norm(name: str, config: ModelConfig) -> dict[str, Shape]:
    kinds = () if config.weightless_norms else ("weight", "bias") if config.norm_bias else ("weight",)
    return {f"{name}.{kind}": (config.hidden_size,) for kind in kinds}


def mixture_shapes(prefix: str, mixture: Mixture, hidden: int) -> dict[str, Shape]:
    """Return the names and shapes of the tensors of one layer's mixture of experts."""
    names, count, size = mixture.names, mixture.num_experts, mixture.size
    shapes = _linears(prefix, {names.router: count}, hidden, mixture.biased)
    if mixture.is_beside_mlp:
        shapes |= {f"{prefix}.{ROUTER_SCALE}": (hidden,), f"{prefix}.{EXPERT_SCALES}": (count,)}
    if mixture.corrected:
        shapes[f"{prefix}.{names.correction_name}"] = (1, count) if names.correction_is_row else (count,)
    width = mixture.latent_size or hidden
    if mixture.latent_size:
        before, behind = names.latent
        shapes |= _linears(prefix, {before: width}, hidden, bias=False)
        shapes |= _linears(prefix, {behind: hidden}, width, bias=False)
    match "modules" if names.is_split else names.storage:
        case "modules":
            for expert in range(count):
                *inputs, down = expert_modules(prefix, mixture, expert)
                for module, shape in {**dict.fromkeys(inputs, (size, width)), down: (width, size)}.items():
                    shapes[f"{module}.weight"] = shape
                    if mixture.biased:
                        shapes[f"{module}.bias"] = shape[:1]
        case "stacked":
            shapes[f"{prefix}.{names.gate}.weight"] = (count, 2 * size, hidden)
            shapes[f"{prefix}.{names.down}.weight"] = (count, hidden, size)
        case "interleaved":
            shapes[f"{prefix}.{names.gate}"] = (count, hidden, 2 * size)
            shapes[f"{prefix}.{names.gate}_bias"] = (count, 2 * size)
            shapes[f"{prefix}.{names.down}"] = (count, size, hidden)
            shapes[f"{prefix}.{names.down}_bias"] = (count, hidden)
        case "transposed":
            shapes[f"{prefix}.{names.gate}"] = (count, hidden, 2 * size)
            shapes[f"{prefix}.{names.down}"] = (count, size, hidden)
    if mixture.shared_size:
        inner = shared_block(prefix, mixture)
        shapes |= _linears(inner, shared_modules(mixture), hidden, bias=False)
        shapes |= _linears(inner, {names.shared_modules[-1]: hidden}, mixture.shared_size, bias=False)
    if mixture.gated_sharing:
        shapes[f"{prefix}.{names.shared}_gate.weight"] = (1, hidden)
    return shapes


def expert_modules(prefix: str, mixture: Mixture, expert: int) -> tuple[str, ...]:
    """Return the names of an expert's gate, if it has one, of its up and its down, also for tensors of all experts."""
    names = mixture.names
    stored = (names.gate, names.up, names.down)
    gate, up, down = stored if names.storage == "modules" else ("gate_proj", "up_proj", "down_proj")
    inner = f"{prefix}.experts.{expert}"
    return tuple(f"{inner}.{module}" for module in ((gate, up, down) if mixture.gated else (up, down)))


def stacked_experts(config: ModelConfig) -> dict[str, list[tuple[str, ...]]]:
    """Return the modules of each expert, by the name of the stacked tensor in which transformers 5 stores all experts.

    Some models are published with stacked tensors although their family has separate matrices for each expert (Qwen
    3.5).
    """
    found: dict[str, list[tuple[str, ...]]] = {}
    for index, layer in enumerate(config.layers):
        mixture = layer.mixture
        if mixture is None or mixture.names.storage != "modules":
            continue
        prefix = f"model.layers.{index}.{mixture.names.block}"
        modules = [expert_modules(prefix, mixture, expert) for expert in range(mixture.num_experts)]
        found[f"{prefix}.experts.{'gate_up_proj' if mixture.gated else 'up_proj'}"] = [each[:-1] for each in modules]
        found[f"{prefix}.experts.down_proj"] = [each[-1:] for each in modules]
        if mixture.gated:  # gate and up apart (Step 3.5)
            found[f"{prefix}.experts.gate_proj"] = [each[:1] for each in modules]
            found[f"{prefix}.experts.up_proj"] = [each[1:2] for each in modules]
    return found


def transposed_tensors(config: ModelConfig) -> Iterator[str]:
    """Yield the matrices that checkpoints of this model store transposed, [in, out] (GPT-2)."""
    for index in range(config.num_layers if config.transposed else 0):
        names = (*qkv_modules(config, index), *output_modules(config))
        yield from (f"model.layers.{index}.self_attn.{name}.weight" for name in names)
        names = (*up_modules(config, index), *down_module(config))
        yield from (f"model.layers.{index}.{config.mlp_block}.{name}.weight" for name in names)


def fused_modules(config: ModelConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the modules in which transformers computes several of the checkpoint's at once, with these, in order.

    It trains adapters on them, and writes them in files of MiniMax M3's language model alone.
    """
    if config.mlp_clamp is None:
        return
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}"
        blocks = {f"{prefix}.{config.mlp_block}": tuple(up_modules(config, index))}
        if layer.mixture is not None:
            blocks = {shared_block(f"{prefix}.{layer.mixture.names.block}", layer.mixture): ("gate_proj", "up_proj")}
        for block, names in blocks.items():
            yield f"{block}.{FUSED_GATE_UP}", tuple(f"{block}.{name}" for name in names)


def joined_tensors(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the tensors in which some checkpoints store the rows of a tensor, by the name of the whole.

    OLMo Hybrid is published with a convolution of q, of k and of v; transformers computes them as one, and writes it in
    three parts of about the same size. StableLM 2 has a norm for each head.
    """
    found: dict[str, tuple[str, ...]] = {}
    for index, layer in enumerate(config.layers):
        if layer.has_attention and config.qk_norm == "centred":
            for name, (heads, *_) in head_norm_shapes(config, index).items():
                norm = f"model.layers.{index}.self_attn.{name}"
                found[f"{norm}.weight"] = tuple(f"{norm}.norms.{head}.weight" for head in range(heads))
        if isinstance(layer.recurrent, DeltaLayer) and layer.recurrent.separate:
            block = f"model.layers.{index}.{recurrent_block(layer.recurrent)}"
            found[f"{block}.conv1d.weight"] = tuple(f"{block}.{name}.weight" for name in DELTA_CONVS)
    return found


def shared_modules(mixture: Mixture) -> dict[str, int]:
    """Return the modules of the shared expert's gate and up, in this order, or of up alone, and the rows of each."""
    names = mixture.names.shared_modules[:-1]
    return dict.fromkeys(names, (2 if mixture.gated else 1) * mixture.shared_size // len(names))


def shared_block(prefix: str, mixture: Mixture) -> str:
    """Return the module of the shared expert of the mixture with this prefix."""
    owner = prefix.rpartition(".")[0] if mixture.names.shared_in_layer else prefix
    return f"{owner}.{mixture.names.shared}"


def _linears(prefix: str, modules: dict[str, int], in_features: int, bias: bool) -> dict[str, Shape]:
    weights: dict[str, Shape] = {f"{prefix}.{name}.weight": (rows, in_features) for name, rows in modules.items()}
    biases: dict[str, Shape] = {f"{prefix}.{name}.bias": (rows,) for name, rows in modules.items()}
    return weights | biases if bias else weights


def unused_modules(config: ModelConfig) -> tuple[str, ...]:
    """Return the modules of a checkpoint in which an adapter's part changes no text, see ``in_tower``."""
    if _lacks_index(config):
        return (*config.towers, f"self_attn.{INDEXER}")
    return (*config.towers, *_modules_of_others(config)) if config.shares_blocks else config.towers


def _modules_of_others(config: ModelConfig) -> Iterator[str]:
    """Yield, for each layer with a shared block, the names of the other layers' ``own_modules`` beneath this layer.

    Checkpoints and adapters store a shared block beneath each of its layers, with the own modules of all of them. A
    layer uses only its own.
    """
    blocks = {index: layer.shared_block for index, layer in enumerate(config.layers) if layer.shared_block is not None}
    for index, block in blocks.items():
        for other, theirs in blocks.items():
            if other != index and theirs.source == block.source:
                own = (each.replace("mlp.", "feed_forward.", 1) for each in own_modules(config, other).values())
                yield from (f"layers.{index}.shared_transformer.{module}" for module in own)


def _lacks_index(config: ModelConfig) -> bool:
    """Whether a family's index is left out of a model, see ``ModelConfig.up_to``."""
    if BY_NAME[config.family].block_index:
        return config.block_index is None
    return BY_NAME[config.family].indexed and (config.latent is None or config.latent.index is None)


def ignored_tensors(names: Iterable[str], config: ModelConfig) -> frozenset[str]:
    """Return the tensors of modules that this family's checkpoints have beside the model."""
    ignored = BY_NAME[config.family].ignored
    found = frozenset(name for name in names if name.removeprefix("model.").startswith(ignored))
    if _lacks_index(config):
        found |= {name for name in names if f".{INDEXER}." in name}
    if config.shares_blocks:
        found |= {name for name in names if shared_name(name, config) != name}
    return found | _unused_keys(config) | _unused_norms(config)


def _unused_norms(config: ModelConfig) -> frozenset[str]:
    """Return the norms that published files contain for layers without a mixture, although only mixtures have them."""
    names = BY_NAME[config.family].mixture_norms or ()
    layers = [index for index, layer in enumerate(config.layers) if layer.mixture is None]
    return frozenset(f"model.layers.{index}.{name}.weight" for index in layers for name in names)


def zero_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Return the tensors that are zeros if a checkpoint lacks them, with their shapes (A.X K1)."""
    family = BY_NAME[config.family].mixture
    if family is None or not family.may_lack_correction:
        return {}
    found = ((f"model.layers.{index}", layer.mixture) for index, layer in enumerate(config.layers))
    return {
        f"{prefix}.{mixture.names.block}.{mixture.names.correction_name}": (mixture.num_experts,)
        for prefix, mixture in found
        if mixture is not None
    }


def _unused_keys(config: ModelConfig) -> frozenset[str]:
    """Return the tensors of K and V that published files contain for layers that read another layer's K and V."""
    layers = [index for index, layer in enumerate(config.layers) if layer.kv_source is not None]
    names = (*config.qkv_modules[1:], *(config.head_norms or ())[1:], "v_norm")
    return frozenset(f"model.layers.{index}.self_attn.{name}.weight" for index in layers for name in names)


def prediction_tensors(names: Iterable[str], config: ModelConfig) -> frozenset[str]:
    """Return the tensors of layers that predict further tokens, which are not part of the model: see ``load_mtp``."""
    if (module := BY_NAME[config.family].prediction) is None:
        return frozenset()
    first, count = config.num_layers, config.prediction_layers
    stored = [f"{module.prefix(index, first)}." for index in range(count)]
    in_gguf = [f"blk.{first + index}." for index in range(count)]
    return frozenset(name for name in names if name.startswith((*stored, *in_gguf)))


def check_tensors(expected: Mapping[str, Shape], found: Mapping[str, Shape], optional: frozenset[str]) -> None:
    """Raise ``ModelError`` naming tensors that are missing, unexpected or of another shape than expected.

    Args:
        optional: names of further tensors that a checkpoint may have.
    """
    if missing := expected.keys() - found.keys():
        raise ModelError(f"The checkpoint lacks {_listed(missing)}.")
    extra = {name for name in found.keys() - expected.keys() - optional if not _has_no_effect(name)}
    if extra:
        raise ModelError(f"The checkpoint has tensors that this architecture does not use: {_listed(extra)}.")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"The tensor {name} has shape {found[name]}, but the config requires {shape}.")


def _has_no_effect(name: str) -> bool:
    """Whether a tensor is computed again, or is a scale that changes no weight (``kv_scales`` reads those of KV)."""
    return is_computed(name) or name.rpartition(".")[2] in _CACHE_SCALES


def is_computed(name: str) -> bool:
    """Return whether a tensor has nothing that does not follow from the config."""
    return _COMPUTED.fullmatch(name) is not None


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    shown = ", ".join(map(shortened, ordered[:5]))
    return shown if len(ordered) <= 5 else f"{shown} and {len(ordered) - 5} more"


_GGUF_MODULES = {"token_embd": "model.embed_tokens", "output": "lm_head"}
GGUF_KV_UP = ("attn_k_b", "attn_v_b")
_GGUF_LAYER_INPUTS = {
    "per_layer_token_embd": LAYER_EMBEDDING,
    "per_layer_model_proj": f"{LAYER_PROJECTION}.weight",
    "per_layer_proj_norm": LAYER_PROJECTION_NORM,
}
_GGUF_LAST_NORM = "output_norm"
_GGUF_EMBEDDING_NORM = "token_embd_norm"  # in LFM2's files the name of the last norm
_GGUF_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")  # in the order of ``expert_modules``
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.((?:shortconv\.)?\w+)\.(weight|bias)")


_GGUF_STATE = re.compile(r"blk\.(\d+)\.(ssm_a|ssm_d|ssm_dt\.bias)")
_GGUF_STATE_NAMES = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}


def from_gguf(name: str, config: ModelConfig) -> str:
    """Return the Hugging Face name of a tensor in a GGUF file; a name without counterpart stays as it is."""
    if state := _GGUF_STATE.fullmatch(name):
        block = "linear_attn" if _has_delta(config) else "mamba"
        return f"model.layers.{state[1]}.{block}.{_GGUF_STATE_NAMES[state[2]]}"
    if match := _GGUF_LAYER.fullmatch(name):
        index, module, kind = match.groups()
        if module == "attn_sinks" and config.attention_sinks:
            return f"model.layers.{index}.self_attn.{SINKS}"
        if module == "layer_output_scale" and config.has_layer_scalars:
            return f"model.layers.{index}.{LAYER_SCALAR}"
        if found := _gguf_mixture_module(module, config, int(index)) or _gguf_layer_module(module, config):
            return f"model.layers.{index}.{found}" + ("" if found.endswith(CORRECTION) else f".{kind}")
        return name
    module, _, kind = name.rpartition(".")
    if module in _GGUF_LAYER_INPUTS and config.layer_inputs is not None:
        return _GGUF_LAYER_INPUTS[module]
    is_short_conv = BY_NAME[config.family].recurrent == "short_conv"
    if module == _GGUF_LAST_NORM or (module == _GGUF_EMBEDDING_NORM and is_short_conv):
        return f"{final_norm(config)}.{kind}"
    if module == _GGUF_EMBEDDING_NORM and config.embedding_norm is not None:
        return f"model.{config.embedding_norm}.{kind}"
    return f"{_GGUF_MODULES[module]}.{kind}" if module in _GGUF_MODULES else name


def latent_from_gguf(name: str, config: ModelConfig) -> str | None:
    """Return the Hugging Face name of latent attention's ``kv_b_proj`` for a GGUF tensor with part of it, else None.

    GGUF stores this matrix in two tensors: ``attn_k_b`` has its rows for keys, ``attn_v_b`` its rows for values.
    """
    match = _GGUF_LAYER.fullmatch(name)
    if config.latent is None or match is None or match[2] not in GGUF_KV_UP or match[3] != "weight":
        return None
    return f"model.layers.{match[1]}.self_attn.{KV_UP}.weight"


def delta_from_gguf(name: str, config: ModelConfig) -> str | None:
    """Return the Hugging Face name of the ``in_proj_qkvz`` whose q, k and v a GGUF tensor has; None for another tensor.

    GGUF stores this matrix in two tensors: ``attn_qkv``, and ``attn_gate`` for the rows of its gates.
    """
    match = _GGUF_LAYER.fullmatch(name)
    if match is None or match[2] != GGUF_DELTA_PARTS[0] or int(match[1]) >= config.num_layers:
        return None
    layer = config.layers[int(match[1])].recurrent
    if not isinstance(layer, DeltaLayer) or not layer.grouped:
        return None
    return f"model.layers.{match[1]}.linear_attn.in_proj_qkvz.{match[3]}"


def experts_from_gguf(name: str, config: ModelConfig) -> list[str]:
    """Return the Hugging Face names of the modules that a GGUF tensor of experts stacks; empty for other tensors."""
    match = _GGUF_LAYER.fullmatch(name)
    if match is None or match[2] not in _GGUF_EXPERTS or int(match[1]) >= config.num_layers:
        return []
    mixture = config.layers[int(match[1])].mixture
    if mixture is None:
        return []
    prefix, which = f"model.layers.{match[1]}.{mixture.names.block}", _GGUF_EXPERTS.index(match[2])
    modules = (expert_modules(prefix, mixture, expert)[which] for expert in range(mixture.num_experts))
    return [f"{module}.{match[3]}" for module in modules]


def fused_from_gguf(name: str, config: ModelConfig) -> list[tuple[str, int, int]] | None:
    """Return the parts of a GGUF tensor that joins q, k and v, which are separate in the model's checkpoints.

    A part is its Hugging Face name, its first row, and its end row, which is excluded. None for any other tensor.
    """
    match = _GGUF_LAYER.fullmatch(name)
    if match is None or match[2] != "attn_qkv" or len(config.qkv_modules) == 1:
        return None
    if _has_delta(config) and config.layers[int(match[1])].recurrent is not None:
        return None
    modules = qkv_modules(config, int(match[1]))
    ends = list(itertools.accumulate(modules.values()))
    prefix = f"model.layers.{match[1]}.self_attn"
    return [
        (f"{prefix}.{module}.{match[3]}", end - size, end)
        for (module, size), end in zip(modules.items(), ends, strict=True)
    ]


def _gguf_mixture_module(module: str, config: ModelConfig, index: int) -> str | None:
    """The module of a mixture that all tokens pass, by its name in GGUF files."""
    mixture = config.layers[index].mixture if index < config.num_layers else None
    if mixture is None:
        return None
    names = mixture.names
    if module in _GGUF_SHARED:
        return f"{shared_block(names.block, mixture).removeprefix('.')}.{_GGUF_SHARED[module]}"
    found = {
        "ffn_gate_inp": names.router,
        "exp_probs_b": f"{names.correction_name}",
        "ffn_gate_inp_shexp": f"{names.shared}_gate",
    }.get(module)
    return None if found is None else f"{names.block}.{found}"


def _gguf_layer_module(module: str, config: ModelConfig) -> str | None:
    norms, attention, mlp = config.norms, config.qkv_modules, config.mlp_modules
    if BY_NAME[config.family].two_norms_key is not None and module in _GGUF_TWO_NORMS:
        return _gguf_falcon_norm(module, norms)
    if module in _GGUF_NORMS:
        # Seed-OSS's models have no norm after attention, and their files use its name for the norm before the MLP.
        first, second = _GGUF_NORMS[module]
        return norms[first] or norms[second]
    names = {
        "attn_output": f"self_attn.{config.output_module}",
        "ffn_up": f"{config.mlp_block}.{mlp[-2]}",
        "ffn_down": f"{config.mlp_block}.{mlp[-1]}",
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    }
    if _has_delta(config):
        names |= _GGUF_DELTA | (_GGUF_GROUPED if BY_NAME[config.family].recurrent == "grouped_delta" else {})
    if config.gated_attention in ("module", "head_module"):
        names["attn_gate"] = f"self_attn.{GATE}"
    if config.layer_inputs is not None:
        names |= {"inp_gate": LAYER_GATE, "proj": LAYER_OUTPUT, "post_norm": LAYER_NORM}
    if len(mlp) == 3:
        names["ffn_gate"] = f"{config.mlp_block}.{mlp[0]}"
    if config.head_norms is not None:
        stored = ("attn_q_norm", "attn_k_norm")
        names |= {norm: f"self_attn.{name}" for norm, name in zip(stored, config.head_norms, strict=True)}
    if config.latent is not None:
        names |= {stored: f"self_attn.{name}" for stored, name in _GGUF_LATENT.items()}
    of_qkv = ("attn_q", "attn_k", "attn_v") if len(attention) == 3 else ("attn_qkv",)
    names |= {stored: f"self_attn.{name}" for stored, name in zip(of_qkv, attention, strict=True)}
    return names.get(module)


def _gguf_falcon_norm(module: str, norms: LayerNorms) -> str | None:
    """Return a norm of Falcon by its name in GGUF files, whose first norm is that of the MLP; None for other norms.

    ``ffn_norm`` is in files of models without attention beside the MLP, which are not computed (Falcon RW).
    """
    if module == "attn_norm_2":
        return norms.before_attention if norms.before_attention != norms.before_mlp else None
    return norms.before_mlp if module == "attn_norm" else None


def _has_delta(config: ModelConfig) -> bool:
    return BY_NAME[config.family].has_delta


_GGUF_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
# Tensors of Qwen3-Next in GGUF. Early files have ``ssm_in``, with rows as published; others: ``delta_from_gguf``.
_GGUF_GROUPED = {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
GGUF_DELTA_PARTS = ("attn_qkv", "attn_gate")
_GGUF_SHARED = {"ffn_gate_shexp": "gate_proj", "ffn_up_shexp": "up_proj", "ffn_down_shexp": "down_proj"}
_GGUF_LATENT = {
    "attn_q_a": QUERY_DOWN,
    "attn_q_a_norm": QUERY_NORM,
    "attn_q_b": QUERY_UP,
    "attn_kv_a_mqa": KV_DOWN,
    "attn_kv_a_norm": KV_NORM,
}
# For each GGUF name, the index of its norm in ``LayerNorms``, and the index of the norm that it names if that is None.
_GGUF_TWO_NORMS = ("attn_norm", "attn_norm_2", "ffn_norm")
_GGUF_NORMS = {"attn_norm": (0, 0), "post_attention_norm": (1, 2), "ffn_norm": (2, 2), "post_ffw_norm": (3, 3)}
