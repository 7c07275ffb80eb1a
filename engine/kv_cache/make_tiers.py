"""KV tiers from the options: which stores there are, under which form and key."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from ..batch import PageLoad, StateLoad
from ..config import EngineConfig
from ..errors import ConfigError
from .block_codec import BlockCodec, Buffer
from .block_files import BlockFiles
from .block_keys import BlockScheme
from .kv_events import TierEventLog
from .kv_stores import DiskStore, HostStore, KvStore
from .kv_tiers import KvTiers
from .peer_reads import PeerReads
from .write_admission import WriteAdmission

KEY_FILE_BYTES = 32


class KvPages(Protocol):
    """Access to the pages of a worker's pool, to store them elsewhere.

    Attributes:
        form: number format, shape and arithmetic of the KV. Pools of equal forms can exchange pages.
        page_bytes: bytes of a page.
        state_bytes: bytes of a recurrent state; 0 for a model without recurrent states.
        refusal: why pages cannot be stored elsewhere; "" if they can.
        on_device: whether the pool is in the memory of a device, not of the host.
    """

    form: str
    page_bytes: int
    state_bytes: int
    refusal: str
    on_device: bool

    def read_page(self, page: int) -> Buffer:
        """Return a copy of a page's bytes, on any thread."""

    def read_state(self, slot: int) -> Buffer:
        """Return a copy of a recurrent state's bytes, on any thread."""

    def load(self, loads: Sequence[PageLoad | StateLoad]) -> None:
        """Fill pages and slots of states that no step in flight uses, between two steps."""


def make_scheme(config: EngineConfig, pages: KvPages) -> tuple[BlockScheme, bytes]:
    """Return the naming scheme of pages, and the key with which they are encrypted, empty for no encryption.

    Raises:
        ConfigError: the key file has no key.
    """
    key = read_key(config.kv_disk_key_file) if config.kv_disk_key_file else b""
    secret = blake2b(key=key, person=b"rootgraft names", digest_size=32).digest() if key else b""
    return plain_scheme(pages, config.block_size, secret), key


def plain_scheme(pages: KvPages, page_size: int, secret: bytes = b"") -> BlockScheme:
    """Return how the pages of a pool are named, without a key by default."""
    return BlockScheme(pages.form, page_size, pages.page_bytes, secret, pages.state_bytes)


def make_tiers(
    config: EngineConfig, pages: KvPages | None, num_pages: int, events: TierEventLog | None = None
) -> KvTiers | None:
    """Return the tiers that the options ask for; None without tiers.

    Args:
        num_pages: number of pages of the pool.
        events: records the pages that enter and leave the stores.

    Raises:
        ConfigError: the model or the device does not support tiers, or the folder or the key cannot be used.
    """
    if config.kv_disk is None and config.kv_host_gib is None:
        return _peer_tier(config, pages)
    flag = "--kv-disk" if config.kv_disk is not None else "--kv-host-gib"
    if pages is None or pages.refusal:
        raise ConfigError(f"{flag} cannot keep the KV of this model: {pages.refusal if pages else 'it has no pages'}.")
    if config.kv_host_gib is not None and not pages.on_device:
        raise ConfigError(
            "--kv-host-gib is for the KV of a GPU: the KV pool of a CPU is in the host's memory already. Make the "
            f"pool larger. Try: rootgraft serve --kv-cache-memory {config.kv_host_gib:g}"
        )
    scheme, key = make_scheme(config, pages)
    stores: list[KvStore] = []
    if config.kv_host_gib is not None:
        stores.append(HostStore(int(config.kv_host_gib * 2**30), events=events))
    if config.kv_disk is not None:
        stores.append(_disk_store(config, BlockCodec(scheme, key), events))
    tier_pages = max(store.capacity for store in stores) // scheme.page_bytes
    return KvTiers(scheme, pages, stores, _peer_reads(config, scheme), admission=WriteAdmission(tier_pages, num_pages))


def _peer_tier(config: EngineConfig, pages: KvPages | None) -> KvTiers | None:
    """Return tiers that get pages of other replicas alone; None where there are none, or pages cannot be kept."""
    if pages is None or pages.refusal or not config.enable_prefix_caching:
        return None
    scheme = plain_scheme(pages, config.block_size)
    peers = _peer_reads(config, scheme)
    return KvTiers(scheme, pages, (), peers) if peers else None


def _peer_reads(config: EngineConfig, scheme: BlockScheme) -> PeerReads | None:
    """Return what gets pages of other replicas, which travel without encryption; None if absent."""
    return PeerReads(BlockCodec(scheme), int(config.kv_peer_gib * 2**30)) if config.kv_peer_gib else None


def _disk_store(config: EngineConfig, codec: BlockCodec, events: TierEventLog | None) -> DiskStore:
    assert config.kv_disk is not None
    try:
        files = BlockFiles(Path(config.kv_disk).expanduser())
        return DiskStore(files, codec, int(config.kv_disk_gib * 2**30), events=events)
    except OSError as error:
        raise ConfigError(f"--kv-disk {config.kv_disk} cannot be used: {error.strerror or error}.") from error


def read_key(path: str) -> bytes:
    """Return the key in a file, 32 bytes or 64 hexadecimal digits. Raises ConfigError."""
    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"--kv-disk-key-file {path} cannot be read: {error.strerror}.") from error
    if len(content) == KEY_FILE_BYTES:
        return content
    try:
        key = bytes.fromhex(content.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != KEY_FILE_BYTES:
        raise ConfigError(
            f"--kv-disk-key-file {path} must hold 32 bytes or 64 hexadecimal digits, not {len(content)} bytes. Try: "
            f"openssl rand -hex 32 > {path}"
        )
    return key
