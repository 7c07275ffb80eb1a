"""LoRA step: the factors of adapters in device slots, and their use in the forward pass of one step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.layouts.attention_arguments import RopeParams
from ..kernels.layouts.lora_arguments import ROW_FIELDS
from ..kernels.layouts.staging import to_device
from ..kernels.lora_ops import (
    Factors,
    Segments,
    ShrunkInputs,
    SlotTable,
    lora_add_rms_norm,
    lora_embed,
    lora_experts,
    lora_gated_activation,
    lora_heads,
    lora_rope_store_kv,
    lora_shrink_beside,
    lora_shrink_expand,
)
from ..kernels.ops import Activation
from ..kernels.side_stream import SideMark, SideStream
from .base_projections import EMBEDDING, HEAD, BaseLayout, ExpertPlace, ProjectionShape
from .own.own_weights import OwnRows, OwnStep, OwnWeights
from .prepare_factors import PreparedAdapter
from .segments import BASE, make_segments


class LoraStep:
    """LoRA ops of one step, for the tokens of a forward pass or the rows of the head. ``AdapterBank`` creates it.

    Args:
        tables: tables of the projections that this step's adapters change, by name.
        segments: the step's tokens by slot.
        experts: number of experts of each grouped product of experts, and of heads of each product of heads.
    """

    __slots__ = ("_experts", "_segments", "_tables")

    def __init__(self, tables: dict[str, SlotTable], segments: Segments, experts: Mapping[str, int]) -> None:
        self._tables = tables
        self._segments = segments
        self._experts = experts

    def changes(self, projection: str) -> bool:
        """Return whether an adapter of this step changes this projection."""
        return projection in self._tables

    def shrink_beside(self, projection: str, x: Tensor) -> ShrunkInputs | None:
        """Start the adapters' part parallel to the projection of ``x`` [T, K]; None if ``project`` does all of it."""
        table = self._tables.get(projection)
        return None if table is None else lora_shrink_beside(x, table, self._segments)

    def project(self, projection: str, x: Tensor, y: Tensor, shrunk: ShrunkInputs | None = None) -> None:
        """Add the adapters' part to ``y`` [T, N], the projection of ``x`` [T, K], in place."""
        if (table := self._tables.get(projection)) is not None:
            lora_shrink_expand(y, x, table, self._segments, shrunk)

    def activate(self, projection: str, x: Tensor, y: Tensor, kind: Activation, shrunk: ShrunkInputs | None) -> Tensor:
        """Return ``act(gate) * up``, [T, I], where gate and up are the halves of y [T, 2 * I] plus the adapters' part
        for ``x``.

        y is the base model's projection of ``x``; its contents are undefined afterwards. An adapter of the step must
        change this projection.
        """
        return lora_gated_activation(y, x, kind, self._tables[projection], self._segments, shrunk)

    def rope_store_kv(
        self,
        projection: str,
        x: Tensor,
        qkv: Tensor,
        places: tuple[Tensor, Tensor],
        caches: tuple[Tensor, Tensor],
        params: RopeParams,
        shrunk: ShrunkInputs | None,
    ) -> Tensor:
        """Return ``kernels.ops.rope_store_kv`` of qkv plus the adapters' part for ``x``, [T, Hq, D].

        qkv is the base model's projection of ``x``; its contents are undefined afterwards. An adapter of the step must
        change this projection.

        Args:
            places: positions and cells of the tokens.
            caches: keys and values of the layer.
        """
        table = self._tables[projection]
        return lora_rope_store_kv(qkv, x, *places, *caches, params, table, self._segments, shrunk)

    def add_rms_norm(
        self,
        projection: str,
        x: Tensor,
        y: Tensor,
        residual: Tensor,
        norm: tuple[Tensor, float, float],
        shrunk: ShrunkInputs | None,
    ) -> Tensor:
        """Return ``kernels.ops.add_rms_norm`` of y plus the adapters' part for ``x``, [T, H].

        y is the base model's projection of ``x``; its contents are undefined afterwards. An adapter of the step must
        change this projection.

        Args:
            norm: weight, epsilon and offset.
        """
        return lora_add_rms_norm(y, x, residual, *norm, self._tables[projection], self._segments, shrunk)

    def project_experts(self, product: str, x: Tensor, y: Tensor, experts: Tensor) -> None:
        """Add the adapters' part to ``y`` [T, k, N], the product of ``x`` [T, K] or [T, k, K] with experts [T, k]."""
        if (table := self._tables.get(product)) is not None:
            lora_experts(y, x, experts, table, self._experts[product], self._segments)

    def project_heads(self, product: str, x: Tensor, y: Tensor) -> None:
        """Add the adapters' part to ``y``, the products of ``x`` [T, heads * K] with each head's weight."""
        if (table := self._tables.get(product)) is not None:
            lora_heads(y, x, table, self._experts[product], self._segments)

    def embed(self, token_ids: Tensor, y: Tensor) -> None:
        """Add the adapters' part to ``y`` [T, H], the embedding of ``token_ids`` [T] before it is scaled.

        ``y`` may be fp32 for any type of the model.
        """
        if (table := self._tables.get(EMBEDDING)) is not None:
            lora_embed(y, token_ids, table, self._segments)


