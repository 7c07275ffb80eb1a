"""Messages about adapters: calls, replies to them, and changes."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import AdapterInfo
from .sequences import Failed


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load an adapter under a name. ``id`` is the client's, unique among its unanswered calls.

    Attributes:
        path: folder of the adapter. It must lie below the folder of adapters unless it is trusted, like the folder of a
            downloaded adapter.
        replace: whether the name may be in use; later sequences then get the new version.
        num_tokens: number of tokens of the tokenizer in the folder: an embedding of the adapter's own must have a row
            for each; 0 without a tokenizer.
        of: name of which the adapter is a version; all versions of a name count as one name. "" for ``name``.
        tenant: tenant whose share of the loads is used.
    """

    id: int
    name: str
    path: str
    replace: bool = False
    trusted: bool = False
    num_tokens: int = 0
    of: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Unload a name. Running sequences keep the adapter until they end."""

    id: int
    name: str


@dataclass(frozen=True, slots=True)
class ListAdapters:
    """List all adapters and their state."""

    id: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Result of ``LoadAdapter``, ``UnloadAdapter`` or ``ResetCache``: None if done."""

    id: int
    failure: Failed | None


@dataclass(frozen=True, slots=True)
class Adapters:
    """Result of ``ListAdapters``, in order of the names' first load."""

    id: int
    adapters: tuple[AdapterInfo, ...]


@dataclass(frozen=True, slots=True)
class AdapterChanged:
    """An adapter was loaded, replaced, or unloaded (None)."""

    name: str
    info: AdapterInfo | None
