"""``KvPool``: the caches of all layers, paged K and V; ``KvPrefault``: allocates their memory ahead on a CPU."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.layouts import int8_kv_layout, kv_forms
from ...kernels.memory import copy_pages, populate, zeros
from ..batch import Batch, PageCopy, PageLoad, PoolWrite, StateLoad
from ..checkpoint.model_config import KvShape, ModelShape
from .hidden_pool import HiddenPool
from .state_pool import LayerStates, StatePool

# Bytes of a layer that are populated at once: one huge page, as other threads that allocate memory may have to wait.
_POPULATED_AT_ONCE = 1 << 21
_AHEAD_TOKENS, _AHEAD_BYTES = 1 << 15, 1 << 30  # tokens and bytes that are populated ahead; the smaller limit counts
_IDLE = 0.25  # seconds without a step after which the engine counts as idle
_NICENESS = 10  # added to the niceness of the populating thread


def bytes_per_page(config: ModelShape, page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page of ``page_size`` tokens in all layers that store K and V, or latent vectors."""
    caches = 2 if config.latent is None else 1
    cells = sum(len(layers) * shape.heads * _width(shape, dtype) for shape, layers in _layers_by_shape(config).items())
    index_keys = sum(dim for dim in config.index_keys if dim is not None)
    return (caches * cells + index_keys) * page_size * dtype.itemsize


def _layers_by_shape(config: ModelShape) -> dict[KvShape, list[int | None]]:
    """Return the layers that store K and V, grouped by the shape of their K and V.

    A model without such layers has one shape with an empty list, because pages also count its tokens.
    """
    found: dict[KvShape, list[int | None]] = {}
    for index, shape in enumerate(config.kv_shapes):
        if shape is not None:
            found.setdefault(shape, []).append(index)
    return found or {KvShape(config.num_kv_heads, config.head_dim): [None]}


def _width(shape: KvShape, dtype: torch.dtype) -> int:
    """Return the last dimension of the pool's tensors."""
    return shape.dim + (int8_kv_layout.SCALE_BYTES if kv_forms.has_scales(dtype) else 0)


class PagedCaches(NamedTuple):
    """The caches of all layers with the same shape of K and V, or the index keys of all layers with an index.

    Attributes:
        k: [layers, num_pages, KV heads, page_size, dimensions of a head], or an 8-bit form (``kv_forms``).
        v: the same; None for latent attention, whose keys begin with the values, and for index keys.
    """

    k: Tensor
    v: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """K, followed by V if there is one."""
        return (self.k,) if self.v is None else (self.k, self.v)


