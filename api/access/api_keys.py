"""API keys: reads the key file, which contains only digests, and finds the key of a request, with its scopes and
limits.

    [[keys]]
    name = "team-a"                   # in logs and metrics
    sha256 = "9f86d081884c7d65..."    # of the key, in hexadecimal
    tenant = "team-a"                 # shares KV and scheduling turns; default: the name
    scopes = ["inference"]            # of inference, metrics, admin; default: inference
    adapters = ["sql", "tickets"]     # by name; default: all, and the base model in any case
    requests_per_minute = 600         # default: no limit
    tokens_per_minute = 100000
    priority = "interactive"          # the default and the highest priority class of its requests

See ``docs/guide/keys-and-limits.md``. JSON has the same fields: ``{"keys": [{...}, ...]}``.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import shlex
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import AfterValidator, Field, ValidationError

from ...engine.errors import ConfigError
from ...engine.types import Priority
from ..protocol.base import StrictModel, rejected
from ..protocol.sampling import PriorityName, priority_of

MAX_KEYS = 4096
LOOK_SECONDS = 0.5
"""Shortest time in seconds between two checks whether the file has changed."""
_MAX_FILE_BYTES = 4 << 20
_MAX_PER_MINUTE = 1 << 40
_ADMIN_PATHS = frozenset(
    {"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/adapters", "/v1/cache", "/v1/fleet", "/ui/state"}
)
_ADMIN_FOLDERS = ("/v1/adapters/", "/v1/admin/", "/v1/cache/", "/v2/repository/models/")

logger = logging.getLogger(__name__)


class Scope(StrEnum):
    """The kinds of access that a key may have. No scope includes another one."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


