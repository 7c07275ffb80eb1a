"""Native CPU kernels as functions on torch tensors.

A C function takes one pointer to a structure of 8-byte fields packed by ``struct``. Such a call costs a third of a
microsecond; ctypes alone needs two for twenty arguments. The fields are in the order of the C++ structure.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

import torch
from torch import Tensor

from ..layouts import int8_kv_layout, kv_forms
from ..layouts.attention_arguments import AttentionParams, HeadNorm, PagedBatch, RopeParams
from ..layouts.packed_weights import Largest, PackedLinear
from .arena import lazy_zeros
from .native_elementwise import KINDS, ElementwiseKernels
from .native_experts import ExpertKernels
from .native_latent import LatentKernels
from .native_library import Fields, NativeLibrary
from .native_lora import LoraKernels
from .native_quantised import QuantisedKernels
from .native_sampling import SamplingKernels
from .native_states import StateKernels

_PANEL: Final = 16  # output columns of a weight panel
_MOST_HEAD_DIM: Final = 512
_MOST_LATENT_DIM: Final = 576  # Largest number of dimensions of a latent key, whose first ones are the value.
_BF16: Final = torch.bfloat16
_FP32: Final = torch.float32
_TYPES: Final = (_BF16, _FP32)

# Formats of the C++ structures: q for integers, booleans and addresses (0 for null), d for real numbers.
_PACK_LINEAR: Final = Struct("5q")
_LINEAR: Final = Struct("11q")
_GATED_LINEAR: Final = Struct("9q")
_ROPE_STORE_KV: Final = Struct("27q2d")
_ATTENTION: Final = Struct("22q2d")
_LARGEST: Final = Struct("6q")
_COPY_PAGES: Final = Struct("12q")

_HEAD_NORMS: Final[tuple[HeadNorm, ...]] = (
    "head",
    "projection",
    "centred",
    "biased",
)  # in the order of the C++ enumeration
_NO_WINDOW: Final = 1 << 40  # Number of keys: more than any context has.
_NO_MEMORY: Final = 2  # return code of a C function whose allocation failed


class Kernels(ElementwiseKernels):
    """The ops of a compiled library, with the meaning of their namesakes in ``kernels.ops``.

    Callers check tensors with ``takes``, ``takes_heads`` and ``takes_weight``. Lengths, types of index tensors and
    indices are checked here, so that no call reads or writes outside of its tensors.

    Attributes:
        experts: ops on experts.
        latent: op on the keys of latent attention.
        lora: LoRA op.
        quantised: ops on quantised weights.
        sampling: ops on logits.
        states: ops on recurrent states.
    """

    def __init__(self, library: NativeLibrary) -> None:
        super().__init__(library)
        self._pack_linear = library.bind("pack_linear", _PACK_LINEAR)
        self._linear = library.bind("linear", _LINEAR, Fields((5,)))
        self._gated_linear = library.bind("gated_linear", _GATED_LINEAR, Fields((3,)))
        pays = library.handle.gated_linear_pays
        self._gated_dtypes = {dtype for dtype in (_BF16, _FP32) if pays(dtype is _BF16)}
        self._rope_store_kv = library.bind("rope_store_kv", _ROPE_STORE_KV, Fields((9,)))
        self._attention = library.bind("attention", _ATTENTION, Fields((7,), (8,)))
        self._largest = library.bind("largest", _LARGEST)
        self._copy_pages = library.bind("copy_pages", _COPY_PAGES)
        self.experts = ExpertKernels(library)
        self.latent = LatentKernels(library)
        self.lora = LoraKernels(library)
        self.quantised = QuantisedKernels(library)
        self.sampling = SamplingKernels(library)
        self.states = StateKernels(library)

    @staticmethod
    def takes(first: Tensor, *others: Tensor) -> bool:
        """Return whether the tensors are contiguous, on the CPU, and of one type that has kernels."""
        dtype = first.dtype
        if (dtype is not _BF16 and dtype is not _FP32) or not (first.is_cpu and first.is_contiguous()):
            return False
        for other in others:  # noqa: SIM110 (a generator costs half a microsecond)
            if not (other.dtype is dtype and other.is_cpu and other.is_contiguous()):
                return False
        return True

    @classmethod
    def takes_kv(cls, x: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
        """Return whether queries, or the fused projection, fit these caches, which have the same type or 8 bits.

        Raises:
            ValueError: a page of 8-bit KV does not consist of whole panels.
        """
        if kv_forms.is_rows(k_cache) or not cls.takes_heads(int8_kv_layout.head_dim(k_cache)):
            return False
        if not int8_kv_layout.is_int8(k_cache):
            return cls.takes(x, k_cache, v_cache)
        if k_cache.shape[2] % int8_kv_layout.CELLS:
            raise ValueError(
                f"a page of KV in 8 bits must have a multiple of {int8_kv_layout.CELLS} cells: {k_cache.shape[2]}"
            )
        caches = k_cache, v_cache
        return cls.takes(x) and all(
            int8_kv_layout.is_int8(each) and each.is_cpu and each.is_contiguous() for each in caches
        )

    @classmethod
    def takes_latent(cls, q: Tensor, cache: Tensor, value_dim: int) -> bool:
        """Return whether queries fit this cache of latent keys, whose first ``value_dim`` dimensions are the values."""
        dims = (cache.shape[3], value_dim)
        return cls.takes(q, cache) and all(dim % _PANEL == 0 and dim <= _MOST_LATENT_DIM for dim in dims)

    @staticmethod
    def takes_type(dtype: torch.dtype) -> bool:
        return dtype in _TYPES

    @staticmethod
    def takes_heads(head_dim: int) -> bool:
        """Return whether attention has a kernel for this head dimension."""
        return head_dim % _PANEL == 0 and head_dim <= _MOST_HEAD_DIM

    @staticmethod
    def takes_weight(weight: Tensor) -> bool:
        """Return whether a weight [N, K] can be packed in panels: bf16 needs an even K, to pair neighbours."""
        even = weight.dtype is not _BF16 or weight.shape[1] % 2 == 0
        return weight.is_cpu and weight.dtype in _TYPES and even and weight.numel() > 0

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """Pack a weight in panels of 16 columns: [ceil(N / 16), words of K, 16 columns, values of a word]."""
        columns, width = weight.shape
        pair = 2 if weight.dtype is _BF16 else 1
        weight = weight.detach().contiguous()
        panels = self.library.arena.empty((-(-columns // _PANEL), width // pair, _PANEL, pair), weight.dtype)
        self._pack_linear(
            _PACK_LINEAR.pack(weight.data_ptr(), panels.data_ptr(), columns, width // pair, self.library.num_threads)
        )
        bias = None if bias is None else bias.detach().to(weight.dtype).contiguous()
        return PackedLinear(width, columns, panels, bias, self)

    def pack_linear_apart(self, weight: Tensor) -> PackedLinear:
        """Pack like ``pack_linear``, but with torch and in separate memory."""
        columns, width = weight.shape
        pair = 2 if weight.dtype is _BF16 else 1
        padded = lazy_zeros((-(-columns // _PANEL), _PANEL, width // pair, pair), weight.dtype)
        padded.view(-1, width)[:columns] = weight
        panels = lazy_zeros((len(padded), width // pair, _PANEL, pair), weight.dtype)
        panels.copy_(padded.transpose(1, 2))
        return PackedLinear(width, columns, panels, None, self)

    def linear(self, x: Tensor, layer: PackedLinear, out_dtype: torch.dtype) -> Tensor:
        """x [T, K] -> [T, N]; see ``kernels.ops.linear``."""
        out = self.library.empty((x.shape[0], layer.out_features), dtype=out_dtype)
        self._multiply(x, layer, out, 0)
        return out

    def largest_linear(self, x: Tensor, layer: PackedLinear) -> Largest:
        """See ``kernels.ops.largest_linear``."""
        found = Largest(
            self.library.empty((x.shape[0],), dtype=_FP32), self.library.empty((x.shape[0],), dtype=torch.int64)
        )
        self._multiply(x, layer, found.value, found.column.data_ptr())
        return found

    def takes_gated(self, layer: PackedLinear) -> bool:
        """Return whether the weight has no bias, its halves are whole panels, and one op is as fast as two."""
        is_whole = layer.bias is None and layer.out_features % (2 * _PANEL) == 0
        return is_whole and layer.weight.dtype in self._gated_dtypes

    def gated_linear(self, x: Tensor, layer: PackedLinear, kind: str) -> Tensor:
        """See ``kernels.ops.gated_linear``, for a layer that ``takes_gated``."""
        x = _check_input(x, layer)
        rows, half = x.shape[0], layer.out_features // 2
        out = self.library.empty((rows, half), dtype=x.dtype)
        addresses = (x.data_ptr(), layer.weight.data_ptr(), out.data_ptr())
        sizes = (rows, half, layer.weight.shape[1])
        flags = (KINDS.index(kind), x.dtype is _BF16, self.library.num_threads)
        self._gated_linear(_GATED_LINEAR.pack(*addresses, *sizes, *flags))
        return out

    def _multiply(self, x: Tensor, layer: PackedLinear, out: Tensor, columns: int) -> None:
        """Write the product; or, if ``columns`` is an address, the maximum and argmax of each of its rows."""
        x, weight, bias = _check_input(x, layer), layer.weight, layer.bias
        failed = self._linear(
            _LINEAR.pack(
                x.data_ptr(),
                weight.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                out.data_ptr(),
                columns,
                x.shape[0],
                layer.out_features,
                weight.shape[1],
                x.dtype is _BF16,
                out.dtype is _BF16,
                self.library.num_threads,
            )
        )
        if failed:
            raise MemoryError("a product could not allocate the largest of its rows")

    def rope_store_kv(
        self, qkv: Tensor, positions: Tensor, kv_loc: Tensor, k_cache: Tensor, v_cache: Tensor, params: RopeParams
    ) -> Tensor:
        """See ``kernels.ops.rope_store_kv``."""
        cos_sin, q_norm, k_norm = params.cos_sin, params.q_norm, params.k_norm
        num_heads, num_kv_heads = params.num_heads, params.num_kv_heads
        tokens = qkv.shape[0]
        num_pages, cache_heads, page_size, _ = k_cache.shape
        head_dim = int8_kv_layout.head_dim(k_cache)
        fits = qkv.shape[1] == (num_heads + 2 * num_kv_heads) * head_dim and num_kv_heads in (0, cache_heads)
        if not fits or v_cache.shape != k_cache.shape:
            raise ValueError(
                f"qkv {list(qkv.shape)}, k_cache {list(k_cache.shape)} and v_cache {list(v_cache.shape)} do not fit "
                f"{num_heads} query and {num_kv_heads} KV heads"
            )
        _check_index("positions", positions, torch.int64, (tokens,))
        _check_index("kv_loc", kv_loc, torch.int64, (tokens,))
        _check_norms(params, head_dim)
        static = kv_forms.static_of(k_cache, params.kv_scales)
        if static is not None:
            _check_index("kv_scales", static, torch.float32, (2, num_kv_heads))
        rotary_dim = 0 if cos_sin is None else _check_cos_sin(cos_sin, head_dim)
        max_position = _check_positions(params)
        norm = k_norm if q_norm is None else q_norm
        q = self.library.empty((tokens, num_heads, head_dim), dtype=qkv.dtype)
        failed = self._rope_store_kv(
            _ROPE_STORE_KV.pack(
                qkv.data_ptr(),
                positions.data_ptr(),
                0 if cos_sin is None else cos_sin.data_ptr(),
                kv_loc.data_ptr(),
                k_cache.data_ptr(),
                v_cache.data_ptr(),
                0 if q_norm is None else q_norm.data_ptr(),
                0 if k_norm is None else k_norm.data_ptr(),
                q.data_ptr(),
                tokens,
                num_heads,
                num_kv_heads,
                head_dim,
                rotary_dim,
                max_position,
                num_pages,
                page_size,
                qkv.dtype is _BF16,
                norm is not None and norm.dtype is _BF16,
                self.library.num_threads,
                int8_kv_layout.is_int8(k_cache),
                params.is_interleaved,
                _HEAD_NORMS.index(params.norm),
                params.is_normed_last,
                0 if params.query_scale is None else params.query_scale.data_ptr(),
                params.has_v_norm,
                0 if static is None else static.data_ptr(),
                params.eps,
                params.offset,
            )
        )
        if failed:
            raise IndexError(f"a position or a cell is out of range: the cache has {num_pages * page_size} cells")
        return q

    def attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, params: AttentionParams
    ) -> Tensor:
        """See ``kernels.ops.attention``."""
        page_table, query_start, context_len = batch.page_table, batch.query_start, batch.context_len
        tokens, heads, head_dim = q.shape
        num_pages, kv_heads, page_size, _ = k_cache.shape
        rows, width = page_table.shape
        value_dim = head_dim if params.value_dim is None else params.value_dim
        fits = int8_kv_layout.head_dim(k_cache) == head_dim and 0 < value_dim <= head_dim
        if k_cache.shape != v_cache.shape or not fits or heads % kv_heads:
            raise ValueError(f"q {list(q.shape)}, k {list(k_cache.shape)} and v {list(v_cache.shape)} do not fit")
        _check_index("page_table", page_table, torch.int32, (rows, width))
        _check_index("query_start", query_start, torch.int32, (rows + 1,))
        _check_index("context_len", context_len, torch.int32, (rows,))
        if params.sinks is not None:
            _check_index("sinks", params.sinks, torch.float32, (heads,))
        out = self.library.empty((tokens, heads * value_dim), dtype=q.dtype)
        failed = self._attention(
            _ATTENTION.pack(
                q.data_ptr(),
                k_cache.data_ptr(),
                v_cache.data_ptr(),
                page_table.data_ptr(),
                query_start.data_ptr(),
                context_len.data_ptr(),
                out.data_ptr(),
                tokens,
                rows,
                width,
                num_pages,
                heads,
                kv_heads,
                page_size,
                head_dim,
                _NO_WINDOW if params.window is None else params.window,
                q.dtype is _BF16,
                self.library.num_threads,
                int8_kv_layout.is_int8(k_cache),
                0 if params.sinks is None else params.sinks.data_ptr(),
                value_dim,
                params.chunk or 0,
                params.scale,
                params.soft_cap or 0.0,
            )
        )
        if failed == _NO_MEMORY:
            raise MemoryError("attention could not allocate its partial sums")
        if failed:
            raise IndexError(f"the page table or the lengths lead outside {num_pages} pages or {tokens} tokens")
        return out

    def largest(self, values: Tensor) -> Largest:
        """See ``kernels.ops.largest``."""
        rows, columns = values.shape
        found = Largest(self.library.empty((rows,), dtype=_FP32), self.library.empty((rows,), dtype=torch.int64))
        addresses = (values.data_ptr(), found.value.data_ptr(), found.column.data_ptr())
        self._largest(_LARGEST.pack(*addresses, rows, columns, self.library.num_threads))
        return found

    def copy_pages(
        self, k: Tensor, v: Tensor | None, source: Sequence[int], target: Sequence[int], count: Sequence[int]
    ) -> None:
        """See ``kernels.memory.copy_pages``; every page and count is inside the cache."""
        layers, pages, heads, page_size, head_dim = k.shape
        if v is not None and v.shape != k.shape:
            raise ValueError(f"k {list(k.shape)} and v {list(v.shape)} must be of one shape")
        lists = [torch.tensor(each, dtype=torch.int64) for each in (source, target, count)]
        addresses = (k.data_ptr(), 0 if v is None else v.data_ptr(), *(each.data_ptr() for each in lists))
        shape = (len(source), layers, pages, heads, page_size)
        self._copy_pages(_COPY_PAGES.pack(*addresses, *shape, head_dim * k.itemsize, self.library.num_threads))


def _check_input(x: Tensor, layer: PackedLinear) -> Tensor:
    """Return x [T, K] as a contiguous tensor. Raises ValueError if it does not fit the layer."""
    rows, width = x.shape
    dtype = layer.weight.dtype
    if width != layer.in_features or x.dtype is not dtype or not x.is_cpu:
        raise ValueError(
            f"x is {x.dtype} [{rows}, {width}] on {x.device}; the layer takes {dtype} "
            f"[T, {layer.in_features}] on the CPU"
        )
    return x.contiguous()


def _check_index(name: str, value: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if value.dtype is not dtype or value.shape != shape or not value.is_cpu or not value.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} CPU tensor of shape {list(shape)}, not {value.dtype} "
            f"{list(value.shape)} on {value.device}"
        )


def _check_norms(params: RopeParams, head_dim: int) -> None:
    if params.norm == "projection" and params.is_normed_last:
        raise ValueError("all heads together are normed before the rotation")
    for norm, heads in ((params.q_norm, params.num_heads), (params.k_norm, params.num_kv_heads)):
        shapes = {"head": (head_dim,), "projection": (heads * head_dim,), "centred": (heads, head_dim)}
        shapes["biased"] = (2, head_dim)
        shape = shapes[params.norm]
        if norm is not None and (norm.shape != shape or norm.dtype not in _TYPES or not norm.is_contiguous()):
            raise ValueError(
                f"a head norm must be bfloat16 or float32 {list(shape)}, not {norm.dtype} {list(norm.shape)}"
            )
    q_norm, k_norm = params.q_norm, params.k_norm
    if q_norm is not None and k_norm is not None and q_norm.dtype is not k_norm.dtype:
        raise ValueError(f"q_norm is {q_norm.dtype}, k_norm {k_norm.dtype}; they must be of one type")


def _check_cos_sin(cos_sin: Tensor, head_dim: int) -> int:
    """Check the rotary table and return the rotary dimension."""
    rotary_dim = cos_sin.shape[1]
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise ValueError(f"cos_sin has {rotary_dim} columns; an even number of at most {head_dim} is needed")
    _check_index("cos_sin", cos_sin, torch.float32, (cos_sin.shape[0], rotary_dim))
    return rotary_dim


def _check_positions(params: RopeParams) -> int:
    """Check the factors of queries, and return the number of positions in the tables; 0 if there are none."""
    cos_sin, scale = params.cos_sin, params.query_scale
    if scale is None:
        return 0 if cos_sin is None else cos_sin.shape[0]
    positions = scale.shape[0] if cos_sin is None else cos_sin.shape[0]
    _check_index("query_scale", scale, torch.float32, (positions,))
    return positions
