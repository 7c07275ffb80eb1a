"""Session files: store a paused request, followed by the KV of its tokens as in a prefix file.

A file has these parts: 8 bytes of magic, length and CRC-32 of the head in 4 bytes each, the head, and the blocks of
``prefix_files``.
"""

from __future__ import annotations

from pathlib import Path as FilePath
from struct import Struct
from typing import BinaryIO
from zlib import crc32

_START = Struct("<8sII")
PAUSED_MAGIC = b"RGSESS01"
"""Of a request that was paused."""
KEPT_MAGIC = b"RGKEPT01"
"""Of a session between two calls."""
MOST_KEPT_HEAD = 1 << 14
"""Bytes of the head of one: a few names."""
_MOST_HEAD_BYTES = 1 << 28


def pack_head(head: bytes, magic: bytes = PAUSED_MAGIC) -> bytes:
    """Return the beginning of a session file."""
    return _START.pack(magic, len(head), crc32(head)) + head


def read_head(file: FilePath) -> tuple[bytes, int] | None:
    """Return the head of a session file and the offset of its blocks; None for another or a damaged file.

    Raises:
        OSError: the file cannot be read.
    """
    with open(file, "rb") as source:
        head = read_head_of(source, PAUSED_MAGIC)
        return None if head is None else (head, source.tell())


def read_head_of(source: BinaryIO, magic: bytes) -> bytes | None:
    """Read the head of a session file up to its blocks; None for another or a damaged file."""
    most = MOST_KEPT_HEAD if magic == KEPT_MAGIC else _MOST_HEAD_BYTES
    start = source.read(_START.size)
    if len(start) < _START.size:
        return None
    found, length, checksum = _START.unpack(start)
    if found != magic or length > most:
        return None
    head = source.read(length)
    return head if len(head) == length and crc32(head) == checksum else None
