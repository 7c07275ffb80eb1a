"""``OwnWeightsMaker``: creates an adapter's own weights from the tensors that PEFT saved."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...kernels.layouts.packed_weights import PackedLinear
from ...kernels.ops import pack_linear_apart
from ..base_projections import EMBEDDING, HEAD, BaseLayout
from ..errors import AdapterError
from ..published.module_weights import ModuleWeights
from ..published.saved_modules import NormWeights, SavedModules, TokenRows
from .own_weights import OwnRows, OwnWeights, TokenPart, plain_linear


class OwnWeightsMaker:
    """Creates the own weights of adapters for one base model, on any thread. Equal matrices are created once.

    Args:
        layout: the base model.
    """

    def __init__(self, layout: BaseLayout) -> None:
        self._layout = layout
        self._shared: WeakValueDictionary[str, OwnRows] = WeakValueDictionary()

    def make(self, saved: SavedModules, modules: Mapping[str, ModuleWeights]) -> OwnWeights | None:
        """Convert an adapter's whole weights. Returns None if the adapter has none."""
        if not saved.tensors():
            return None
        parts = {}
        for name, rows in ((EMBEDDING, saved.embedding), (HEAD, saved.head)):
            merged = rows if rows is None or name not in modules else _merge_rows(name, rows, modules[name])
            parts[name] = None if merged is None else self._part(name, merged)
        norms = {name: NormWeights(*map(self._cast, (norm.weight, norm.bias))) for name, norm in saved.norms.items()}
        score = None if saved.score is None else saved.score.to(torch.float32, copy=True)
        if score is not None and not torch.isfinite(score).all():
            raise AdapterError("A weight of the classification head is not finite.")
        return OwnWeights(parts[EMBEDDING], parts[HEAD], norms, saved.vocab_size, score)

    def _part(self, name: str, rows: TokenRows) -> TokenPart:
        values = self._cast(rows.rows)
        assert values is not None
        # Only the CPU uses the packed layout for a head. On other devices, a head's rows are stored like an
        # embedding's.
        panels = name == HEAD and self._layout.device.type == "cpu"
        digest = hashlib.sha256(values.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()
        key = f"{digest}:{'panels' if panels else 'rows'}"
        own = self._shared.get(key)
        if own is None:
            own = OwnRows(key, None, pack_linear_apart(values)) if panels else OwnRows(key, *self._rows(values))
            own = self._shared.setdefault(key, own)
        return TokenPart(own, rows.ids)

    def _rows(self, values: Tensor) -> tuple[Tensor, PackedLinear | None]:
        if self._layout.device.type == "cpu":
            return values.clone(), None
        pinned = values.pin_memory() if self._layout.device.type == "cuda" else values
        return pinned, plain_linear(pinned)

    def _cast(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        values = tensor.to(self._layout.dtype, copy=True)
        if not torch.isfinite(values).all():
            raise AdapterError(f"A weight of modules_to_save is beyond the range of {self._layout.dtype}.")
        return values


def _merge_rows(name: str, rows: TokenRows, module: ModuleWeights) -> TokenRows:
    """Return ``W + scale B A`` in fp32, with DoRA's magnitude, for the whole embedding or head W [V, H].

    Only this adapter uses these rows, so no separate factors are needed.

    Raises:
        AdapterError: DoRA divides by a norm that is zero.
    """
    assert rows.ids is None
    a, b = module.a.float(), module.b.float()
    delta = a.T @ b.T if name == EMBEDDING else b @ a
    merged: Tensor = rows.rows.float() + module.scale * delta
    if module.magnitude is not None:
        # There is one magnitude per output: per column of an embedding, or per row of a head.
        norm = merged.norm(dim=0, keepdim=True) if name == EMBEDDING else merged.norm(dim=1, keepdim=True)
        if not (norm > 0).all():
            raise AdapterError(f"DoRA of {name} divides by the norm of a row that is zero.", name)
        magnitude = module.magnitude.float()
        merged *= (magnitude[None, :] if name == EMBEDDING else magnitude[:, None]) / norm
    return TokenRows(merged)
