"""Load a layer's mixer in place of attention: a short convolution, a state space, or a gated delta net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.collectives import Ranks
from ...kernels.column_ops import ColumnRuns
from ...kernels.ops import on_triton
from ...kernels.state_ops import MOST_STATE, ConvParams, DeltaParams, GatedNormParams, SelectiveParams, SsmParams
from ..checkpoint.families.recurrent import (
    DeltaLayer,
    KimiDeltaLayer,
    Mamba2Layer,
    MambaLayer,
    RecurrentLayer,
    ShortConvLayer,
)
from ..checkpoint.model_config import ModelConfig, ParallelScales
from ..errors import ModelError
from ..models.gated_delta import GatedDelta
from ..models.kimi_delta import KimiDelta, KimiDeltaColumns, NarrowSteps
from ..models.layers import Attention, LayerMlp, Mlp, Projection
from ..models.mamba import Mamba, SelectiveColumns, SelectiveNorms
from ..models.mamba2 import Mamba2
from ..models.norms import Norm
from ..models.parallel_mixer import MixerColumns, ParallelMixer
from ..models.shared_block import OwnProducts, SharedBlockMixer, SharedProjection
from ..models.short_conv import ShortConv
from .tensor_names import (
    DELTA_CONVS,
    DELTA_NORM,
    FORGET,
    OUTPUT_GATE,
    SELECTION,
    SELECTION_NORMS,
    SHARED_LINEAR,
    SHARED_MLP_NORM,
    SHARED_NORM,
    STEPS,
    own_modules,
    recurrent_bias,
    recurrent_block,
    recurrent_inputs,
    recurrent_norm,
    recurrent_output,
)
from .weight_forms import WeightReader

StateMixer = ShortConv | GatedDelta | KimiDelta | Mamba | Mamba2


def load_recurrent(
    weights: WeightReader,
    prefix: str,
    layer: RecurrentLayer,
    hidden: int,
    eps: float,
    scales: ParallelScales | None = None,
    ranks: Ranks | None = None,
) -> StateMixer:
    """Return the recurrent layer whose tensors begin with ``prefix``.

    Args:
        eps: epsilon of the model's norms.
        ranks: tensor-parallel ranks, whose results are added up; each has the heads or channels that ``layer``
            describes. None for a single rank.

    Raises:
        ModelError: a weight does not fit the form of quantised weights, or a state is too large for the kernels.
    """
    _check_state(weights, layer)
    block, biased = f"{prefix}.{recurrent_block(layer)}", recurrent_bias(layer)
    modules = list(recurrent_inputs(layer, hidden).items())
    half = len(modules) // 2 if isinstance(layer, DeltaLayer | KimiDeltaLayer) else len(modules)
    into = _projection(weights, block, dict(modules[:half]), biased=biased)
    out_of = _projection(weights, block, {recurrent_output(layer, hidden)[0]: hidden}, biased=biased, added_over=ranks)
    if isinstance(layer, ShortConvLayer):
        return ShortConv(into, out_of, _conv(weights, f"{block}.conv", biased=layer.biased, gated=True))
    if isinstance(layer, MambaLayer):
        return _mamba(weights, block, layer, into, out_of, ranks)
    if isinstance(layer, KimiDeltaLayer):
        return _kimi_delta(weights, block, layer, into, out_of, eps)
    if isinstance(layer, DeltaLayer):
        norm, norm_eps = weights.tensor(f"{block}.{recurrent_norm(layer)}.weight"), layer.norm_eps or eps
        return GatedDelta(
            into,
            _projection(weights, block, dict(modules[half:]), biased=False),
            out_of,
            grouped_runs(layer) if layer.grouped else None,
            _conv(weights, f"{block}.conv1d", biased=False, gated=False),
            _delta(weights, block, layer),
            GatedNormParams(norm.repeat(layer.num_heads), norm_eps, layer.num_heads, is_norm_first=True),
            is_gate_beside_rates=layer.separate,
        )
    return Mamba2(
        into,
        out_of,
        _conv(weights, f"{block}.conv1d", biased=layer.conv_biased, gated=False),
        _scan(weights, block, layer),
        _gated_norm(weights, block, layer, eps),
        None if scales is None else _scaled(layer, scales),
    )


def _check_state(weights: WeightReader, layer: RecurrentLayer) -> None:
    """Raise ModelError for a layer whose state is larger than the kernels of a GPU take."""
    if isinstance(layer, ShortConvLayer) or not on_triton(weights.device):
        return
    size = layer.key_dim if isinstance(layer, DeltaLayer) else layer.state_size
    if size > MOST_STATE:
        raise ModelError(
            f"A head's state has {size} rows, but the GPU kernels support at most {MOST_STATE}. Try: --device cpu"
        )


def _kimi_delta(
    weights: WeightReader, block: str, layer: KimiDeltaLayer, into: Projection, out_of: Projection, eps: float
) -> KimiDelta:
    """Return the delta attention of Kimi Linear or Ling 3 with these projections to q, k and v and to hidden states."""
    rates, forget, gate = list(recurrent_inputs(layer, 0).items())[len(into.modules) :]
    heads, dim = layer.num_heads, layer.head_dim
    norm = weights.tensor(f"{block}.{DELTA_NORM}.weight").repeat(heads)
    narrow = None
    if layer.narrow:
        narrow = NarrowSteps(
            narrow=_projection(weights, block, dict([forget, gate]), biased=False),
            forget=_projection(weights, block, {FORGET: layer.width}, biased=False),
            columns=KimiDeltaColumns.of(heads, dim),
        )
    return KimiDelta(
        input=into,
        rates=_projection(weights, block, dict([rates] if layer.narrow else [rates, forget]), biased=False),
        gate=_projection(weights, block, {OUTPUT_GATE: layer.width} if layer.narrow else dict([gate]), biased=False),
        narrow=narrow,
        output=out_of,
        conv=_conv(weights, *(f"{block}.{name}" for name in DELTA_CONVS), biased=False, gated=False),
        scan=DeltaParams(
            num_heads=heads,
            head_dim=dim,
            num_key_heads=heads,
            key_dim=dim,
            decay=-torch.exp(weights.exact(f"{block}.A_log")).flatten(),
            step_bias=weights.exact(f"{block}.dt_bias"),
            by_channel=True,
            lower_bound=layer.lower_bound,
        ),
        norm=GatedNormParams(norm, eps, heads, is_norm_first=True, activation="sigmoid"),
    )


def _mamba(
    weights: WeightReader, block: str, layer: MambaLayer, into: Projection, out_of: Projection, ranks: Ranks | None
) -> Mamba:
    """Return Mamba with these projections of hidden states."""
    rank, size = layer.step_rank, layer.state_size
    if layer.norms == "weighted":
        step, into_state, out_of_state = (weights.exact(f"{block}.{name}.weight") for name in SELECTION_NORMS)
    else:
        step, into_state, out_of_state = (torch.ones(each, device=weights.device) for each in (rank, size, size))
    return Mamba(
        input=into,
        selection=_projection(weights, block, {SELECTION: rank + 2 * size}, biased=False, added_over=ranks),
        steps=_projection(weights, block, {STEPS: layer.width}, biased=False),
        output=out_of,
        conv=_conv(weights, f"{block}.conv1d", biased=layer.conv_biased, gated=False),
        scan=SelectiveParams(
            decay=-torch.exp(weights.exact(f"{block}.A_log")).T.contiguous(),
            step_bias=weights.exact(f"{block}.{STEPS}.bias"),
            skip=weights.exact(f"{block}.D"),
        ),
        norms=None if layer.norms == "none" else SelectiveNorms(step, into_state, out_of_state, layer.norm_eps),
        columns=SelectiveColumns.of(layer.width, rank, size),
    )


def side_by_side(config: ModelConfig, index: int, attention: Attention, state: StateMixer) -> ParallelMixer:
    """Return attention and the state space of a layer as one mixer."""
    scales = config.parallel_scales
    assert scales is not None and isinstance(state, Mamba2)
    factors = scales.attention, scales.state
    columns = MixerColumns.of(config.num_heads, config.query_size, state.scan.width, config.hidden_size, factors)
    return ParallelMixer(index, attention, state, columns)


def behind_shared_block(
    config: ModelConfig,
    index: int,
    attention: Attention,
    mlp: LayerMlp,
    state: StateMixer,
    norm: Callable[[str], Norm],
    projection: Callable[[str, dict[str, int], bool], Projection],
) -> SharedBlockMixer:
    """Return a layer of Zamba 2: a shared block, which consists of this attention and MLP, and then a state space.

    Args:
        attention, mlp: the shared weights, to which the layer's own low-rank products are added here.
        norm: reads the norm with a name.
        projection: reads modules side by side, given the prefix of their names, the rows of each by the rest of its
            name, and whether they have biases.
    """
    assert isinstance(mlp, Mlp) and isinstance(state, Mamba2)
    prefix, hidden, block = f"model.layers.{index}", config.hidden_size, config.layers[index].shared_block
    assert block is not None
    owned = {f"{prefix}.{shared}": f"{prefix}.{own}" for shared, own in own_modules(config, index).items()}

    def with_own(shared: Projection) -> SharedProjection:
        """Read what the layer adds to the results of a shared projection, if it adds anything."""
        rows = {owned[name]: size for name, size in zip(shared.modules, shared.sizes, strict=True) if name in owned}
        own = None
        if rows:
            narrow = projection("", {f"{name}.0": block.rank for name in rows}, False)
            own = OwnProducts.of(narrow, tuple(projection("", {f"{name}.1": rows[name]}, False) for name in rows))
        return SharedProjection(shared.modules, shared.sizes, shared.packed, own=own)

    return SharedBlockMixer(
        index=index,
        joined=ColumnRuns.of([(0, 0, hidden), (1, 0, hidden)]),
        joined_norm=norm(f"{prefix}.{SHARED_NORM}"),
        attention=replace(attention, qkv=with_own(attention.qkv)),
        mlp_norm=norm(f"{prefix}.{SHARED_MLP_NORM}"),
        mlp=replace(mlp, gate_up=with_own(mlp.gate_up)),
        linear=projection(prefix, {SHARED_LINEAR: hidden}, False),
        state_norm=norm(f"{prefix}.{config.norms.before_attention}"),
        state=state,
    )


def _gated_norm(weights: WeightReader, block: str, layer: Mamba2Layer, eps: float) -> GatedNormParams | ColumnRuns:
    """Return the norm and gate of a state space; without a norm, the columns of gate and results side by side."""
    if not layer.normed:
        return ColumnRuns.of([(0, 0, layer.width), (1, 0, layer.width)])
    norm = weights.tensor(f"{block}.norm.weight")
    eps = eps if layer.norm_eps is None else layer.norm_eps
    return GatedNormParams(norm, eps, layer.num_groups, is_norm_first=layer.is_norm_first)


def _scaled(layer: Mamba2Layer, scales: ParallelScales) -> ColumnRuns:
    """Return the columns of gate, x, B, C and steps with their factors."""
    of_group = layer.num_groups * layer.state_size
    sizes = (layer.width, layer.width, of_group, of_group, layer.num_heads)
    runs = [(0, sum(sizes[:part]), size) for part, size in enumerate(sizes)]
    return ColumnRuns.of(runs, factors=scales.projected)


def grouped_runs(layer: DeltaLayer) -> tuple[ColumnRuns, ColumnRuns]:
    """Return the columns of each part in the two projections of Qwen3-Next.

    The columns of both projections are grouped by key head. For each key head, the first projection has its q, its k,
    and v and gate of its value heads; the second has rates and steps of its value heads. The results select all q, then
    all k, all v and all gates; and all rates, then all steps.
    """
    each, heads = layer.num_heads // layer.num_key_heads, range(layer.num_key_heads)
    sizes = (layer.key_dim, layer.key_dim, each * layer.head_dim, each * layer.head_dim)
    wide, starts = sum(sizes), [sum(sizes[:part]) for part in range(len(sizes))]
    parts = [(0, head * wide + start, size) for start, size in zip(starts, sizes, strict=True) for head in heads]
    return ColumnRuns.of(parts), ColumnRuns.of(
        [(0, (2 * head + part) * each, each) for part in (0, 1) for head in heads]
    )


def _projection(
    weights: WeightReader, block: str, modules: dict[str, int], *, biased: bool, added_over: Ranks | None = None
) -> Projection:
    names = tuple(f"{block}.{module}" for module in modules)
    bias = weights.tensor(*(f"{name}.bias" for name in names)) if biased else None
    packed = weights.packed(*(f"{name}.weight" for name in names), bias=bias)
    return Projection(names, tuple(modules.values()), packed, added_over)


def _conv(weights: WeightReader, *names: str, biased: bool, gated: bool) -> ConvParams:
    weight: Tensor = weights.tensor(*(f"{name}.weight" for name in names))  # [W, 1, taps]
    bias = weights.tensor(*(f"{name}.bias" for name in names)) if biased else None
    return ConvParams(weight.squeeze(1).T.contiguous(), bias, gated)


def _scan(weights: WeightReader, block: str, layer: Mamba2Layer) -> SsmParams:
    return SsmParams(
        num_heads=layer.num_heads,
        head_dim=layer.head_dim,
        num_groups=layer.num_groups,
        state_size=layer.state_size,
        decay=-torch.exp(weights.exact(f"{block}.A_log")),
        step_bias=weights.exact(f"{block}.dt_bias"),
        skip=weights.exact(f"{block}.D"),
    )


def _delta(weights: WeightReader, block: str, layer: DeltaLayer) -> DeltaParams:
    return DeltaParams(
        num_heads=layer.num_heads,
        head_dim=layer.head_dim,
        num_key_heads=layer.num_key_heads,
        key_dim=layer.key_dim,
        decay=-torch.exp(weights.exact(f"{block}.A_log")),
        step_bias=weights.exact(f"{block}.dt_bias"),
        rate_factor=layer.rate_factor,
    )
