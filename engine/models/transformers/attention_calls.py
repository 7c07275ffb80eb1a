"""Record a model's attention calls: the heads, scale, window, cap and sinks that its own code passes.

A model of the transformers library calls the function that ``config._attn_implementation`` names, and builds its masks
by the function of the same name. Here both functions record their arguments, in one pass over a few tokens whose result
does not matter. A mask is passed as a function of query and key. It is evaluated over the whole context, which shows
the size of its window, or that it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from ...errors import ModelError

RECORDED = "rootgraft_recorded"
"""Name of the recording functions among transformers' implementations of attention."""

# Most positions whose mask is evaluated; a window that is wider is treated as full attention.
_MOST_EVALUATED = 1 << 22

# Tensors that models pass to attention, and that other implementations of attention do not read either.
_IGNORED_TENSORS = frozenset({"position_ids", "cache_position", "position_embeddings"})


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention in a forward pass.

    Attributes:
        module: the module that is called.
        source: index of the call that stored these keys and values: this call, or that of an earlier layer (Gemma 3n).
        key_dim: dimensions of a query and a key.
        value_dim: dimensions of a value.
        scale: factor of the scores.
        window: number of the last keys that a token sees, its own included; None for all.
        soft_cap: bound of the scores, or None.
        sinks: [Hq], for each head a score without a value, or None.
    """

    module: nn.Module
    source: int
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: Tensor | None


@dataclass(slots=True)
class _Record:
    """The calls of a pass over ``num_tokens`` tokens of a model whose sequences have at most ``longest`` tokens."""

    num_tokens: int
    longest: int
    calls: list[AttentionCall] = field(default_factory=list)
    masks: dict[int, tuple[Tensor, int | None]] = field(default_factory=dict)  # mask and window by the mask's address
    stored: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)  # call, keys and values, each only once

    def source(self, key: Tensor, value: Tensor) -> int:
        """Return the index of the call that stored these keys and values; the next index if they are new."""
        for index, k, v in self.stored:
            if k is key and v is value:
                return index
        self.stored.append((len(self.calls), key, value))
        return len(self.calls)


_RECORD: ContextVar[_Record] = ContextVar("attention_record")


@contextmanager
def recorded_calls(num_tokens: int, longest: int) -> Iterator[list[AttentionCall]]:
    """Return a list to which a pass over ``num_tokens`` tokens inside the block adds its calls.

    The pass raises ModelError if attention has a form that our kernels do not compute.

    Args:
        longest: number of tokens of the longest sequence that will be served.
    """
    record = _Record(num_tokens, min(longest, _MOST_EVALUATED))
    token = _RECORD.set(record)
    try:
        yield record.calls
    finally:
        _RECORD.reset(token)


def _record_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Record a call: queries [1, Hq, T, D], keys and values [1, Hkv, T, D] -> zeros [1, T, Hq, D of values]."""
    record = _RECORD.get()
    _check_shapes(query, key, value, record.num_tokens)
    if not options.get("is_causal", getattr(module, "is_causal", True)):
        raise ModelError("Its attention sees later tokens.")
    for name, option in options.items():
        if isinstance(option, Tensor) and name not in _IGNORED_TENSORS and name != "s_aux":
            raise ModelError(f"Its attention takes {name}, which is not supported.")
    window = options.get("sliding_window")
    if attention_mask is not None:
        known = record.masks.get(attention_mask.data_ptr())
        if known is None:
            raise ModelError("Its attention adds a mask or a bias of its own, such as ALiBi.")
        window = known[1]
    scale = options.get("scaling")
    record.calls.append(
        AttentionCall(
            module=module,
            source=record.source(key, value),
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=query.shape[3],
            value_dim=value.shape[3],
            scale=query.shape[3] ** -0.5 if scale is None else float(scale),
            window=window,
            soft_cap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )
    )
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, num_tokens: int) -> None:
    """Check that every token has one query, key and value; otherwise attention is to other tokens, or to a summary."""
    lengths = {each.shape[2] for each in (query, key, value)}
    batch = {each.shape[0] for each in (query, key, value)}
    if lengths != {num_tokens} or batch != {1} or key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1]:
        raise ModelError(
            f"Its attention has queries {list(query.shape)}, keys {list(key.shape)} and values {list(value.shape)} "
            f"for {num_tokens} tokens, which is not supported."
        )


def _record_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], device: torch.device, **_: Any
) -> Tensor:
    """Return a mask of ones, [1, 1, queries, keys], under whose address the window is recorded."""
    record = _RECORD.get()
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool, device=device)
    record.masks[mask.data_ptr()] = mask, _window(mask_function, record.longest)
    return mask


def _window(mask_function: Callable[..., Tensor], longest: int) -> int | None:
    """Return the window of a mask, None if each token sees all earlier ones. Raises ModelError for any other mask."""
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    queries = torch.tensor([longest // 3, longest // 2, longest - 1]).view(1, 1, -1, 1)
    keys = torch.arange(longest + 1).view(1, 1, 1, -1)
    try:
        seen = mask_function(nothing, nothing, queries, keys).expand(1, 1, queries.numel(), keys.numel())
    except Exception as error:
        # The model's own function may raise anything.
        raise ModelError("Its attention has a mask that depends on more than positions.") from error
    width = int(seen[0, 0, -1].sum())
    if not torch.equal(seen, (keys <= queries) & (keys > queries - width)):
        raise ModelError("Its attention has a mask that is neither causal nor a sliding window, such as chunks.")
    return None if width == longest else width


AttentionInterface.register(RECORDED, _record_attention)
AttentionMaskInterface.register(RECORDED, _record_mask)