class KvPool:
    """K and V of every page, written by the kernels of a forward pass and by ``copy``.

    A page has cells in every layer that stores K and V. If some layers have another number or size of heads (Gemma 4),
    their caches are a separate tensor. A layer that reads the K and V of another layer has no cells. A layer with an
    index has cells for its index keys beside its latent vectors, or beside its K and V.

    Args:
        dtype: type of the cells: the model's, or an 8-bit type (``kv_forms``).
        states: states of the layers with a recurrent state; None for a model without such layers.
        hidden: hidden states for a draft head; None without one.

    Attributes:
        caches: caches of the layers of each shape, in the order of their first layers; most models have one shape.
        k_layers: keys layer by layer, each [num_pages, KV heads, page_size, dimensions of a head]. A layer that reads
            another layer's keys has that layer's tensor. A layer with a recurrent state has its states here and in
            ``v_layers``; a layer with neither has empty tensors.
        v_layers: values layer by layer; with latent attention ``k_layers``, or the index keys of a layer with an index.
        beside: states of the layers that also have attention; index keys, twice, of the layers that also have K and V.
        dtype: type of K and V.
        page_bytes: bytes of a page in all layers, its hidden states included.
        states: states of the layers with a recurrent state, as given.
        state_bytes: bytes of a recurrent state in all layers.
    """

    def __init__(
        self,
        config: ModelShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: StatePool | None = None,
        hidden: HiddenPool | None = None,
    ) -> None:
        by_shape = _layers_by_shape(config)
        count = 2 if config.latent is None else 1
        sizes = (
            (len(layers), num_pages, shape.heads, page_size, _width(shape, dtype)) for shape, layers in by_shape.items()
        )
        # Pools are filled with zeros first: attention multiplies the V of masked positions by 0, and 0 * NaN is NaN.
        pools = ([zeros(size, dtype, device) for _ in range(count)] for size in sizes)
        self.caches = tuple(PagedCaches(k, *v) for k, *v in pools)
        self._num_shapes = len(self.caches)
        stored: dict[int | None, LayerStates] = {}
        index_keys: dict[int, LayerStates] = {}
        for layers, caches in zip(by_shape.values(), self.caches, strict=True):
            k = caches.k.unbind(0)
            stored |= dict(zip(layers, zip(k, k if caches.v is None else caches.v.unbind(0), strict=True), strict=True))
        # The index keys have the same size in all layers.
        if with_index := {index: dim for index, dim in enumerate(config.index_keys) if dim is not None}:
            dim = max(with_index.values())
            keys = zeros((len(with_index), num_pages, 1, page_size, dim), dtype, device)
            self.caches += (PagedCaches(keys),)
            of_layers = dict(zip(with_index, keys.unbind(0), strict=True))
            if config.latent is None:
                index_keys = {at: (own, own) for at, own in of_layers.items()}
            else:
                stored |= {at: (stored[at][0], own) for at, own in of_layers.items()}
        recurrent = states.layers if states is not None else {}
        nothing = self.caches[0].k[0, :0]
        found = [
            recurrent.get(index, (nothing, nothing)) if source is None else stored[source]
            for index, source in enumerate(config.kv_sources)
        ]
        self.k_layers, self.v_layers = (tuple(each) for each in zip(*found, strict=True))
        self.beside = {i: states for i, states in recurrent.items() if config.kv_sources[i] is not None} | index_keys
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.page_bytes = bytes_per_page(config, page_size, dtype) + (hidden.page_bytes if hidden is not None else 0)
        self.hidden = hidden
        self.states = states
        self.state_bytes = 0 if states is None else states.state_bytes
        self._device = device
        self._stream: torch.cuda.Stream | None = None  # the stream on which pages of a GPU are read

    @property
    def attended(self) -> list[Tensor]:
        """A layer's keys for each shape of K and V, without index keys."""
        return [each.k[0] for each in self.caches[: self._num_shapes]]

    @property
    def form(self) -> str:
        """Number format and shape of a page and a state: only a pool of the same form can load their bytes."""
        kind = "latent" if self.caches[0].v is None else "k,v"
        shapes = (each.k.shape for each in self.caches)
        sizes = "+".join(f"{layers}x{heads}x{size}x{width}" for layers, _, heads, size, width in shapes)
        states = "" if self.states is None else f" states {self.states.form}"
        return f"{kv_forms.form_name(self.dtype)} {kind} {sizes}{states}"

    def copy(self, copies: Sequence[PoolWrite]) -> None:
        """Perform copies and loads in their order. Raises IndexError for a page, slot or count outside the pool."""
        # Most steps have no copies.
        if not copies:
            return
        for kind, group in groupby(copies, type):
            if kind is PageLoad:
                self._load([each for each in group if isinstance(each, PageLoad)])
            elif kind is StateLoad:
                self._load_states([each for each in group if isinstance(each, StateLoad)])
            else:
                self._copy([each for each in group if isinstance(each, PageCopy)])

    def read_page(self, page: int) -> memoryview:
        """Return a copy of a page's K, then V, of all layers. Another thread may compute meanwhile.

        On a GPU the copy runs beside the steps and waits for none of them: the step that wrote the page must have been
        read back, as it has for pages in the tree.
        """
        if self._device.type == "cpu":
            parts = [_bytes_of(cache)[:, page] for cache in self._tensors]
            data = np.empty(sum(part.nbytes for part in parts), np.uint8)
            for part, target in zip(parts, _parts(data, parts), strict=True):
                np.copyto(target, part)
            return data.data
        with torch.cuda.stream(self._read_stream()):
            pages = [cache[:, page].flatten().view(torch.uint8) for cache in self._tensors]
            return torch.cat(pages).cpu().numpy().data

    def read_state(self, slot: int) -> memoryview:
        """Return a copy of a recurrent state, like ``read_page`` for a page."""
        assert self.states is not None
        if self._device.type == "cpu":
            return self.states.read(slot)
        with torch.cuda.stream(self._read_stream()):
            return self.states.read(slot)

    def _read_stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        return self._stream

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for caches in self.caches for tensor in caches.tensors)

    def _load(self, loads: Sequence[PageLoad]) -> None:
        """Fill pages with bytes from ``read_page``."""
        for load in loads:
            data = np.frombuffer(load.payload, np.uint8)
            if not 0 <= load.page < self.num_pages or data.nbytes != self.page_bytes:
                raise IndexError(f"page {load.page} with {data.nbytes} bytes is not a page of the pool")
            if self._device.type == "cpu":
                parts = [_bytes_of(cache)[:, load.page] for cache in self._tensors]
                for part, source in zip(parts, _parts(data, parts), strict=True):
                    np.copyto(part, source)
                continue
            read = torch.from_numpy(data.copy()).to(self._device)
            start = 0
            for cache in self._tensors:
                target = cache[:, load.page]
                size = target.numel() * target.element_size()
                target.copy_(read[start : start + size].view(cache.dtype).view(target.shape))
                start += size

    def _load_states(self, loads: Sequence[StateLoad]) -> None:
        if self.states is None:
            raise IndexError("the pool has no recurrent states")
        for load in loads:
            self.states.load(load.slot, load.payload)

    def _copy(self, copies: Sequence[PageCopy]) -> None:
        source = [copy.source for copy in copies]
        target = [copy.target for copy in copies]
        count = [copy.num_tokens for copy in copies]
        for caches in self.caches:
            copy_pages(caches.k, caches.v, source, target, count)
        if self.hidden is not None:
            self.hidden.copy(source, target, count)

    def populate(self, first: int) -> int:
        """Let the operating system allocate memory for some pages from ``first`` on, before a step writes to them.

        Another thread may compute meanwhile.

        Returns:
            The first page without allocated memory; ``num_pages`` if the operating system cannot populate memory.
        """
        largest = max(tensor[0, 0].nbytes for tensor in self._tensors)
        end = min(first + max(1, _POPULATED_AT_ONCE // largest), self.num_pages)
        try:
            for tensor in self._tensors:
                for layer in tensor.unbind(0):
                    populate(layer[first:end])
        except OSError:
            return self.num_pages
        return end


def _bytes_of(cache: Tensor) -> NDArray[np.uint8]:
    """View a cache on the CPU as bytes, [layers, pages, heads, page_size, bytes of a row]."""
    return cache.view(torch.uint8).numpy()


def _parts(data: NDArray[np.uint8], like: Sequence[NDArray[np.uint8]]) -> Iterator[NDArray[np.uint8]]:
    """Yield views of consecutive bytes in the shapes of other arrays."""
    start = 0
    for part in like:
        yield data[start : start + part.nbytes].reshape(part.shape)
        start += part.nbytes


class KvPrefault:
    """Allocates the memory of a CPU's KV pool ahead of use, on a thread.

    The operating system allocates a page's memory at its first write. In a virtual machine, whose host may have to free
    that memory first, a GiB can take seconds, so that steps wait for tenths of a second. Therefore memory is allocated
    while the engine is idle, or once little is left, but only up to a limit beyond the highest page in use, because
    most pools are never filled. Unused pages are handed out in order (``PageAllocator``).
    """

    def __init__(self, kv: KvPool) -> None:
        self._kv = kv
        self._ahead = min(_AHEAD_TOKENS // kv.page_size, _AHEAD_BYTES // kv.page_bytes)
        # Written by the engine's thread: the number of pages up to the highest in use, and the time of the last step.
        self._used, self._last_step = 0, -_IDLE
        # Written by the populating thread: the number of pages that have memory.
        self._populated = 0
        self._threads: list[threading.Thread] = []  # the last one that was started
        # A thread that has found nothing left to do must not count as running when the target moves.
        self._lock, self._is_running = threading.Lock(), False
        self._ending = threading.Event()
        # A daemon that runs native code while the interpreter ends would abort the process, so the thread is ended
        # first.
        weakref.finalize(self, _end, self._ending, self._threads)
        self._start_thread()

    def reach(self, batch: Batch) -> None:
        """Record the pages that a step will write."""
        self._last_step = time.monotonic()
        with self._lock:
            self._used = max(self._used, *(1 + max(row.new_pages) for row in batch.rows if row.new_pages), 0)
            is_idle = not self._is_running and self._populated < self._target()
        if is_idle:
            self._start_thread()

    def _target(self) -> int:
        return min(self._used + self._ahead, self._kv.num_pages)

    def _start_thread(self) -> None:
        """Start a thread that ends at the target: a thread that waited for more work would keep the pool alive."""
        # On other systems niceness belongs to the whole process.
        if sys.platform == "linux":
            thread = threading.Thread(target=self._populate, name="kv-ahead", daemon=True)
            self._threads[:] = [thread]
            self._is_running = True
            thread.start()

    def _populate(self) -> None:
        os.nice(_NICENESS)
        while self._has_work():
            is_busy = time.monotonic() - self._last_step < _IDLE
            if is_busy and self._populated >= min(self._used + self._ahead // 4, self._kv.num_pages):
                time.sleep(_IDLE)
            else:
                self._populated = self._kv.populate(self._populated)

    def _has_work(self) -> bool:
        """Return whether the thread has more to do. If not, the next step that needs memory starts another one."""
        with self._lock:
            self._is_running = self._populated < self._target() and not self._ending.is_set()
            return self._is_running


def _end(ending: threading.Event, threads: Sequence[threading.Thread]) -> None:
    """End the populating thread, at the interpreter's exit or when the object is collected, perhaps on that thread."""
    ending.set()
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
