"""Block codec: encodes a page of KV or a recurrent state as self-describing bytes, and decodes and checks them.

    preamble 32 bytes   magic, version, flags, bytes of header and of payload, nonce
    header              JSON: all that the page's KV depends on; padded, so that the payload begins at 4,096
    payload             K, then V, in the order of the pool; or the states of all layers
    seal 16 bytes       CRC-32 of everything before it; with a key the tag of AES-GCM, which encrypts header and payload

A block is read for a known page, and its header must equal that page's header in every byte. Bytes that were cut,
changed, exchanged, or written with another key or format are not a block: the read is a miss.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from struct import Struct
from typing import Any
from zlib import crc32

from ...radix.namespace import Namespace, Origin
from .block_keys import FORMAT_VERSION, BlockId, BlockScheme

Buffer = bytes | bytearray | memoryview

MAGIC = b"RGKVPAGE"
ALIGNMENT = 4096
SEAL_BYTES = 16
MOST_HEADER_BYTES = 1 << 20
_PREAMBLE = Struct("<8sHHIL12x")
PREAMBLE_BYTES = 32
_NONCE = slice(20, 32)
_SEALED = 1  # flag of a block under AES-GCM
_STATE = "state"


class NotABlock(Exception):
    """Bytes that are not the block that is wanted: a miss. The message says what differs."""


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Encodes and decodes blocks of one scheme.

    Args:
        scheme: form and page size, which every header names.
        key: key of AES-GCM, 32 bytes; empty for plain blocks. Each tenant's blocks have a key of their own that follows
            from it.
    """

    scheme: BlockScheme
    key: bytes = field(default=b"", repr=False)

    def header(self, block: BlockId) -> bytes:
        """Return the header of a block, padded."""
        fields = {
            "version": FORMAT_VERSION,
            "form": self.scheme.form,
            "page_size": self.scheme.page_size,
            "position": block.position,
            "key": block.key.hex(),
            "parent": block.parent.hex(),
            **_origin_fields(block.origin),
            "tokens": array("i", block.tokens).tolist(),
            **({"kind": _STATE} if block.is_state else {}),
        }
        text = json.dumps(fields).encode()
        return text + b" " * (-(len(text) + PREAMBLE_BYTES) % ALIGNMENT)

    def encode(self, block: BlockId, payload: Buffer) -> list[Buffer]:
        """Return the parts of an encoded block in order. ValueError for a payload of another size."""
        if len(payload) != self.scheme.payload_bytes(block):
            raise ValueError(f"the block has {self.scheme.payload_bytes(block)} bytes, not {len(payload)}")
        header = self.header(block)
        if self.key:
            nonce = os.urandom(12)
            preamble = block_preamble(_SEALED, len(header), len(payload), nonce)
            return [preamble, self._cipher(block.origin.namespace.tenant).encrypt(nonce, header + payload, preamble)]
        preamble = block_preamble(0, len(header), len(payload), bytes(12))
        return [preamble + header, payload, block_checksum(preamble, header, payload)]

    def decode(self, block: BlockId, data: Buffer) -> memoryview:
        """Return the payload of an encoded block, if that is the one that is wanted. Raises NotABlock."""
        header, payload = self._open(data, block.origin.namespace.tenant)
        if header != self.header(block):
            raise NotABlock("it holds other tokens, another namespace or another format")
        self._check_size(block, payload)
        return payload

    def read(self, data: Buffer, tenant: str) -> tuple[BlockId, memoryview]:
        """Return the block that the header of encoded bytes names, and the payload. Raises NotABlock.

        The block's key is computed from the header's other fields. The importer must check the chain of parents.

        Args:
            tenant: tenant whose key decrypts it.
        """
        header, payload = self._open(data, tenant)
        if len(header) > MOST_HEADER_BYTES:
            raise NotABlock("its header is too long")
        try:
            # Whoever made the file may have made all of it up, and its checksum too.
            block = _block_of(json.loads(bytes(header)))
            is_ours, is_named = bytes(header) == self.header(block), self.scheme.names(block)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise NotABlock("its header is not readable") from error
        if not is_ours:
            raise NotABlock("it has another format of KV")
        if not is_named:
            raise NotABlock("its name does not follow from its content")
        self._check_size(block, payload)
        return block, payload

    def _check_size(self, block: BlockId, payload: memoryview) -> None:
        if len(payload) != self.scheme.payload_bytes(block):
            raise NotABlock(f"it has {len(payload)} bytes, not {self.scheme.payload_bytes(block)}")

    def _open(self, data: Buffer, tenant: str) -> tuple[memoryview, memoryview]:
        """Return header and payload. Raises NotABlock."""
        view = memoryview(data)
        header_bytes, payload_bytes = check_preamble(view, sealed=bool(self.key))
        preamble, body = view[:PREAMBLE_BYTES], view[PREAMBLE_BYTES:]
        if len(body) != header_bytes + payload_bytes + SEAL_BYTES:
            raise NotABlock("it is truncated or too long")
        if self.key:
            body = self._decrypt(tenant, preamble, body)
        elif body[-SEAL_BYTES:] != block_checksum(preamble, body[:header_bytes], body[header_bytes:-SEAL_BYTES]):
            raise NotABlock("its checksum is another one")
        return body[:header_bytes], body[header_bytes : header_bytes + payload_bytes]

    def _decrypt(self, tenant: str, preamble: memoryview, body: memoryview) -> memoryview:
        from cryptography.exceptions import InvalidTag

        try:
            return memoryview(self._cipher(tenant).decrypt(bytes(preamble[_NONCE]), body, preamble))
        except InvalidTag:
            raise NotABlock("it was changed, or written with another key") from None

    def _cipher(self, tenant: str) -> Any:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(
            blake2b(
                tenant.encode("utf-8", "surrogatepass"), key=self.key, person=b"rootgraft tenant", digest_size=32
            ).digest()
        )