class AdapterBank:
    """Factors of the adapters in all device slots, by projection. Each adapter keeps its own rank.

    Args:
        layout: the base model.
        num_slots: largest number of adapters of a step.
        side: stream on which adapters are copied parallel to the steps; None for a stream of the layout's device.

    Attributes:
        num_slots: largest number of adapters of a step.
    """

    def __init__(self, layout: BaseLayout, num_slots: int, side: SideStream | None = None) -> None:
        self.num_slots = num_slots
        self._device = layout.device
        self._side = side or SideStream(layout.device)
        self._arriving: dict[str, _Arrival] = {}  # arrivals by the adapter's digest
        self._tables: dict[str, SlotTable] = {}
        self._places: dict[str, ExpertPlace] = {}
        self._experts: dict[str, int] = {}
        # The projections of each product of experts or heads, in their order.
        self._members: dict[str, list[str]] = {}
        sizes: dict[str, tuple[ProjectionShape, int]] = {}  # shape and number of slots of each table
        for shape in layout.products:
            name, slots = shape.name, num_slots
            if (place := shape.place) is not None:
                self._places[name] = place
                self._experts[place.product] = place.count
                self._members.setdefault(place.product, []).append(shape.name)
                name, slots = place.product, num_slots * place.count
            sizes.setdefault(name, (shape, slots))
        # The rows of all tables are in one tensor, so that one copy writes all rows of an adapter.
        total = sum(slots for _, slots in sizes.values())
        self._rows = torch.zeros(total, ROW_FIELDS, dtype=torch.int64, device=layout.device)
        # The index of the first row of each table.
        self._first: dict[str, int] = {}
        for name, (shape, slots) in sizes.items():
            first = self._first[name] = sum(len(table.rows) for table in self._tables.values())
            rows = self._rows[first : first + slots]
            self._tables[name] = SlotTable(shape.sizes, shape.width, slots, layout.dtype, layout.device, rows)
        # The rows of each slot in all tables: emptying a slot takes no memory, since it may follow a lack of memory.
        of_slots = np.concatenate(
            [
                first + np.arange(len(self._tables[name].rows)).reshape(num_slots, -1)
                for name, first in self._first.items()
            ],
            axis=1,
        )
        self._rows_of = torch.from_numpy(of_slots).to(layout.device)
        # The projections of each slot whose factors are written.
        self._written: list[frozenset[str]] = [frozenset()] * num_slots
        # The tables that each slot uses.
        self._used: list[frozenset[str]] = [frozenset()] * num_slots
        self._own: list[OwnWeights | None] = [None] * num_slots
        # Matrices on the device by their keys.
        self._matrices: WeakValueDictionary[str, OwnRows] = WeakValueDictionary()

    def bring(self, adapter: PreparedAdapter) -> bool:
        """Begin to copy an adapter to the device, unless the copy has begun already. Returns whether it is complete.

        Steps run in parallel. The copy is kept until ``install`` writes it into a slot, or ``forget`` releases it.
        """
        if adapter.digest not in self._arriving:
            with self._side.work():
                block = adapter.block.to(self._device, non_blocking=True)
                own = adapter.own and adapter.own.map(partial(_to_device, self._device), self._on_device)
            self._arriving[adapter.digest] = _Arrival(block, own, self._side.mark())
        return self._arriving[adapter.digest].mark.is_reached

    def forget(self, digest: str) -> None:
        """Release the copy of an adapter that was not installed, if there is one."""
        self._arriving.pop(digest, None)

    def install(self, slot: int, adapter: PreparedAdapter) -> None:
        """Write an adapter into a slot. No step in flight may use the slot.

        Steps that are launched later wait on the device for the adapter's arrival, unless ``bring`` has reported it.
        """
        AdapterBank.bring(self, adapter)
        block, own, mark = self._arriving.pop(adapter.digest)
        mark.hand_over(block, *(own.tensors if own else ()))

        def moved(tensor: Tensor) -> Tensor:
            begin = tensor.data_ptr() - adapter.block.data_ptr()
            return block[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

        # The names are recorded first, so that ``clear`` clears all parts even if writing one of them fails.
        self._written[slot] |= adapter.factors.keys()
        self._used[slot] = frozenset(
            self._places[name].product if name in self._places else name for name in adapter.factors
        )
        factors = {name: each.map(moved) for name, each in adapter.factors.items()}
        self._put(slot, self._written[slot], factors)
        self._written[slot] = frozenset(factors)
        self._own[slot] = own

    def _on_device(self, rows: OwnRows) -> OwnRows:
        """Return rows on the device. Adapters with equal rows share them."""
        found = self._matrices.get(rows.key)
        if found is None:
            found = self._matrices[rows.key] = rows.to(self._device)
        return found

    def clear(self, slot: int) -> None:
        """Empty a slot and release its adapter's memory, without allocating any."""
        for name, (first, run) in self._runs(slot, self._written[slot], {}).items():
            self._tables[name].hold(first, run)
        self._rows.index_fill_(0, self._rows_of[slot], 0)
        self._written[slot] = self._used[slot] = frozenset()
        self._own[slot] = None

    def _runs(
        self, slot: int, names: frozenset[str], factors: Mapping[str, Factors]
    ) -> dict[str, tuple[int, list[Factors | None]]]:
        """Return, by table, the first row of a slot and its factors. The experts of a product are written together."""
        runs = {name: (slot, [factors.get(name)]) for name in names - self._places.keys()}
        for product in {self._places[name].product for name in names & self._places.keys()}:
            members = self._members[product]
            runs[product] = slot * len(members), [factors.get(name) for name in members]
        return runs

    def _put(self, slot: int, names: frozenset[str], factors: Mapping[str, Factors]) -> None:
        """Set or clear a slot's factors in these projections."""
        runs = self._runs(slot, names, factors)
        if not runs:
            return
        rows = np.concatenate([self._tables[name].hold(first, run) for name, (first, run) in runs.items()])
        places = [np.arange(first, first + len(run)) + self._first[name] for name, (first, run) in runs.items()]
        # One copy transfers the slots' places, followed by the rows.
        staged = to_device(np.concatenate([*places, rows.ravel()]), self._device)
        self._rows.index_copy_(0, staged[: len(rows)], staged[len(rows) :].view(rows.shape))

    def step(self, of_tokens: NDArray[np.int32]) -> LoraStep | None:
        """Return the LoRA part of a step, or None if no token has an adapter.

        Args:
            of_tokens: [T] int32, the slot of each token, as from ``token_slots``.
        """
        return self._step(of_tokens, self.projections(of_tokens))

    def head_step(self, of_rows: NDArray[np.int32]) -> LoraStep | None:
        """Return the LoRA part of the head for the hidden states that the head reads; None if no adapter changes the
        head.

        Args:
            of_rows: [S] int32, the slot of each row of hidden states.
        """
        return self._step(of_rows, self._used_by(of_rows) & {HEAD})

    def own_step(self, of_tokens: NDArray[np.int32]) -> OwnStep | None:
        """Return the weights of adapters that replace the base model's for tokens of a step; None if there are none.

        Args:
            of_tokens: [T] int32, the slot of each token or row of hidden states.
        """
        slots = [slot for slot, own in enumerate(self._own) if own is not None]
        if not slots:
            return None
        parts = [(np.flatnonzero(of_tokens == slot), own) for slot in slots if (own := self._own[slot]) is not None]
        found = [(to_device(tokens, self._device), own) for tokens, own in parts if len(tokens)]
        return OwnStep(found, len(of_tokens)) if found else None

    def recorded_step(self, names: frozenset[str], segments: Segments) -> LoraStep:
        """Return the LoRA part of a recorded forward pass. The contents of the segments may change later.

        Args:
            names: the projections to include. Each needs a kernel launch in every step, even if no adapter of the step
                changes it.
            segments: segments of ``StaticSegments``, filled before each replay.
        """
        return LoraStep({name: self._tables[name] for name in names}, segments, self._experts)

    def widest_step(self, rank: int, segments: Segments) -> LoraStep:
        """Return the LoRA part of a step with adapters of this rank in all products, to measure its memory."""
        tables = {name: table.widened(rank * len(table.sizes)) for name, table in self._tables.items()}
        return LoraStep(tables, segments, self._experts)

    @property
    def products(self) -> frozenset[str]:
        """Names of the grouped products of experts and of heads, each with one table for all of its projections."""
        return frozenset(self._experts)

    def reserve(self, rank: int) -> frozenset[str]:
        """Make launches wide enough for adapters of this rank. Returns the names of all tables except ``HEAD``."""
        names = frozenset(self._tables) - {HEAD}
        for name in names:
            table = self._tables[name]
            table.reserve(rank * len(table.sizes))
        return names

    def adapts_products(self, of_tokens: NDArray[np.int32]) -> bool:
        """Return whether an adapter of these tokens changes experts or heads."""
        return not self._used_by(of_tokens).isdisjoint(self._experts)

    def projections(self, of_tokens: NDArray[np.int32]) -> frozenset[str]:
        """Return the projections, except the head, that the adapters of these tokens change."""
        return self._used_by(of_tokens) - {HEAD}

    def _used_by(self, of_tokens: NDArray[np.int32]) -> frozenset[str]:
        counts = np.bincount(of_tokens - BASE)[1:]
        return frozenset().union(*(self._used[slot] for slot in np.flatnonzero(counts).tolist()))

    def _step(self, of_tokens: NDArray[np.int32], names: frozenset[str]) -> LoraStep | None:
        segments = make_segments(of_tokens, self._device) if names else None
        return None if segments is None else self.recorded_step(names, segments)


class _Arrival(NamedTuple):
    """An adapter whose copy is complete when ``mark`` is reached: the block of its factors, and its own weights."""

    block: Tensor
    own: OwnWeights | None
    mark: SideMark


def _to_device(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device, non_blocking=True)
