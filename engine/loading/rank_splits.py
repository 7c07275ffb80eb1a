"""Splits of a model over tensor-parallel ranks: the runs of rows or columns of each tensor that a rank holds.

Query heads, KV heads, the intermediate size of MLPs and experts, heads or channels of recurrent layers, and the LM
head's vocabulary are split evenly. Every rank holds the whole of any module that is not named here.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...lora.base_projections import HEAD as HEAD_MODULE
from ...lora.split_factors import ModuleSplit
from ..checkpoint.families.mixture import Mixture
from ..checkpoint.families.recurrent import DeltaLayer, KimiDeltaLayer, Mamba2Layer, MambaLayer, RecurrentLayer
from ..checkpoint.model_config import LatentConfig, ModelConfig
from .matrix_cuts import Run
from .tensor_names import (
    DELTA_CONVS,
    DELTA_NARROW,
    DELTA_QUERIES,
    DELTA_WIDE,
    FORGET,
    KV_UP,
    OUTPUT_GATE,
    QUERY,
    QUERY_UP,
    SELECTION,
    SINKS,
    STEPS,
    down_module,
    expert_modules,
    gate_module,
    head_norm_shapes,
    output_modules,
    qkv_modules,
    recurrent_block,
    recurrent_output,
    shared_block,
    shared_modules,
    up_modules,
)

Splits = Iterator[tuple[str, ModuleSplit]]


def module_splits(config: ModelConfig, rank: int, size: int) -> Splits:
    """Return the part of each split module that a rank holds, for the given number of ranks."""
    yield HEAD_MODULE, ModuleSplit("outputs", (head_run(config, rank, size),))
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}"
        if layer.has_attention and config.latent is not None:
            yield from _latent(f"{prefix}.self_attn", config, index, config.latent, rank, size)
        elif layer.has_attention:
            yield from _attention(f"{prefix}.self_attn", config, index, rank, size)
        if layer.has_attention:
            run = even_run(config.attention_size_of(index), rank, size)
            for name in output_modules(config):
                yield f"{prefix}.self_attn.{name}", ModuleSplit("inputs", (run,))
        if layer.recurrent is not None:
            yield from _recurrent(f"{prefix}.{recurrent_block(layer.recurrent)}", layer.recurrent, rank, size)
        if layer.has_mlp and layer.mixture is not None:
            yield from _mixture(f"{prefix}.{layer.mixture.names.block}", layer.mixture, rank, size)
        if has_plain_mlp(config, index):
            yield from _mlp(f"{prefix}.{config.mlp_block}", config, index, rank, size)


def has_plain_mlp(config: ModelConfig, index: int) -> bool:
    """Return whether a layer has an MLP that all tokens pass, a mixture's shared expert apart."""
    layer = config.layers[index]
    return layer.has_mlp and (layer.mixture is None or layer.mixture.is_beside_mlp)


def head_run(config: ModelConfig, rank: int, size: int) -> Run:
    """Return a rank's tokens of the vocabulary."""
    return config.vocab_size * rank // size, config.vocab_size * (rank + 1) // size


