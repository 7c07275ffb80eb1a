"""Session files: a request that was paused, with the KV of its tokens behind it as in a prefix file.

magic 8 bytes, length and CRC-32 of the head 4 bytes each, head, blocks of ``prefix_files``
"""

from __future__ import annotations

from pathlib import Path as FilePath
from struct import Struct
from zlib import crc32

_START = Struct("<8sII")
_MAGIC = b"RGSESS01"
_MOST_HEAD_BYTES = 1 << 28


def pack_head(head: bytes) -> bytes:
    """Return what a session file begins with."""
    return _START.pack(_MAGIC, len(head), crc32(head)) + head


def read_head(file: FilePath) -> tuple[bytes, int] | None:
    """Return the head of a session file, and where its blocks begin; None for another or a damaged file.

    Raises:
        OSError: the file cannot be read.
    """
    with open(file, "rb") as source:
        start = source.read(_START.size)
        if len(start) < _START.size:
            return None
        magic, length, checksum = _START.unpack(start)
        if magic != _MAGIC or length > _MOST_HEAD_BYTES:
            return None
        head = source.read(length)
    return (head, _START.size + length) if len(head) == length and crc32(head) == checksum else None
