"""Prefix files: store the KV of one prompt's whole pages, block after block, to load it in another process.

In a model with recurrent states the state after the last page is the last block.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import BinaryIO

from ...radix.namespace import Namespace, Path
from ..whole_file import open_private
from .block_codec import (
    ALIGNMENT,
    MOST_HEADER_BYTES,
    PREAMBLE_BYTES,
    SEAL_BYTES,
    BlockCodec,
    Buffer,
    NotABlock,
    block_size,
)
from .block_keys import BlockId

_UNFINISHED = ".part"


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A prefix with its KV.

    Attributes:
        path: the namespaces of its tokens.
        tokens: int32, of whole pages.
        payloads: the bytes of each page.
        state: bytes of the recurrent state after the last token; None in a model without recurrent states.
    """

    path: Path
    tokens: array[int]
    payloads: Sequence[Buffer]
    state: Buffer | None = None


def write_prefix(
    file: FilePath,
    codec: BlockCodec,
    blocks: Sequence[BlockId],
    payload_of: Callable[[int], Buffer],
    head: bytes = b"",
) -> None:
    """Write a file under a temporary name and rename it. Raises OSError.

    Args:
        blocks: the pages of a prefix from the first one on, then the state in a model with recurrent states.
        payload_of: returns the bytes of a block by its index.
        head: head of a session file; empty for a prefix alone.
    """
    unfinished = file.with_name(file.name + _UNFINISHED)
    try:
        with open(unfinished, "wb", opener=open_private) as out:
            write_blocks(out, codec, blocks, payload_of, head)
        unfinished.rename(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_blocks(
    out: BinaryIO,
    codec: BlockCodec,
    blocks: Sequence[BlockId],
    payload_of: Callable[[int], Buffer],
    head: bytes = b"",
) -> None:
    """Write a prefix; arguments as of ``write_prefix``."""
    out.write(head)
    for index, block in enumerate(blocks):
        for part in codec.encode(block, payload_of(index)):
            out.write(part)


def read_prefix(file: FilePath, codec: BlockCodec, base: str, tenant: str, *, offset: int = 0) -> StoredPrefix | None:
    """Read a prefix of a file, where ``read_blocks`` begins at ``offset``. Raises OSError: it cannot be read."""
    with open(file, "rb") as source:
        source.seek(offset)
        return read_blocks(source, codec, base, tenant)


def read_blocks(source: BinaryIO, codec: BlockCodec, base: str, tenant: str) -> StoredPrefix | None:
    """Read a prefix from the start of its blocks; None if the file has no block of this base model, tenant and form.

    The first page that is damaged, or does not continue the page before, ends the prefix. In a model with recurrent
    states, all pages are returned or none.

    Args:
        base: digest of the base model.
    """
    blocks: list[BlockId] = []
    payloads: list[Buffer] = []
    state: Buffer | None = None
    # A file says how long its blocks are, and memory is taken for no more than one of ours has.
    most = max(codec.scheme.page_bytes, codec.scheme.state_bytes)
    most += PREAMBLE_BYTES + MOST_HEADER_BYTES + ALIGNMENT + SEAL_BYTES
    for data in _blocks(source, most):
        try:
            block, payload = codec.read(data, tenant)
        except NotABlock:
            break
        before = blocks[-1].key if blocks else codec.scheme.root
        if block.is_state:
            state = payload if blocks and block == codec.scheme.state(blocks[-1]) else None
            break
        if block.parent != before or block.position != len(blocks) * codec.scheme.page_size:
            break
        blocks.append(block)
        payloads.append(payload)
    if codec.scheme.state_bytes and state is None:
        return None
    path = _path_of(blocks)
    if path is None or any((each.base, each.tenant) != (base, tenant) for each in path.namespaces):
        return None
    tokens = array("i")
    tokens.frombytes(b"".join(block.tokens for block in blocks))
    keys: list[bytes] = []
    codec.scheme.extend(keys, path, tokens.tobytes(), len(blocks))
    return StoredPrefix(path, tokens, payloads, state) if keys == [block.key for block in blocks] else None


def _blocks(source: BinaryIO, most: int) -> Iterator[memoryview]:
    """Yield the bytes of each block up to the first that is cut, or has more than ``most`` bytes."""
    while len(preamble := source.read(PREAMBLE_BYTES)) == PREAMBLE_BYTES:
        try:
            size = block_size(preamble)
        except NotABlock:
            return
        if size > most:
            return
        rest = source.read(size - PREAMBLE_BYTES)
        yield memoryview(preamble + rest)


def _path_of(blocks: Sequence[BlockId]) -> Path | None:
    """Return the path of a prefix by the namespaces of its pages; None for no path."""
    if not blocks:
        return None
    last = blocks[-1].origin.namespace
    before, switch_at = _switch(blocks, last)
    return None if before == last else Path(last, switch_at, before)


def _switch(blocks: Sequence[BlockId], last: Namespace) -> tuple[Namespace | None, int]:
    """Return the namespace before the switch and its position; None and 0 without one."""
    for block in blocks:
        if block.origin.before is not None:
            return block.origin.before, block.position + block.origin.switch
        if block.origin.namespace == last:
            return (blocks[0].origin.namespace, block.position) if block.position else (None, 0)
    return None, 0