def even_run(count: int, rank: int, size: int) -> Run:
    """Return a rank's share of a number that the ranks divide."""
    return rank * (count // size), (rank + 1) * (count // size)


def shared_run(count: int, rank: int, size: int) -> Run:
    """Return a rank's share of heads or groups; with more ranks than heads, each head is on several ranks."""
    first = rank * count // size
    return first, first + max(1, count // size)


def _times(run: Run, rows: int, start: int = 0) -> Run:
    """Return the run of rows of a run of heads with ``rows`` rows each, of which the first head begins at ``start``."""
    return start + run[0] * rows, start + run[1] * rows


def _attention(prefix: str, config: ModelConfig, index: int, rank: int, size: int) -> Splits:
    own, width, of_keys = config.heads_of(index), config.query_size_of(index), config.key_dim_of(index)
    queries, keys = even_run(width, rank, size), shared_run(own.heads, rank, size)
    runs: list[tuple[Run, ...]]
    names = qkv_modules(config, index)
    if config.grouped_qkv:
        runs = [(even_run(rows, rank, size),) for rows in names.values()]
    elif len(config.qkv_modules) == 1:
        starts = (width, width + own.heads * of_keys)
        runs = [(queries, *(_times(keys, of_keys, start) for start in starts))]
    else:
        of_values = config.value_size_of(index) // own.heads
        parts = (queries, _times(keys, of_keys), _times(keys, of_values))
        runs = [(part,) for part in parts[: len(names)]]
    yield from ((f"{prefix}.{name}", ModuleSplit("outputs", each)) for name, each in zip(names, runs, strict=True))
    for name, rows in gate_module(config, index).items():
        yield f"{prefix}.{name}", ModuleSplit("outputs", (even_run(rows, rank, size),))


def _latent(prefix: str, config: ModelConfig, index: int, latent: LatentConfig, rank: int, size: int) -> Splits:
    """Queries, and keys and values made of the latent vector, by heads; the latent vector itself is on each rank."""
    heads = even_run(config.num_heads, rank, size)
    query = QUERY if latent.query_rank is None else QUERY_UP
    yield f"{prefix}.{query}", ModuleSplit("outputs", (_times(heads, latent.query_dim),))
    yield f"{prefix}.{KV_UP}", ModuleSplit("outputs", (_times(heads, latent.plain_dim + latent.value_dim),))
    for name, rows in gate_module(config, index).items():
        yield f"{prefix}.{name}", ModuleSplit("outputs", (even_run(rows, rank, size),))


def _mlp(prefix: str, config: ModelConfig, index: int, rank: int, size: int) -> Splits:
    inner = config.mlp_size_of(index)
    part, modules = even_run(inner, rank, size), up_modules(config, index)
    for name, rows in modules.items():
        yield f"{prefix}.{name}", ModuleSplit("outputs", _halves(part, inner, rows))
    for name in down_module(config):
        yield f"{prefix}.{name}", ModuleSplit("inputs", (part,))


def _halves(part: Run, inner: int, rows: int) -> tuple[Run, ...]:
    """Return the runs of a module with the given number of rows: gate and up if the module has both."""
    return tuple(_times(part, 1, start) for start in range(0, rows, inner))


def _mixture(prefix: str, mixture: Mixture, rank: int, size: int) -> Splits:
    part = even_run(mixture.size, rank, size)
    for expert in range(mixture.num_experts):
        *inputs, down = expert_modules(prefix, mixture, expert)
        yield from ((module, ModuleSplit("outputs", (part,))) for module in inputs)
        yield down, ModuleSplit("inputs", (part,))
    if mixture.shared_size:
        block, shared = shared_block(prefix, mixture), even_run(mixture.shared_size, rank, size)
        for name, rows in shared_modules(mixture).items():
            yield f"{block}.{name}", ModuleSplit("outputs", _halves(shared, mixture.shared_size, rows))
        yield f"{block}.{mixture.names.shared_modules[-1]}", ModuleSplit("inputs", (shared,))


def _recurrent(prefix: str, layer: RecurrentLayer, rank: int, size: int) -> Splits:
    assert isinstance(layer, MambaLayer | Mamba2Layer | DeltaLayer | KimiDeltaLayer)
    width = even_run(layer.width, rank, size)
    yield f"{prefix}.{recurrent_output(layer, 0)[0]}", ModuleSplit("inputs", (width,))
    match layer:
        case MambaLayer():
            yield f"{prefix}.in_proj", ModuleSplit("outputs", (width, _times(width, 1, layer.width)))
            yield f"{prefix}.conv1d", ModuleSplit("outputs", (width,))
            yield f"{prefix}.{SELECTION}", ModuleSplit("inputs", (width,))
            yield f"{prefix}.{STEPS}", ModuleSplit("outputs", (width,))
        case Mamba2Layer():
            yield from _mamba2(prefix, layer, rank, size)
        case DeltaLayer():
            yield from _delta(prefix, layer, rank, size)
        case KimiDeltaLayer():
            others = (FORGET, OUTPUT_GATE) if layer.narrow else DELTA_WIDE[1:]
            wide = (*DELTA_QUERIES, *DELTA_CONVS, *others)
            yield from ((f"{prefix}.{name}", ModuleSplit("outputs", (width,))) for name in wide)
            heads = even_run(layer.num_heads, rank, size)
            yield f"{prefix}.{DELTA_NARROW[0]}", ModuleSplit("outputs", (heads,))


def _mamba2(prefix: str, layer: Mamba2Layer, rank: int, size: int) -> Splits:
    """Gate, x, B, C and steps of one projection; x, B and C of the convolution."""
    width, of_groups = even_run(layer.width, rank, size), layer.num_groups * layer.state_size
    groups = shared_run(layer.num_groups, rank, size)
    pairs = tuple(_times(groups, layer.state_size, layer.width + start) for start in (0, of_groups))
    seen = (width, *pairs)
    steps = _times(even_run(layer.num_heads, rank, size), 1, layer.conv_width)
    projected = (width, *(_times(run, 1, layer.width) for run in (*seen, steps)))
    yield f"{prefix}.in_proj", ModuleSplit("outputs", projected)
    yield f"{prefix}.conv1d", ModuleSplit("outputs", seen)
    yield f"{prefix}.norm", ModuleSplit("outputs", (width,))


def _delta(prefix: str, layer: DeltaLayer, rank: int, size: int) -> Splits:
    """Queries and keys by key heads; values, gates, rates and steps by value heads."""
    keys, values = even_run(layer.key_width, rank, size), even_run(layer.width, rank, size)
    seen = (keys, _times(keys, 1, layer.key_width), _times(values, 1, 2 * layer.key_width))
    heads = even_run(layer.num_heads, rank, size)
    yield f"{prefix}.conv1d", ModuleSplit("outputs", seen)
    if layer.grouped:
        wide = even_run(layer.conv_width + layer.width, rank, size)
        yield f"{prefix}.in_proj_qkvz", ModuleSplit("outputs", (wide,))
        yield f"{prefix}.in_proj_ba", ModuleSplit("outputs", (even_run(2 * layer.num_heads, rank, size),))
        return
    runs = {"in_proj_qkv": seen, "in_proj_z": (values,), "in_proj_b": (heads,), "in_proj_a": (heads,)}
    yield from ((f"{prefix}.{name}", ModuleSplit("outputs", each)) for name, each in runs.items())


def tensor_splits(config: ModelConfig, rank: int, size: int) -> Iterator[tuple[str, int, tuple[Run, ...]]]:
    """Return the tensors other than modules' weights and biases, the dimension they are split by, and a rank's runs."""
    for index, layer in enumerate(config.layers):
        prefix = f"model.layers.{index}"
        heads = even_run(config.num_heads_of(index), rank, size)
        if layer.has_attention and config.has_sinks(index):
            yield f"{prefix}.self_attn.{SINKS}", 0, (heads,)
        if layer.has_attention and config.qk_norm == "centred":
            both = heads, shared_run(config.heads_of(index).heads, rank, size)
            for name, run in zip(head_norm_shapes(config, index), both, strict=False):
                yield f"{prefix}.self_attn.{name}.weight", 0, (run,)
        if layer.mixture is not None:
            yield from _stacks(f"{prefix}.{layer.mixture.names.block}", layer.mixture, rank, size)
        if layer.recurrent is not None:
            block, of_mamba = f"{prefix}.{recurrent_block(layer.recurrent)}", isinstance(layer.recurrent, MambaLayer)
            if isinstance(layer.recurrent, KimiDeltaLayer):
                dim = 2 if layer.recurrent.narrow else 0
                yield f"{block}.A_log", dim, (even_run(layer.recurrent.num_heads, rank, size),)
                yield f"{block}.dt_bias", 0, (even_run(layer.recurrent.width, rank, size),)
                continue
            assert isinstance(layer.recurrent, MambaLayer | Mamba2Layer | DeltaLayer)
            count = layer.recurrent.width if of_mamba else layer.recurrent.num_heads
            for name in ("A_log", "D") if of_mamba else ("A_log", "D", "dt_bias"):
                yield f"{block}.{name}", 0, (even_run(count, rank, size),)


def _stacks(prefix: str, mixture: Mixture, rank: int, size: int) -> Iterator[tuple[str, int, tuple[Run, ...]]]:
    """Tensors of all experts, [E, ...]."""
    names, part = mixture.names, even_run(mixture.size, rank, size)
    both = _halves(part, mixture.size, 2 * mixture.size)
    match "modules" if names.is_split else names.storage:
        case "stacked":
            yield f"{prefix}.{names.gate}.weight", 1, both
            yield f"{prefix}.{names.down}.weight", 2, (part,)
        case "interleaved":
            yield f"{prefix}.{names.gate}", 2, (_times(part, 2),)
            yield f"{prefix}.{names.gate}_bias", 1, (_times(part, 2),)
            yield f"{prefix}.{names.down}", 1, (part,)
        case "transposed":
            yield f"{prefix}.{names.gate}", 2, both
            yield f"{prefix}.{names.down}", 1, (part,)


def added_biases(config: ModelConfig) -> Iterator[str]:
    """Return the biases [E, H] of all experts' down, which one rank adds."""
    for index, layer in enumerate(config.layers):
        if layer.mixture is not None and layer.mixture.names.storage == "interleaved":
            names = layer.mixture.names
            yield f"model.layers.{index}.{names.block}.{names.down}_bias"
