"""The native LoRA op on tensors."""

from __future__ import annotations

from struct import Struct
from typing import Final

import torch
from torch import Tensor

from ..layouts.lora_arguments import MOST_MODULES, Segments, SlotTable
from .native_library import Fields, NativeLibrary

_OP: Final = Struct("18q")
_EXPERTS: Final = Struct("22q")
_TYPES: Final = (torch.bfloat16, torch.float32)
_NO_MEMORY: Final = 2  # return code of a C function whose allocation failed


class LoraKernels:
    """The LoRA op of a compiled library, for arguments that ``takes`` accepts. Indices are checked."""

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._shrink_expand = library.bind("lora_shrink_expand", _OP, Fields((10, 12, 14)))
        self._experts = library.bind("expert_lora", _EXPERTS, Fields((10, 13, 15)))

    @staticmethod
    def takes(table: SlotTable, *tensors: Tensor) -> bool:
        """Return whether factors and tensors are contiguous, on the CPU, and of types with a kernel."""
        return table.dtype in _TYPES and all(
            tensor.dtype in _TYPES and tensor.is_cpu and tensor.is_contiguous() for tensor in tensors
        )

    def shrink_expand(
        self, y: Tensor, x: Tensor | None, token_ids: Tensor | None, table: SlotTable, segments: Segments
    ) -> None:
        """``kernels.lora_reference.lora_shrink_expand``.

        Raises:
            IndexError: a token or a slot is out of range; nothing is written.
            MemoryError: the intermediate could not be allocated.
            ValueError: the segments have only tiles, and no slots.
        """
        segments.check_slots()
        num_slots = len(table.factors)
        failed = self._shrink_expand(
            _OP.pack(
                0 if x is None else x.data_ptr(),
                0 if token_ids is None else token_ids.data_ptr(),
                y.data_ptr(),
                segments.tokens.data_ptr(),
                segments.slots.data_ptr(),
                segments.starts.data_ptr(),
                table.rows.data_ptr(),
                *table.sizes,
                *(0,) * (MOST_MODULES - len(table.sizes)),
                y.shape[0],
                table.width,
                segments.slots.shape[0],
                num_slots,
                segments.tokens.shape[0],
                table.dtype is torch.bfloat16,
                y.dtype is torch.bfloat16,
                self._library.num_threads,
            )
        )
        if failed == _NO_MEMORY:
            raise MemoryError("the low-rank op could not allocate its intermediate")
        if failed:
            raise IndexError(
                f"a token is not in 0 .. {y.shape[0] - 1}, a slot not in 0 .. {num_slots - 1}, or a start not in 0 .. "
                f"{segments.tokens.shape[0]}"
            )

    def expert_shrink_expand(
        self, y: Tensor, x: Tensor, experts: Tensor, table: SlotTable, num_experts: int, segments: Segments
    ) -> None:
        """``kernels.lora_reference.expert_shrink_expand``; raises like ``shrink_expand``."""
        self._expert_shrink_expand(y, x, experts, table, num_experts, segments, experts.shape[1], 0)

    def head_shrink_expand(self, y: Tensor, x: Tensor, table: SlotTable, num_heads: int, segments: Segments) -> None:
        """``kernels.lora_ops.lora_heads`` with y and x [T, heads * width]; raises like ``shrink_expand``."""
        carried = x.shape[1] // num_heads - table.width
        self._expert_shrink_expand(y, x, None, table, num_heads, segments, num_heads, carried)

    def _expert_shrink_expand(
        self,
        y: Tensor,
        x: Tensor,
        experts: Tensor | None,
        table: SlotTable,
        num_experts: int,
        segments: Segments,
        picks: int,
        carried: int,
    ) -> None:
        """See ``expert_shrink_expand``. If ``experts`` is None, the picks of each token are all experts in order."""
        segments.check_slots()
        num_slots = len(table.factors) // num_experts
        failed = self._experts(
            _EXPERTS.pack(
                x.data_ptr(),
                y.data_ptr(),
                0 if experts is None else experts.data_ptr(),
                segments.tokens.data_ptr(),
                segments.slots.data_ptr(),
                segments.starts.data_ptr(),
                table.rows.data_ptr(),
                *table.sizes,
                *(0,) * (MOST_MODULES - len(table.sizes)),
                y.shape[0],
                picks,
                table.width,
                segments.slots.shape[0],
                num_slots,
                segments.tokens.shape[0],
                num_experts,
                experts is not None and x.dim() == 2,
                table.dtype is torch.bfloat16,
                self._library.num_threads,
                table.width + carried,
                sum(table.sizes) + carried,
            )
        )
        if failed == _NO_MEMORY:
            raise MemoryError("the low-rank op on experts could not allocate its intermediates")
        if failed:
            raise IndexError(
                f"a token is not in 0 .. {y.shape[0] - 1}, a slot not in 0 .. {num_slots - 1}, a start not in 0 .. "
                f"{segments.tokens.shape[0]}, or an expert not in 0 .. {num_experts - 1}"
            )
