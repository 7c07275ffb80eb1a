"""The native ops on logits: token masks and random draws."""

from __future__ import annotations

from struct import Struct
from typing import Final

import torch
from torch import Tensor

from ..layouts.draw_params import COLUMNS, DrawParams
from .native_library import NativeLibrary

_MASK: Final = Struct("7q")
_DRAW: Final = Struct(f"{len(DrawParams._fields) + 6}q")
_WORD_BITS: Final = 32
# Number of random numbers of a race within a part of the vocabulary, and number of tokens of a part.
_NOISE, _PART = 64 + 32, 2048


class SamplingKernels:
    """The ops of a compiled library, with the meaning of their namesakes in ``kernels.sampling_ops``.

    Logits are contiguous fp32 on the CPU, as callers check; other tensors and all indices are checked inside.
    """

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library
        self._mask = library.bind("mask_logits", _MASK)
        self._draw = library.bind("draw_tokens", _DRAW)

    def mask_logits(self, logits: Tensor, lines: Tensor, words: Tensor) -> None:
        """See ``kernels.sampling_ops.mask_logits``."""
        rows, columns = logits.shape
        _check("lines", lines, torch.int64, (len(lines),))
        _check("words", words, torch.int32, (len(lines), -(-columns // _WORD_BITS)))
        addresses = (logits.data_ptr(), lines.data_ptr(), words.data_ptr())
        if self._mask(_MASK.pack(*addresses, len(lines), rows, columns, self._library.num_threads)):
            raise IndexError(f"a line is outside of {rows} lines of logits")

    def draw_tokens(self, logits: Tensor, params: DrawParams) -> Tensor:
        """See ``kernels.sampling_ops.draw_tokens``."""
        lines, columns = logits.shape
        for name, dtype in (*COLUMNS.items(), ("u", torch.float64)):
            if (column := getattr(params, name)) is not None:
                _check(name, column, dtype, (lines, 1))
        num_noise = _NOISE - (-columns // _PART)
        if params.noise is not None:
            _check("noise", params.noise, torch.float64, (lines, num_noise))
        elif ((params.temperature > 0) & (params.top_k == 0) & (params.top_p >= 1)).any():
            raise ValueError("noise is missing, which random draws without top_k and top_p need")
        tokens = torch.empty(lines, dtype=torch.int64)
        addresses = (0 if each is None else each.data_ptr() for each in (logits, *params, tokens))
        if self._draw(_DRAW.pack(*addresses, lines, columns, num_noise, self._library.num_threads)):
            raise MemoryError("a draw could not allocate its candidates")
        return tokens


def _check(name: str, value: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if value.dtype is not dtype or value.shape != shape or not value.is_cpu or not value.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} CPU tensor of shape {list(shape)}, not {value.dtype} "
            f"{list(value.shape)} on {value.device}"
        )
