"""Triton's interpreter, made right where it is wrong, strict where a GPU is undefined, and faster.

Installed once in a process whose environment had ``TRITON_INTERPRET=1`` before Triton was imported (the suite's
conftest sees to that). Three repairs:

* bfloat16. The interpreter keeps it as uint16, computes with the bits, and truncates when it narrows. Here it is
  widened to float32 before each operation and rounded to nearest even after it. Reductions are not covered: a kernel
  must widen before it reduces, as it should anyway.
* Memory. A lane that loads or stores outside of the tensors given to the launch raises IndexError, and the lanes that
  a mask leaves out hold NaN (or a large integer), unless the load says what they hold.
* Time: see ``interpreter_speed``.

It changes private classes of Triton, so ``test_triton_interpreter.py`` tests the repairs themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from support.kernels.interpreter_speed import hasten

Array = NDArray[Any]
UNDEFINED_INT = 0x5BAD  # fits 16 bits; as an index it is outside of what small tests hold

_others: list[bool] = [False]  # whether the running load says what masked lanes hold
_memory: list[tuple[int, int]] = []  # [begin, end) of what the running launch may touch
_reachable: list[tuple[int, int]] = []  # the same for tensors that kernels reach through tables of addresses


def widen(bits: Array) -> Array:
    """bfloat16 bits as uint16 to float32."""
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def narrow(values: Array) -> Array:
    """float32 to bfloat16 bits, to nearest even."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def is_bf16(handle: Any) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar == tl.bfloat16


def wide(handle: Any) -> Any:
    """A bfloat16 handle as float32; any other as it is."""
    return TensorHandle(widen(handle.data), tl.float32) if is_bf16(handle) else handle


def as_bf16(data: Array) -> TensorHandle:
    """A result computed in float32: truth values stay, numbers are rounded."""
    return TensorHandle(data, tl.int1) if data.dtype == np.bool_ else TensorHandle(narrow(data), tl.bfloat16)


@contextmanager
def shuffled_programs(seed: int) -> Iterator[None]:
    """Run the programs of each launch in an order of chance: a GPU promises none."""
    rng = np.random.default_rng(seed)
    builder = interpreter.interpreter_builder
    set_dim, set_index = builder.set_grid_dim, builder.set_grid_idx
    order: list[int] = []

    def shuffle(x: int, y: int, z: int) -> None:
        order[:] = rng.permutation(x * y * z).tolist()
        set_dim(x, y, z)

    def take_another(x: int, y: int, z: int) -> None:
        _, height, depth = builder.grid_dim
        rest, z = divmod(order[(x * height + y) * depth + z], depth)
        set_index(*divmod(rest, height), z)

    with patch.object(builder, "set_grid_dim", shuffle), patch.object(builder, "set_grid_idx", take_another):
        yield


def allow(*tensors: torch.Tensor) -> None:
    """Let kernels reach these tensors by address, for the rest of the test."""
    _reachable.extend(_extent(tensor) for tensor in tensors)


def allowed() -> tuple[tuple[int, int], ...]:
    """First and last address, the latter exclusive, of the memory of all tensors that ``allow`` was given.

    Memory that was freed and given to other tensors is in several of theirs, which overlap: they are one here, so that
    whatever lies in it lies in a single part as a whole.
    """
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(_reachable):
        if merged and begin < merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif begin < end:
            merged.append((begin, end))
    return tuple(merged)


def forget_allowed() -> None:
    """Take back every ``allow``."""
    _reachable.clear()


@functools.cache
def install() -> None:
    """Repair the interpreter of this process."""
    _repair_bf16()
    _check_memory()
    hasten()


def _repair_bf16() -> None:
    for name in ("binary_op", "unary_op", "ternary_op"):
        setattr(InterpreterBuilder, name, _computed_wide(getattr(InterpreterBuilder, name)))
    for name in ("create_fma", "create_rsqrt", "create_fabs"):
        setattr(InterpreterBuilder, name, _returning_bf16(getattr(InterpreterBuilder, name)))
    InterpreterBuilder.create_dot = _dot_of_wide(InterpreterBuilder.create_dot)
    InterpreterBuilder.cast_impl = _cast(InterpreterBuilder.cast_impl)
    # These were bound to the old cast when the class was made.
    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):
        setattr(InterpreterBuilder, f"create_{name}", lambda self, source, target: self.cast_impl(source, target))
    InterpreterBuilder.create_fp_to_fp = _fp_to_fp(InterpreterBuilder.create_fp_to_fp)


