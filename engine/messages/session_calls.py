"""Messages about the KV of sessions between their calls."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SESSION_BYTES = 192 << 20
"""Of the KV in a session's file, which goes between processes in one frame."""
MAX_IMPORT_BYTES = 240 << 20
"""Of such a file: with the tokens and names of its pages."""


@dataclass(frozen=True, slots=True)
class ReleaseSession:
    """End a session: KV that only it has used is evicted first. A ``SessionReply`` has the number of held sessions."""

    id: int
    tenant: str
    session: str


@dataclass(frozen=True, slots=True)
class ExportSession:
    """Return a session's KV as a file, answered by ``SessionReply`` with its tokens; none where it is not held."""

    id: int
    tenant: str
    session: str


@dataclass(frozen=True, slots=True)
class ImportSession:
    """Take a session from a file, answered by ``SessionReply`` with the tokens cached; 0 if it does not match."""

    id: int
    data: bytes


@dataclass(frozen=True, slots=True)
class SessionReply:
    """Result of the three: a number, and the file of an export."""

    id: int
    count: int
    data: bytes = b""
