"""The native ops of a mixture of experts on tensors."""

from __future__ import annotations

from struct import Struct
from typing import Final

import torch
from torch import Tensor

from ..layouts.expert_arguments import ClampedSwiglu, ExpertActivation, ExpertWeights, RouterParams, Routing
from ..layouts.grouped_forms import GroupedLinear
from ..layouts.packed_weights import QuantisedLinear
from .native_library import Fields, NativeLibrary

_BF16: Final = torch.bfloat16
_FP32: Final = torch.float32
_TYPES: Final = (_BF16, _FP32)
_PLAIN: Final = -1  # The format number of plain weights; quantised formats have others.
_NO_MEMORY: Final = 2  # return code of a C function whose allocation failed

_KINDS: Final = ("silu", "clamped", "gelu_tanh")  # in the order of the C++ enumeration
_ROUTE: Final = Struct("14qd")
_EXPERT_LINEAR: Final = Struct("17q")
_ACTIVATION: Final = Struct("9q4d")
_SUM: Final = Struct("10q")


class ExpertKernels:
    """The ops on experts of a compiled library, with the meaning of their namesakes in ``kernels.expert_ops``.

    Callers check that tensors are contiguous, on the CPU, and of a type with kernels.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._route = library.bind("route_tokens", _ROUTE, Fields((5,)))
        self._linear = library.bind("expert_linear", _EXPERT_LINEAR, Fields((4,)))
        self._activation = library.bind("expert_activation", _ACTIVATION, Fields((3,)))
        self._sum = library.bind("sum_experts", _SUM, Fields((5,)))

    def route(self, logits: Tensor, params: RouterParams) -> Routing:
        """Choose k experts for each token, with their weights: logits [T, E] fp32 -> [T, k]."""
        tokens, num_experts = logits.shape
        correction = params.correction
        shape = (tokens, params.top_k)
        routing = Routing(self._library.empty(shape, torch.int32), self._library.empty(shape, _FP32))
        addresses = (
            logits.data_ptr(),
            0 if correction is None else correction.data_ptr(),
            0 if params.factors is None else params.factors.data_ptr(),
            routing.experts.data_ptr(),
            routing.weights.data_ptr(),
        )
        settings = (
            *(tokens, num_experts, params.top_k, params.scores == "sigmoid", params.renormalises),
            *(params.groups, params.top_groups, params.best_of_group, self._library.num_threads, params.scale),
        )
        if self._route(_ROUTE.pack(*addresses, *settings)):
            raise MemoryError("routing could not allocate its scores")
        return routing

    def linear(self, x: Tensor, weights: ExpertWeights, experts: Tensor) -> Tensor:
        """x [T, K] or [T, k, K] and experts [T, k] -> [T, k, N]."""
        tokens, picks = experts.shape
        first = weights.first
        assert not isinstance(first, GroupedLinear), "weights of a GPU"
        width, types = weights.in_features, _TYPES if isinstance(first, QuantisedLinear) else (first.weight.dtype,)
        if x.shape not in ((tokens, width), (tokens, picks, width)) or x.dtype not in types or not x.is_cpu:
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)} on {x.device}; the experts take [{tokens}, {width}] or "
                f"[{tokens}, {picks}, {width}] of their type on the CPU"
            )
        out = self._library.empty((tokens, picks, weights.out_features), x.dtype)
        self._multiply(x.contiguous(), weights, experts.contiguous(), out, picks)
        return out

    def head_linear(self, x: Tensor, weights: ExpertWeights, shape: tuple[int, ...]) -> Tensor:
        """x [T, heads * (K + carried)] -> [T, heads * (N + carried)] as a tensor of this shape."""
        first, heads = weights.first, len(weights)
        assert not isinstance(first, GroupedLinear), "weights of a GPU"
        carried = x.shape[1] // heads - weights.in_features
        types = _TYPES if isinstance(first, QuantisedLinear) else (first.weight.dtype,)
        if x.shape[1] % heads or carried < 0 or x.dtype not in types or not x.is_cpu or not x.is_contiguous():
            raise ValueError(
                f"x is {x.dtype} {list(x.shape)} on {x.device}; {heads} heads take contiguous rows of their type, "
                f"{weights.in_features} values each or more"
            )
        out = self._library.empty(shape, x.dtype)
        self._multiply(x, weights, None, out, heads, carried)
        return out

    def _multiply(
        self, x: Tensor, weights: ExpertWeights, experts: Tensor | None, out: Tensor, picks: int, carried: int = 0
    ) -> None:
        """Write the product of each pick of a token: with the expert that it names, or with weight i for pick i."""
        first = weights.first
        failed = self._linear(
            _EXPERT_LINEAR.pack(
                x.data_ptr(),
                0 if experts is None else experts.data_ptr(),
                weights.table.data_ptr(),
                out.data_ptr(),
                out.shape[0],
                picks,
                len(weights),
                weights.out_features,
                weights.in_features,
                experts is not None and x.dim() == 2,
                first.format if isinstance(first, QuantisedLinear) else _PLAIN,
                first.planes if isinstance(first, QuantisedLinear) else 0,
                x.dtype is _BF16,
                self._library.num_threads,
                weights.in_features + carried,
                weights.out_features + carried,
                carried,
            )
        )
        if failed == _NO_MEMORY:
            raise MemoryError("a product of experts could not allocate its rows")
        if failed:
            raise IndexError(f"an expert is not in 0 .. {len(weights) - 1}")

    def activation(self, gate_up: Tensor, kind: ExpertActivation, weights: Tensor | None) -> Tensor:
        """[T, k, 2 * I] -> [T, k, I], or [T, 2 * I] -> [T, I]."""
        tokens, both = gate_up.shape[0], gate_up.shape[-1]
        picks = gate_up.shape[1] if gate_up.dim() == 3 else 1
        out = self._library.empty((*gate_up.shape[:-1], both // 2), gate_up.dtype)
        clamp = kind.numbers if isinstance(kind, ClampedSwiglu) else (0.0,) * 4
        addresses = (gate_up.data_ptr(), out.data_ptr(), 0 if weights is None else weights.data_ptr())
        sizes = (tokens, picks, both // 2)
        flags = (
            _KINDS.index("clamped" if isinstance(kind, ClampedSwiglu) else kind),
            gate_up.dtype is _BF16,
            self._library.num_threads,
        )
        self._activation(_ACTIVATION.pack(*addresses, *sizes, *flags, *clamp))
        return out

    def sum(self, y: Tensor, weights: Tensor | None, shared: Tensor | None, gate: Tensor | None) -> Tensor:
        """[T, k, H] or [T, H] -> [T, H]."""
        tokens, width = y.shape[0], y.shape[-1]
        picks = y.shape[1] if y.dim() == 3 else 1
        out = self._library.empty((tokens, width), y.dtype)
        addresses = (
            y.data_ptr(),
            0 if weights is None else weights.data_ptr(),
            0 if shared is None else shared.data_ptr(),
            0 if gate is None else gate.data_ptr(),
            out.data_ptr(),
        )
        self._sum(_SUM.pack(*addresses, tokens, picks, width, y.dtype is _BF16, self._library.num_threads))
        return out