def needed_scope(path: str) -> Scope:
    """Return the scope that a path requires. Open paths require none, and must be checked before."""
    if path in _ADMIN_PATHS or path.startswith(_ADMIN_FOLDERS):
        return Scope.ADMIN
    return Scope.METRICS if path == "/metrics" else Scope.INFERENCE


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        name: the key's name in logs.
        digest: SHA-256 digest of the key.
        tenant: tenant of the key. Keys of one tenant share KV and count as one in fair scheduling.
        adapters: names of the adapters that the key may use besides the base model; None for all.
        requests_per_minute: largest number of requests per minute; None for no limit.
        tokens_per_minute: largest number of tokens per minute; None for no limit.
        priority: priority class of requests that set none.
        earliest: highest priority class that requests may set.
    """

    name: str
    digest: bytes
    tenant: str
    scopes: frozenset[Scope] = frozenset(Scope)
    adapters: frozenset[str] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    priority: Priority = Priority.INTERACTIVE
    earliest: Priority = Priority.REALTIME

    @classmethod
    def given(cls, key: str) -> Key:
        """Return the record of a key from the command line. It has all scopes, and a name derived from its digest."""
        digest = hashlib.sha256(key.encode()).digest()
        name = f"key-{digest.hex()[:12]}"
        return cls(name, digest, name)


ANYBODY = Key("", b"", "")
"""The key of every request if no keys are in use."""


def _check_digest(digest: str) -> str:
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise rejected("must be 64 hexadecimal digits in lower case")
    return digest


Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._@:-]+$")]
PerMinute = Annotated[int, Field(ge=1, le=_MAX_PER_MINUTE)]


class KeyEntry(StrictModel):
    """One entry of the key file."""

    name: Name
    sha256: Annotated[str, AfterValidator(_check_digest)]
    tenant: Name | None = None
    scopes: Annotated[list[Annotated[Scope, Field(strict=False)]], Field(min_length=1)] = Field(
        default_factory=lambda: [Scope.INFERENCE]
    )
    adapters: list[str] | None = None
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    priority: PriorityName = "interactive"

    def key(self) -> Key:
        """Convert the entry to a ``Key``."""
        return Key(
            name=self.name,
            digest=bytes.fromhex(self.sha256),
            tenant=self.tenant or self.name,
            scopes=frozenset(self.scopes),
            adapters=None if self.adapters is None else frozenset(self.adapters),
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
            priority=priority_of(self.priority),
            earliest=priority_of(self.priority),
        )


class KeyFile(StrictModel):
    """The content of the key file."""

    keys: Annotated[list[KeyEntry], Field(min_length=1, max_length=MAX_KEYS)]


def new_secret() -> str:
    """Return a new key with 32 random bytes."""
    return f"rg-{secrets.token_urlsafe(32)}"


def read_keys(path: Path) -> tuple[Key, ...]:
    """Read a key file, whose name ends in ``.json`` or ``.toml``.

    Raises:
        ConfigError: the file cannot be read, or an entry is wrong or repeats another; the message names the entry.
    """
    return tuple(entry.key() for entry in read_entries(path))


def read_entries(path: Path) -> list[KeyEntry]:
    """Read the entries of a key file. Raises ConfigError like ``read_keys``."""
    return check_entries(_parse(path))


def check_entries(content: Any) -> list[KeyEntry]:
    """Validate the content of a key file. Returns its entries. Raises ConfigError for a malformed or repeated entry."""
    try:
        entries = KeyFile.model_validate(content).keys
    except ValidationError as error:
        raise ConfigError(f"--api-key-file: {_first_of(error)}") from None
    for field in ("name", "sha256"):
        values = [getattr(entry, field) for entry in entries]
        if len(set(values)) < len(values):
            raise ConfigError(f"--api-key-file: two keys have the same {field}.")
    return entries


def _parse(path: Path) -> Any:
    parsers: dict[str, Callable[[str], Any]] = {".json": orjson.loads, ".toml": tomllib.loads}
    if path.suffix not in parsers:
        raise ConfigError("--api-key-file must end in .json or .toml.")
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"--api-key-file is larger than {_MAX_FILE_BYTES} bytes.")
        text = path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        quoted = shlex.quote(str(path))
        mend = f" Try: rootgraft key add team-a --api-key-file {quoted}" if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"--api-key-file: {path} cannot be read: {reason}.{mend}") from None
    try:
        return parsers[path.suffix](text)
    except ValueError:
        raise ConfigError(f"--api-key-file is not valid {path.suffix[1:].upper()}.") from None


def _first_of(error: ValidationError) -> str:
    """Return the text of the first error. It does not contain the value, which may be a key in the wrong field."""
    first = error.errors()[0]
    location = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    return f"{location or 'the file'}: {first['msg']}."


class KeyRing:
    """Finds the key of a request's token. Belongs to one event loop.

    Args:
        given: keys from the command line.
        file: key file with further keys, see ``read_keys``; None if absent.
        clock: returns monotonic time in seconds.

    Raises:
        ConfigError: the file is not valid at the start.
    """

    def __init__(self, given: Sequence[str], file: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._given = tuple(map(Key.given, given))
        self._file = file
        self._clock = clock
        self._seen = self._look()
        self._looked_at = clock()
        self._keys = self._given + (() if file is None else read_keys(file))

    @property
    def in_use(self) -> bool:
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, token: bytes) -> Key | None:
        """Return the key with this text; None if no key has it, and ``ANYBODY`` if no keys are in use.

        The time depends only on the number of keys, because the digest is compared with all digests in constant time.
        """
        self._refresh()
        if not self._keys:
            return ANYBODY
        digest = hashlib.sha256(token).digest()
        matches = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        return matches[0] if matches else None

    def named(self, name: str) -> Key | None:
        """Return the valid key with this name. If no keys are in use, "" is the name of ``ANYBODY``."""
        self._refresh()
        if not self._keys:
            return None if name else ANYBODY
        return next((key for key in self._keys if key.name == name), None)

    def _refresh(self) -> None:
        """Read the file again if it has changed.

        If the new file is invalid, this is logged and the keys do not change.
        """
        if self._file is None or self._clock() < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = self._clock()
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._keys = self._given + read_keys(self._file)
            logger.info("the key file has changed: %d keys are valid now", len(self._keys))
        except ConfigError as error:
            logger.error("the key file has changed but cannot be loaded; the previous keys stay valid: %s", error)

    def _look(self) -> tuple[int, int, int] | None:
        """Return modification time, size and inode of the file; None if it is missing."""
        try:
            found = None if self._file is None else self._file.stat()
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
