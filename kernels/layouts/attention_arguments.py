"""Argument records of attention and of the rotary op: per layer, and per step for all layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .kv_forms import StaticScales
from .staging import to_device

HeadNorm = Literal["head", "projection", "centred", "biased"]
"""Norm of q and k.

head: RMS norm of each head, by one weight [D].
projection: RMS norm of all heads together, by a weight [H * D].
centred: layer norm of each head, by a weight of its own, [H, D].
biased: layer norm of each head, by one weight and one bias, [2, D].
"""


@dataclass(frozen=True, slots=True)
class RopeParams:
    """Parameters of a layer's operations on q and k before attention.

    Attributes:
        num_heads: Hq.
        num_kv_heads: Hkv; 0 if the layer reads the keys and values of another layer and stores none.
        cos_sin: [max_pos, rot_dim] fp32, cosines in the first half and sines in the second, or None for no rotary
            embedding. Dimension i of a head is paired with i + rot_dim / 2 (rotate-half); dimensions past rot_dim are
            not rotated.
        q_norm: weight of the norm of query heads before the rotation, in the shape that ``norm`` says, or None.
        k_norm: norm of key heads, as ``q_norm``.
        eps: epsilon of these norms.
        offset: number added to the weights of the norms.
        norm: kind of the norm.
        is_normed_last: whether the norms come after the rotation; not allowed if ``norm`` is "projection".
        is_interleaved: whether dimension 2 i is paired with 2 i + 1, not with i + rot_dim / 2.
        query_scale: [max_pos] fp32, a factor of queries at each position, after rotation and norms; or None.
        has_v_norm: whether each head's values get an RMS norm without a weight.
        kv_scales: static scales of keys and values. They are used if the cache has the number format that they are for.
            None for scales that are computed for each token.
    """

    num_heads: int
    num_kv_heads: int
    cos_sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0
    offset: float = 0.0
    norm: HeadNorm = "head"
    is_normed_last: bool = False
    is_interleaved: bool = False
    query_scale: Tensor | None = None
    has_v_norm: bool = False
    kv_scales: StaticScales | None = None


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """How a layer scores keys: ``s = scale * q.k``, or ``soft_cap * tanh(s / soft_cap)``.

    Attributes:
        window: size of the sliding window: the number of keys that a token sees, its own included; None for all.
        soft_cap: bound of the scores, or None.
        sinks: [Hq] fp32, for each head a score that is added to every softmax and has no value, or None.
        chunk: number of keys of a chunk. Chunks begin at multiples of ``chunk``, and a token sees only the keys of its
            own chunk; None for all keys.
        value_dim: number of leading dimensions of the keys that are also the values, so that K and V share one cache
            (latent attention); None if values are separate from keys.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None
    value_dim: int | None = None


@dataclass(frozen=True, slots=True)
class LatentParams:
    """Parameters of the operations of latent attention on queries and on the vectors that are cached for a token.

    A query head has ``plain_dim`` dimensions and then rotated ones. For each token the cache holds an RMS-normed latent
    vector of L dimensions, followed by a rotated key that all heads share.

    Attributes:
        num_heads: H.
        plain_dim: D, dimensions of a query head that are not rotated.
        rotary_dim: R, dimensions of a query head that are rotated.
        cos_sin: [max_pos, R] fp32, cosines in the first half and sines in the second; None for no rotation.
        norm: [L], weight of the latent vector's norm.
        eps: epsilon of this norm.
        is_interleaved: whether rotated dimension 2 i is paired with 2 i + 1, not i with i + R / 2.
        query_scale: [max_pos] fp32, a factor of queries at each position, after rotation; or None.
    """

    num_heads: int
    plain_dim: int
    rotary_dim: int
    cos_sin: Tensor | None
    norm: Tensor
    eps: float
    is_interleaved: bool
    query_scale: Tensor | None = None

    @property
    def latent_dim(self) -> int:
        return self.norm.shape[0]

    def check(self, q: Tensor, kv: Tensor, cache: Tensor) -> None:
        """Raise ValueError where q [T, H * (D + R)], kv [T, L + R] and cache [pages, 1, page, L + R] do not fit."""
        width = self.latent_dim + self.rotary_dim
        head_dim = self.plain_dim + self.rotary_dim
        fits = q.shape == (len(q), self.num_heads * head_dim) and kv.shape == (len(q), width)
        if not fits or cache.shape[1] != 1 or cache.shape[3] != width or self.rotary_dim % 2:
            raise ValueError(
                f"q {list(q.shape)}, kv {list(kv.shape)} and the cache {list(cache.shape)} do not fit {self.num_heads} "
                f"heads of {self.plain_dim} + {self.rotary_dim} dimensions and latent vectors of {self.latent_dim}"
            )


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Prefixes whose keys several rows of a decode batch read together (cascade attention).

    Attributes:
        items: [I, 4] int32: first key, end of the keys, index of the first member, number of members. Items without
            members are skipped, so a captured batch may have more items than it needs.
        members: [M, 2] int32: a row, and the index of this item's result among the row's partial results. Members of an
            item are adjacent.
        end: [R] int32, the first key that a row reads alone.
        count: [R] int32, number of partial results that a row gets from items.
        most_members: largest number of members of an item.
        most_results: the largest of ``count``.
    """

    items: Tensor
    members: Tensor
    end: Tensor
    count: Tensor
    most_members: int
    most_results: int

    def to(self, device: torch.device) -> SharedPrefixes:
        """Return a copy on a device, made by one transfer."""
        parts = [part.numpy() for part in (self.items, self.members, self.end, self.count)]
        flat = to_device(np.concatenate([part.ravel() for part in parts]), device)
        items, members, end, count = flat.split([part.size for part in parts])
        return replace(self, items=items.view(-1, 4), members=members.view(-1, 2), end=end, count=count)


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Page table and lengths of a ragged batch of R rows, the same for all layers of a step.

    Attributes:
        page_table: [R, P] int32, the pages of each row in order.
        query_start: [R + 1] int32, row r owns tokens ``query_start[r]:query_start[r + 1]``.
        context_len: [R] int32, number of tokens of each row that have KV, including the tokens of this step.
        max_query: the longest row's number of tokens, or a bound of it.
        max_context: the largest of ``context_len``, or a bound of it.
        shared: prefixes that GPU kernels read once for several rows, from ``find_shared_prefixes``, or None.
        long: rows whose pages a GPU gathers, from ``find_long_rows``, or None.
    """

    page_table: Tensor
    query_start: Tensor
    context_len: Tensor
    max_query: int
    max_context: int
    shared: SharedPrefixes | None = None
    long: LongRows | None = None


class LongRow(NamedTuple):
    """A row of a step with many new tokens: its number, its tokens ``first:end`` of the step, and its context."""

    number: int
    first: int
    end: int
    context: int


@dataclass(frozen=True, slots=True)
class LongRows:
    """The rows of a step with many new tokens, and the rest of the step.

    Attributes:
        rows: the rows with many new tokens; a record on the host for each.
        others: batch of the other rows; None without other rows.
        tokens: [N] int64, the tokens of the other rows; None without other rows.
    """

    rows: tuple[LongRow, ...]
    others: PagedBatch | None = None
    tokens: Tensor | None = None
