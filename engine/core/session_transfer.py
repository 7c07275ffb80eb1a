"""Session transfer: exports a session's KV between two calls as a file, and imports it. Called on the core's thread.

A file has these parts: magic, length and checksum of the head, the head as JSON, and the blocks of ``prefix_files``.
The head names the tenant, the session, and the weights that computed the KV. The blocks repeat these names. With
encryption, only the key of the same tenant decrypts the blocks.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import Any

from ...kernels.device_memory import DeviceMemoryError, on_device
from ...radix.namespace import Path
from ..errors import CapacityError, ConfigError, RequestError
from ..kv_cache.session_files import KEPT_MAGIC, pack_head, read_head_of
from ..messages import ExportSession, ImportSession, ReleaseSession, Reply, SessionReply, failure_of
from ..messages.session_calls import MAX_SESSION_BYTES
from ..scheduling.session_pins import SessionPins
from ..types import MAX_SESSION_NAME
from .prefix_transfer import PrefixTransfer

_VERSION = 1
# Clients choose session names, so a name may be any text.
_NAME = re.compile(rf"[^\ud800-\udfff]{{0,{MAX_SESSION_NAME}}}")


class SessionTransfer:
    """Releases, exports and imports the sessions of one engine.

    Args:
        pins: pins of the sessions that are held.
        open_transfer: returns the object that saves and loads KV; raises ConfigError if KV cannot be stored outside of
            the pool.
        base: digest of the base model.
        has_adapter: returns whether an adapter with the given digest is loaded.
    """

    def __init__(
        self,
        pins: SessionPins,
        open_transfer: Callable[[], PrefixTransfer],
        base: str,
        has_adapter: Callable[[str], bool],
    ) -> None:
        self._pins = pins
        self._open_transfer = open_transfer
        self._base = base
        self._has_adapter = has_adapter

    def reply(self, call: ReleaseSession | ExportSession | ImportSession) -> SessionReply | Reply:
        """Return the reply to a call; an error is returned as a ``Reply``."""
        try:
            return on_device(self.answer, call)
        except (RequestError, ConfigError) as error:
            known = error if isinstance(error, RequestError) else RequestError(str(error))
            return Reply(call.id, failure_of(call.id, known))
        except DeviceMemoryError:
            full = CapacityError("There is no memory to copy the session's KV now: ask again later.")
            return Reply(call.id, failure_of(call.id, full))

    def answer(self, call: ReleaseSession | ExportSession | ImportSession) -> SessionReply:
        """Return the reply to a call. Raises RequestError, ConfigError."""
        if isinstance(call, ReleaseSession):
            return SessionReply(call.id, int(self.release(call.tenant, call.session)))
        if isinstance(call, ExportSession):
            return SessionReply(call.id, *self.export(call.tenant, call.session))
        return SessionReply(call.id, self.load(call.data))

    def release(self, tenant: str, session: str) -> bool:
        """End a tenant's session, so that its KV is evicted first. Returns whether the session existed."""
        return self._pins.release(tenant, session)

    def size(self, tenant: str, session: str) -> int:
        """Return the approximate size in bytes of the KV that a session holds; 0 if the session does not exist."""
        held = self._pins.find(tenant, session)
        return 0 if held is None else self._open_transfer().size(len(held[1]))

    def export(self, tenant: str, session: str) -> tuple[int, bytes]:
        """Return the number of tokens whose KV a session holds, and the KV as a file. Returns (0, b"") without KV.

        Raises:
            RequestError: the file would be too large.
            ConfigError: the KV of this model cannot be stored outside of the pool.
        """
        transfer, held = self._open_transfer(), self._pins.find(tenant, session)
        if held is None:
            return 0, b""
        path, tokens = held
        if (size := transfer.size(len(tokens))) > MAX_SESSION_BYTES:
            raise RequestError(
                f"The session has about {size} bytes of KV, but a file holds at most {MAX_SESSION_BYTES}: keep the "
                "session with --kv-disk, and move that folder with 'rootgraft cache export'.",
                param="prompt_cache_key",
            )
        out = io.BytesIO()
        num_tokens = transfer.write(path, tokens, out, pack_head(self._head(tenant, session, path), KEPT_MAGIC))
        return num_tokens, out.getvalue()

    def _head(self, tenant: str, session: str, path: Path) -> bytes:
        namespace = path.namespace
        fields = {
            "version": _VERSION,
            "base": namespace.base,
            "adapter_digest": namespace.adapter or "",
            "tenant": tenant,
            "cache_tenant": namespace.tenant,
            "session": session,
        }
        return json.dumps(fields).encode()

    def load(self, data: bytes) -> int:
        """Load the KV of a session's file into the prefix cache, and pin it for the session.

        Returns:
            Number of tokens whose KV is now cached. 0 if the file is damaged, is for another base model, KV format or
            key, or needs an adapter that is not loaded with the same content.

        Raises:
            ConfigError: the KV of this model cannot be stored outside of the pool.
        """
        transfer, source = self._open_transfer(), io.BytesIO(data)
        fields = _fields_of(read_head_of(source, KEPT_MAGIC))
        if fields is None or fields["base"] != self._base:
            return 0
        if fields["adapter_digest"] and not self._has_adapter(fields["adapter_digest"]):
            return 0
        path, tokens = transfer.read(source, fields["cache_tenant"])
        if path is None or (path.namespace.adapter or "") != fields["adapter_digest"]:
            return 0
        self._pins.hold(fields["tenant"], fields["session"], path, tokens)
        return len(tokens)


def _fields_of(head: bytes | None) -> dict[str, str] | None:
    """Return the fields of a head; None if the head is missing, has another version, or contains invalid names."""
    try:
        fields: Any = json.loads(head or b"null")
    except (ValueError, RecursionError):
        return None
    names = ("base", "adapter_digest", "tenant", "cache_tenant", "session")
    is_whole = isinstance(fields, dict) and fields.get("version") == _VERSION
    values = [fields.get(name) for name in names] if is_whole else []
    is_named = all(isinstance(value, str) and _NAME.fullmatch(value) for value in values)
    return fields if is_whole and is_named and fields["session"] else None
