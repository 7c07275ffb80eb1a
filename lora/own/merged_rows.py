"""Merging of LoRA into an embedding or a head that comes with the adapter: no other adapter reads it."""

from __future__ import annotations

from torch import Tensor

from ..base_projections import EMBEDDING
from ..errors import AdapterError
from ..published.module_weights import ModuleWeights
from ..published.saved_modules import TokenRows


def merged_rows(name: str, rows: TokenRows, module: ModuleWeights) -> TokenRows:
    """Return ``W + scale B A`` in fp32, with DoRA's magnitude, for the whole embedding or head W [V, H].

    Raises:
        AdapterError: DoRA divides by a norm that is zero.
    """
    assert rows.ids is None
    a, b = module.a.float(), module.b.float()
    delta = a.T @ b.T if name == EMBEDDING else b @ a
    merged: Tensor = rows.rows.float() + module.scale * delta
    if module.magnitude is not None:
        # One magnitude for each output: the columns of an embedding, the rows of a head.
        norm = merged.norm(dim=0, keepdim=True) if name == EMBEDDING else merged.norm(dim=1, keepdim=True)
        if not (norm > 0).all():
            raise AdapterError(f"DoRA of {name} divides by the norm of a row that is zero.", name)
        magnitude = module.magnitude.float()
        merged *= (magnitude[None, :] if name == EMBEDDING else magnitude[:, None]) / norm
    return TokenRows(merged)