def check_preamble(view: memoryview, *, sealed: bool) -> tuple[int, int]:
    """Return the bytes of header and payload. Raises NotABlock."""
    if len(view) < PREAMBLE_BYTES:
        raise NotABlock("it is cut")
    magic, version, flags, header_bytes, payload_bytes = _PREAMBLE.unpack_from(view)
    if magic != MAGIC or version != FORMAT_VERSION:
        raise NotABlock("it is of another format")
    if flags != (_SEALED if sealed else 0):
        raise NotABlock("it is encrypted" if flags == _SEALED else "it is not encrypted")
    return header_bytes, payload_bytes


def describe(read: Callable[[int], bytes]) -> dict[str, Any] | None:
    """Return the header's fields of a plain block, to show to people; None for an encrypted one.

    Args:
        read: returns the next bytes of the block.

    Raises:
        NotABlock: the bytes are not a block.
    """
    preamble = memoryview(read(PREAMBLE_BYTES))
    try:
        header_bytes, _ = check_preamble(preamble, sealed=False)
    except NotABlock:
        check_preamble(preamble, sealed=True)
        return None
    try:
        fields: dict[str, Any] = json.loads(read(min(header_bytes, MOST_HEADER_BYTES)))
    except (ValueError, RecursionError) as error:
        raise NotABlock("its header is not readable") from error
    return fields


def block_size(preamble: Buffer) -> int:
    """Return the size of the block that begins so. Raises NotABlock."""
    view = memoryview(preamble)
    try:
        header_bytes, payload_bytes = check_preamble(view, sealed=False)
    except NotABlock:
        header_bytes, payload_bytes = check_preamble(view, sealed=True)
    return PREAMBLE_BYTES + header_bytes + payload_bytes + SEAL_BYTES


def block_preamble(flags: int, header_bytes: int, payload_bytes: int, nonce: bytes) -> bytes:
    """Return the beginning of a block."""
    return _PREAMBLE.pack(MAGIC, FORMAT_VERSION, flags, header_bytes, payload_bytes)[:20] + nonce


def block_checksum(*parts: Buffer) -> bytes:
    """Return the checksum at the end of an unencrypted block, computed from its other parts in order."""
    value = 0
    for part in parts:
        value = crc32(part, value)
    return value.to_bytes(4, "little") + bytes(SEAL_BYTES - 4)


def _origin_fields(origin: Origin) -> dict[str, Any]:
    before = {} if origin.before is None else {"switch": origin.switch, "before": _namespace_fields(origin.before)}
    return {**_namespace_fields(origin.namespace), **before}


def _namespace_fields(namespace: Namespace) -> dict[str, Any]:
    return {
        "base": namespace.base,
        "adapter": namespace.adapter,
        "salt": namespace.salt,
        "tenant": namespace.tenant,
        "is_long": namespace.is_long,
    }


def _namespace(fields: dict[str, Any]) -> Namespace:
    """Return a namespace. Raises LookupError or TypeError for fields that are none of one."""
    found = Namespace(fields["base"], fields["adapter"], fields["salt"], fields["tenant"], fields["is_long"])
    texts = (found.base, "" if found.adapter is None else found.adapter, found.salt, found.tenant)
    if not (all(isinstance(each, str) for each in texts) and isinstance(found.is_long, bool)):
        raise TypeError("a field has another type")
    return found


def _block_of(fields: dict[str, Any]) -> BlockId:
    """Return the page of a header. Raises an error of lookups, types or values for an invalid header."""
    before = _namespace(fields["before"]) if "before" in fields else None
    return BlockId(
        bytes.fromhex(fields["key"]),
        bytes.fromhex(fields["parent"]),
        Origin(_namespace(fields), int(fields.get("switch", 0)), before),
        int(fields["position"]),
        array("i", fields["tokens"]).tobytes(),
        fields.get("kind") == _STATE,
    )