def _computed_wide(original: Callable[..., Any]) -> Callable[..., Any]:
    """For builder methods whose last argument is a numpy function; a select keeps its condition."""

    def method(self: Any, *arguments: Any) -> Any:
        *handles, op = arguments
        if not is_bf16(handles[-1]):
            return original(self, *arguments)
        return as_bf16(op(*(wide(handle).data for handle in handles)))

    return method


def _returning_bf16(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *handles: Any) -> Any:
        result = original(self, *map(wide, handles))
        return as_bf16(result.data) if is_bf16(handles[-1]) else result

    return method


def _dot_of_wide(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, accumulator: Any, *rest: Any) -> Any:
        assert a.dtype.scalar == b.dtype.scalar, f"tl.dot of {a.dtype} and {b.dtype}: a GPU refuses it"
        return original(self, wide(a), wide(b), accumulator, *rest)

    return create_dot


def _cast(original: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if (source.dtype.scalar == tl.bfloat16) == (target.scalar == tl.bfloat16):
            return original(self, source, target)
        if is_bf16(source):
            return original(self, wide(source), target)
        return as_bf16(original(self, source, tl.float32).data)

    return cast_impl


def _fp_to_fp(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return self.cast_impl(source, target)
        return original(self, source, target, rounding)

    return create_fp_to_fp


def _check_memory() -> None:
    GridExecutor._init_args_hst = _recording(GridExecutor._init_args_hst)
    TritonSemantic.load = _noting_other(TritonSemantic.load)
    InterpreterBuilder.create_masked_load = _checked_load(InterpreterBuilder.create_masked_load)
    InterpreterBuilder.create_masked_store = _checked_store(InterpreterBuilder.create_masked_store)
    InterpreterBuilder.create_atomic_rmw = _checked_atomic(InterpreterBuilder.create_atomic_rmw)
    InterpreterBuilder.create_load = lambda self, pointers, *rest: self.create_masked_load(pointers, None, None, *rest)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes from a tensor's first element to its last: its storage may hold more, of no concern to it."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    size = (last + 1) * tensor.element_size() if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + size


def _recording(original: Callable[..., Any]) -> Callable[..., Any]:
    """Notes the tensors of a launch."""

    def init_args(self: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = original(self, args, kwargs)
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        _memory[:] = [_extent(tensor) for tensor in tensors]
        return args, kwargs

    return init_args


def _noting_other(original: Callable[..., Any]) -> Callable[..., Any]:
    """For a scalar, Triton drops an ``other`` that is 0: under interpretation such a tensor is false."""

    def load(self: Any, pointer: Any, mask: Any, other: Any, *rest: Any) -> Any:
        _others[0] = other is not None
        try:
            return original(self, pointer, mask, other, *rest)
        finally:
            _others[0] = False

    return load


def _check(pointers: Any, mask: Any, what: str) -> Array:
    """The lanes in use, all of them inside of some tensor."""
    addresses = np.asarray(pointers.data, dtype=np.uint64)
    used = np.ones(addresses.shape, bool) if mask is None else np.broadcast_to(mask.data.astype(bool), addresses.shape)
    touched = addresses[used]
    if not touched.size:
        return used
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    parts = (*_memory, *_reachable)
    first, last = int(touched.min()), int(touched.max()) + size
    if any(begin <= first and last <= end for begin, end in parts):
        return used
    for begin, end in parts:
        touched = touched[(touched < np.uint64(begin)) | (touched + np.uint64(size) > np.uint64(end))]
        if not touched.size:
            return used
    raise IndexError(f"{what}: {touched.size} of {addresses.size} lanes are outside of every tensor")


def _checked_load(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_masked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        used = _check(pointers, mask, "load")
        loaded = original(self, pointers, TensorHandle(used, tl.int1), other, *rest)
        return (
            loaded
            if other is not None or _others[0] or used.all()
            else TensorHandle(_spoil(loaded, used), loaded.dtype)
        )

    return create_masked_load


def _spoil(loaded: Any, used: Array) -> Array:
    """What was loaded, with the undefined lanes filled with what does harm."""
    data: Array = loaded.data.copy()
    if is_bf16(loaded):
        data[~used] = 0x7FC0
    elif data.dtype.kind in "iu":
        data[~used] = UNDEFINED_INT & np.iinfo(data.dtype).max
    else:
        data[~used] = np.nan  # True, as a truth value
    return data


def _checked_store(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask, "store")
        return original(self, pointers, value, mask, *rest)

    return create_masked_store


def _checked_atomic(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_atomic_rmw(self: Any, op: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointers, mask, "atomic")
        return original(self, op, pointers, value, mask, *rest)

    return create_atomic_rmw


def is_interpreting() -> bool:
    """Whether Triton was imported by a process that interprets."""
    return isinstance(tl.max, interpreter.InterpretedFunction)
