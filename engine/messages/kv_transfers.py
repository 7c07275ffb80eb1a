"""Messages about KV that goes from one replica to another: pages as blocks, see ``engine.kv_cache.block_codec``."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from ...radix.namespace import Path
from ..types import KvPrefix


@dataclass(frozen=True, slots=True)
class FetchKv:
    """Ask for pages of a waiting sequence that another replica is likely to have; answered by ``KvBlocks``.

    Attributes:
        id: id of the sequence on the replica where it waits.
        path: its namespaces.
        tokens: tokens up to the end of the last page that is asked for, ``array('i')``.
        first: index of the first page that is asked for.
    """

    id: int
    path: Path
    tokens: array[int]
    first: int


@dataclass(frozen=True, slots=True)
class ReadKv:
    """Request to read pages that are in the prefix cache. Answered by one or more ``KvBlocks``.

    Attributes:
        id: id of the answers.
        path, tokens, first: as in ``FetchKv``; without a path, the pages of the prompt of ``follows``.
        follows: id of a sequence on this replica whose prompt is being computed: its pages are sent as they are
            completed, until its first token is drawn or it ends. 0 to read only pages that are cached now.
    """

    id: int
    path: Path | None
    tokens: array[int]
    first: int
    follows: int = 0


@dataclass(frozen=True, slots=True)
class ListPrefixes:
    """List prefixes that are worth a copy to other replicas, answered by ``CachedPrefixes``.

    Attributes:
        of_sessions: whether to list the prefixes that sessions hold, the last used one first; otherwise the prefixes
            that were hit most often are listed.
    """

    id: int
    of_sessions: bool


@dataclass(frozen=True, slots=True)
class CachedPrefixes:
    """The prefixes that ``ListPrefixes`` asks for, in its order: no more than another replica has room for."""

    id: int
    prefixes: tuple[KvPrefix, ...]


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """Pages in the order of their tokens, sent by a replica and then passed on to another one.

    Attributes:
        id: id of the ``ReadKv`` that the sender answers. In the message to the other replica: id of its ``FetchKv``, or
            0 for pages that it has not requested.
        blocks: the encoded pages.
        is_last: whether this is the last message of the answer.
    """

    id: int
    blocks: tuple[bytes, ...]
    is_last: bool
