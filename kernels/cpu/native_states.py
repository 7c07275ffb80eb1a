"""The native ops of layers with a recurrent state on tensors."""

from __future__ import annotations

from struct import Struct
from typing import Final

import torch
from torch import Tensor

from ..layouts.state_arguments import ConvParams, DeltaParams, GatedNormParams, SelectiveParams, SsmParams, StateBatch
from .native_library import Fields, NativeLibrary

_BF16: Final = torch.bfloat16
_LANES: Final = 16
_MOST_TAPS: Final = 8

_MOST_STATE: Final = 256
_MOST_KEY: Final = 256

_CAUSAL_CONV: Final = Struct("19q")
_SSM_SCAN: Final = Struct("22q")
_SELECTIVE_SCAN: Final = Struct("19q")
_DELTA_SCAN: Final = Struct("23q2d")
_GATED_NORM: Final = Struct("13qd")


class StateKernels:
    """The ops on recurrent states of a compiled library, with the meaning of those in ``kernels.state_ops``."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._causal_conv = library.bind("causal_conv", _CAUSAL_CONV, Fields((9,), (10,)))
        self._ssm_scan = library.bind("ssm_scan", _SSM_SCAN, Fields((11,), (12,)))
        self._selective_scan = library.bind("selective_scan", _SELECTIVE_SCAN, Fields((12,), (13,)))
        self._delta_scan = library.bind("delta_scan", _DELTA_SCAN, Fields((10,), (11,)))
        self._gated_norm = library.bind("gated_norm", _GATED_NORM, Fields((4,)))

    @staticmethod
    def takes_conv(params: ConvParams) -> bool:
        """Return whether the kernel supports this convolution."""
        taps, width = params.weight.shape
        fits = params.bias is None or params.bias.dtype is params.weight.dtype
        return fits and 2 <= taps <= _MOST_TAPS and width % _LANES == 0

    def causal_conv(self, x: Tensor, state: Tensor, batch: StateBatch, params: ConvParams, first: int) -> Tensor:
        """See ``kernels.state_ops.causal_conv``."""
        taps, width = params.weight.shape
        tokens, columns = x.shape
        if first + (3 if params.gated else 1) * width > columns or state.shape[1:] != (taps - 1, width):
            shapes = f"x {list(x.shape)} from {first} and state {list(state.shape)}"
            raise ValueError(f"{shapes} do not fit {taps} taps of {width} channels")
        check_batch(batch, tokens)
        out = self._library.empty((tokens, width), dtype=x.dtype)
        failed = self._causal_conv(
            _CAUSAL_CONV.pack(
                x.data_ptr(),
                params.weight.data_ptr(),
                0 if params.bias is None else params.bias.data_ptr(),
                state.data_ptr(),
                *addresses(batch),
                out.data_ptr(),
                tokens,
                len(batch.source),
                width,
                taps,
                len(state),
                first,
                columns,
                params.gated,
                x.dtype is _BF16,
                self._library.num_threads,
            )
        )
        if failed:
            raise IndexError("a state's slot or a row's tokens are out of range")
        return out

    @staticmethod
    def takes_scan(params: SsmParams, state: Tensor) -> bool:
        """Return whether the kernel supports this scan."""
        fits = params.head_dim % _LANES == 0 and params.state_size <= _MOST_STATE
        return fits and state.dtype is torch.float32 and state.is_contiguous()

    def ssm_scan(
        self, x: Tensor, steps: Tensor, first: int, state: Tensor, batch: StateBatch, params: SsmParams
    ) -> Tensor:
        """See ``kernels.state_ops.ssm_scan``."""
        tokens, heads = len(x), params.num_heads
        shape = (heads, params.state_size, params.head_dim)
        if x.shape[1] != params.columns or first + heads > steps.shape[1] or state.shape[1:] != shape:
            shapes = f"x {list(x.shape)}, steps {list(steps.shape)} from {first}, state {list(state.shape)}"
            raise ValueError(f"{shapes} do not fit {params.columns} columns and states {list(shape)}")
        check_batch(batch, tokens)
        out = self._library.empty((tokens, params.width), dtype=x.dtype)
        failed = self._ssm_scan(
            _SSM_SCAN.pack(
                x.data_ptr(),
                steps.data_ptr(),
                params.decay.data_ptr(),
                params.step_bias.data_ptr(),
                params.skip.data_ptr(),
                state.data_ptr(),
                *addresses(batch),
                out.data_ptr(),
                tokens,
                len(batch.source),
                heads,
                params.head_dim,
                params.num_groups,
                params.state_size,
                len(state),
                first,
                steps.shape[1],
                x.dtype is _BF16,
                self._library.num_threads,
            )
        )
        if failed:
            raise IndexError("a state's slot or a row's tokens are out of range")
        return out

    @staticmethod
    def takes_selective(params: SelectiveParams, state: Tensor) -> bool:
        """Return whether the kernel supports this scan."""
        fits = params.width % _LANES == 0 and params.state_size <= _MOST_STATE
        return fits and state.dtype is torch.float32 and state.is_contiguous()

    def selective_scan(
        self, x: Tensor, steps: Tensor, both: Tensor, state: Tensor, batch: StateBatch, params: SelectiveParams
    ) -> Tensor:
        """See ``kernels.state_ops.selective_scan``."""
        tokens, width, size = len(x), params.width, params.state_size
        wanted = ((tokens, width), (tokens, width), (tokens, 2 * size))
        if (x.shape, steps.shape, both.shape) != wanted or state.shape[1:] != (1, size, width):
            shapes = (
                f"x {list(x.shape)}, steps {list(steps.shape)}, B and C {list(both.shape)}, state {list(state.shape)}"
            )
            raise ValueError(f"{shapes} do not fit {width} channels with states of {size}")
        check_batch(batch, tokens)
        out = self._library.empty((tokens, width), dtype=x.dtype)
        failed = self._selective_scan(
            _SELECTIVE_SCAN.pack(
                x.data_ptr(),
                steps.data_ptr(),
                both.data_ptr(),
                params.decay.data_ptr(),
                params.step_bias.data_ptr(),
                params.skip.data_ptr(),
                state.data_ptr(),
                *addresses(batch),
                out.data_ptr(),
                tokens,
                len(batch.source),
                width,
                size,
                len(state),
                x.dtype is _BF16,
                self._library.num_threads,
            )
        )
        if failed:
            raise IndexError("a state's slot or a row's tokens are out of range")
        return out

    @staticmethod
    def takes_delta(params: DeltaParams, state: Tensor) -> bool:
        """Return whether the kernel supports this scan."""
        fits = params.head_dim % _LANES == 0 and params.key_dim % _LANES == 0 and params.key_dim <= _MOST_KEY
        return fits and state.dtype is torch.float32 and state.is_contiguous()

    def delta_scan(
        self, x: Tensor, gates: Tensor, first: tuple[int, int], state: Tensor, batch: StateBatch, params: DeltaParams
    ) -> Tensor:
        """See ``kernels.state_ops.delta_scan``."""
        tokens, heads = len(x), params.num_heads
        shape = (heads, params.key_dim, params.head_dim)
        needed = max(first[0] + params.steps, first[1] + heads)
        if x.shape[1] != params.columns or needed > gates.shape[1] or state.shape[1:] != shape:
            shapes = f"x {list(x.shape)}, gates {list(gates.shape)} from {list(first)}, state {list(state.shape)}"
            raise ValueError(f"{shapes} do not fit {params.columns} columns and states {list(shape)}")
        check_batch(batch, tokens)
        out = self._library.empty((tokens, params.width), dtype=x.dtype)
        failed = self._delta_scan(
            _DELTA_SCAN.pack(
                x.data_ptr(),
                gates.data_ptr(),
                params.decay.data_ptr(),
                params.step_bias.data_ptr(),
                state.data_ptr(),
                *addresses(batch),
                out.data_ptr(),
                tokens,
                len(batch.source),
                heads,
                params.head_dim,
                params.num_key_heads,
                params.key_dim,
                len(state),
                *first,
                gates.shape[1],
                params.by_channel,
                x.dtype is _BF16,
                self._library.num_threads,
                params.rate_factor,
                params.lower_bound or 0.0,
            )
        )
        if failed:
            raise IndexError("a state's slot or a row's tokens are out of range")
        return out

    @staticmethod
    def takes_norm(params: GatedNormParams) -> bool:
        """Return whether the kernel supports this norm."""
        return len(params.weight) % (params.num_groups * _LANES) == 0

    def gated_norm(self, x: Tensor, gate: Tensor, params: GatedNormParams, first: int) -> Tensor:
        """See ``kernels.state_ops.gated_norm``."""
        tokens, width = x.shape
        weight = params.weight
        if gate.shape[0] != tokens or gate.shape[1] < first + width or weight.shape != (width,):
            shapes = f"x {list(x.shape)}, gate {list(gate.shape)} from {first}, weight {list(weight.shape)}"
            raise ValueError(f"{shapes} do not fit")
        out = self._library.empty((tokens, width), dtype=x.dtype)
        addresses = (x.data_ptr(), gate.data_ptr(), weight.data_ptr(), out.data_ptr())
        kind = (params.is_norm_first, params.activation == "sigmoid")
        sizes = (tokens, width, params.num_groups, gate.shape[1], first, *kind)
        self._gated_norm(_GATED_NORM.pack(*addresses, *sizes, x.dtype is _BF16, self._library.num_threads, params.eps))
        return out


def addresses(batch: StateBatch) -> tuple[int, int, int, int]:
    """Return the addresses of source, target, checkpoints and query_start."""
    return (
        batch.source.data_ptr(),
        batch.target.data_ptr(),
        batch.checkpoints.data_ptr(),
        batch.query_start.data_ptr(),
    )


def check_batch(batch: StateBatch, tokens: int) -> None:
    """Raise ValueError if an index tensor has a wrong type or length."""
    rows = len(batch.source)
    lengths = (len(batch.query_start), len(batch.target), len(batch.checkpoints))
    each = (batch.query_start, batch.source, batch.target, batch.checkpoints)
    if lengths != (rows + 1, rows, tokens) or any(index.dtype is not torch.int32 for index in each):
        raise ValueError(f"index tensors of {rows} rows and {tokens} tokens must be int32, not of lengths {lengths}")
