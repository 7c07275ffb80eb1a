"""API keys: what each may do, and the file that says so, which holds their digests and never the keys themselves.

    [[keys]]
    name = "team-a"                   # in logs and metrics
    sha256 = "9f86d081884c7d65..."    # of the key, in hexadecimal
    tenant = "team-a"                 # whose KV and whose turn; default: the name
    scopes = ["inference"]            # of inference, metrics, admin; default: inference
    adapters = ["sql", "tickets"]     # by name; default: all, and the base model in any case
    requests_per_minute = 600         # default: no limit
    tokens_per_minute = 100000
    priority = "interactive"          # the earliest band that its requests may ask for, and the one by default

``docs/keys-and-limits.md`` tells the same to operators. JSON has the same fields: ``{"keys": [{...}, ...]}``.
"""

from __future__ import annotations

import hashlib
import secrets
import tomllib
from collections.abc import Callable
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
_MAX_FILE_BYTES = 4 << 20
_MAX_PER_MINUTE = 1 << 40
_ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/adapters", "/ui/state"})
_ADMIN_FOLDERS = ("/v1/adapters/",)


class Scope(StrEnum):
    """What a key opens. None includes another."""

    INFERENCE = "inference"
    METRICS = "metrics"
    ADMIN = "admin"


def needed_scope(path: str) -> Scope:
    """The scope that a path needs, open ones aside."""
    if path in _ADMIN_PATHS or path.startswith(_ADMIN_FOLDERS):
        return Scope.ADMIN
    return Scope.METRICS if path == "/metrics" else Scope.INFERENCE


@dataclass(frozen=True, slots=True)
class Key:
    """One key.

    Attributes:
        name: in logs.
        digest: SHA-256 of the key.
        tenant: who uses it. Keys of one tenant share KV and take turns as one.
        adapters: names that it may use besides the base model's; None for all.
        requests_per_minute: None for no limit.
        tokens_per_minute: None for no limit.
        priority: the band of its requests that ask for none.
        earliest: the first band that they may ask for.
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
        """A key of the command line's: it may do all, and its name says nothing of it."""
        digest = hashlib.sha256(key.encode()).digest()
        name = f"key-{digest.hex()[:12]}"
        return cls(name, digest, name)


ANYBODY = Key("", b"", "")
"""Who asks where no keys are in use."""


def _check_digest(digest: str) -> str:
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise rejected("must be 64 hexadecimal digits in lower case")
    return digest


Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._@:-]+$")]
PerMinute = Annotated[int, Field(ge=1, le=_MAX_PER_MINUTE)]


class KeyEntry(StrictModel):
    """A key as the file has it."""

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
        """The entry as a key."""
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
    """The whole file."""

    keys: Annotated[list[KeyEntry], Field(min_length=1, max_length=MAX_KEYS)]


def new_key(name: str) -> tuple[str, str]:
    """A key made of 32 random bytes, and its entry in a TOML file. ConfigError for a name that the file cannot have."""
    key = f"rg-{secrets.token_urlsafe(32)}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    try:
        KeyEntry(name=name, sha256=digest)
    except ValidationError as error:
        raise ConfigError(f"--{_first_of(error)}") from None
    return key, f'[[keys]]\nname = "{name}"\nsha256 = "{digest}"'


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys of a file, whose name ends in ``.json`` or ``.toml``.

    Raises:
        ConfigError: it cannot be read, or an entry is wrong or repeats another; the message names the entry.
    """
    try:
        entries = KeyFile.model_validate(_parse(path)).keys
    except ValidationError as error:
        raise ConfigError(f"--api-key-file: {_first_of(error)}") from None
    for field in ("name", "sha256"):
        values = [getattr(entry, field) for entry in entries]
        if len(set(values)) < len(values):
            raise ConfigError(f"--api-key-file: two keys have the same {field}.")
    return tuple(entry.key() for entry in entries)


def _parse(path: Path) -> Any:
    parsers: dict[str, Callable[[str], Any]] = {".json": orjson.loads, ".toml": tomllib.loads}
    if path.suffix not in parsers:
        raise ConfigError("--api-key-file must be a file whose name ends in .json or .toml.")
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"--api-key-file is larger than {_MAX_FILE_BYTES} bytes.")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError("--api-key-file cannot be read as a text file.") from None
    try:
        return parsers[path.suffix](text)
    except ValueError:
        raise ConfigError(f"--api-key-file is not valid {path.suffix[1:].upper()}.") from None


def _first_of(error: ValidationError) -> str:
    """The first finding. What was given is not quoted: it may be a key in the wrong place."""
    first = error.errors()[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    return f"{place or 'the file'}: {first['msg']}."
