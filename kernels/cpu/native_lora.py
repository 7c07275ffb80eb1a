"""The native low-rank op as a function on tensors."""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import Final

import torch
from torch import Tensor

from ..layouts.lora_arguments import MOST_MODULES, Segments
from . import thread_count
from .native_calls import Fields, bind

_OP: Final = Struct("17q")
NATIVE_TYPES: Final = (torch.bfloat16, torch.float32)
_NO_MEMORY: Final = 2


class LoraKernels:
    """The op of a compiled library. Tensors must be such that ``takes`` is true; indices are checked."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._shrink_expand = bind(library, "lora_shrink_expand", _OP, Fields((10, 12)))

    @staticmethod
    def takes(*tensors: Tensor) -> bool:
        """Whether these are contiguous CPU tensors of types that have a kernel."""
        return all(tensor.dtype in NATIVE_TYPES and tensor.is_cpu and tensor.is_contiguous() for tensor in tensors)

    def shrink_expand(
        self,
        y: Tensor,
        x: Tensor | None,
        token_ids: Tensor | None,
        table: int,
        num_slots: int,
        sizes: tuple[int, ...],
        width: int,
        dtype: torch.dtype,
        segments: Segments,
    ) -> None:
        """See ``kernels.lora_reference.lora_shrink_expand``; ``table`` is the address of a ``table_row`` for each slot.

        Args:
            width: K, or the number of tokens of an embedding.
            dtype: of x and of the factors.

        Raises:
            IndexError: a token or a slot is out of range; nothing is written.
        """
        failed = self._shrink_expand(
            _OP.pack(
                0 if x is None else x.data_ptr(),
                0 if token_ids is None else token_ids.data_ptr(),
                y.data_ptr(),
                segments.tokens.data_ptr(),
                segments.slots.data_ptr(),
                segments.starts.data_ptr(),
                table,
                *sizes,
                *(0,) * (MOST_MODULES - len(sizes)),
                y.shape[0],
                width,
                segments.slots.shape[0],
                num_slots,
                dtype is torch.bfloat16,
                y.dtype is torch.bfloat16,
                thread_count.count(),
            )
        )
        if failed == _NO_MEMORY:
            raise MemoryError("the low-rank op could not allocate its intermediate")
        if failed:
            raise IndexError(f"a token is not in 0 .. {y.shape[0] - 1}, or a slot not in 0 .. {num_slots - 1}")
