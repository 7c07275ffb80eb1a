"""``rootgraft cache``: lists, removes, exports and imports the KV in a folder of ``--kv-disk`` or on a server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...engine.kv_cache.kv_folder import KvFolder, KvGroup
from ...engine.whole_file import write_whole
from .machine.text_table import ago_text, bytes_text, text_table
from .options import KvCacheOptions, KvExportOptions, KvImportOptions, RemoteOptions
from .remote_server import RemoteServer

_HEAD = ("TENANT", "ADAPTER", "PROMPTS", "PAGES", "SIZE", "USED", "BASE MODEL")
_TIER_HEAD = ("TIER", "PAGES", "SIZE", "HITS", "MISSES", "STORED", "EVICTED", "REJECTED", "ERRORS")
_SHOWN_DIGITS = 12
_ENCRYPTED = "(encrypted)"
_NO_MATCH = (
    "Nothing was imported: the file is damaged, is not an exported session, or belongs to another model, KV format, "
    "adapter or key."
)


def ls(options: KvCacheOptions) -> int:
    """Print the contents of a folder by tenant, adapter and base model. Returns 0. Raises ConfigError."""
    if options.kv_disk is None:
        return stats(options)
    with _opened(options.kv_disk) as folder:
        groups = folder.groups()
    if options.json:
        print(json.dumps([asdict(group) for group in groups], indent=2))
    else:
        print(text_table(_HEAD, [_row(group) for group in groups]) if groups else "The folder holds no KV.")
    return 0


def stats(options: KvCacheOptions) -> int:
    """Print the amount of KV in a folder or on a server. Returns 0. Raises RemoteError, ConfigError."""
    if options.kv_disk is not None:
        with _opened(options.kv_disk) as folder:
            pages, num_bytes = folder.size()
        found: dict[str, Any] = {"pages": pages, "bytes": num_bytes}
        print(json.dumps(found) if options.json else f"{pages} pages of KV, {bytes_text(num_bytes)}")
        return 0
    answer = asyncio.run(_ask(options, "GET", "cache"))
    if options.json:
        print(json.dumps(answer, indent=2))
        return 0
    device = answer["tiers"]["device"]
    print(
        f"{answer['model']}: {device['pages_cached']:,.0f} of {device['pages']:,.0f} pages in the KV pool hold "
        "cached prefixes"
    )
    tiers = {name: tier for name, tier in answer["tiers"].items() if name != "device"}
    if tiers:
        print(text_table(_TIER_HEAD, [_tier_row(name, tier) for name, tier in tiers.items()]))
    return 0


def clear(options: KvCacheOptions) -> int:
    """Remove the cached KV of a folder or a server. Returns 0. Raises RemoteError, ConfigError."""
    if options.kv_disk is not None:
        with _opened(options.kv_disk) as folder:
            print(f"{folder.clear()} pages of KV removed")
        return 0
    answer = asyncio.run(_ask(options, "POST", "cache/reset"))
    print(f"{answer['model']}: removed all cached KV that no running request uses")
    return 0


def export(options: KvExportOptions) -> int:
    """Export a folder, or a session on a server, to a file. Returns 0. Raises ConfigError, RemoteError, OSError."""
    if options.kv_disk is not None:
        with _opened(options.kv_disk) as folder:
            print(f"{folder.export(Path(options.file))} pages of KV written to {options.file}")
        return 0
    data = asyncio.run(_download(options))
    write_whole(Path(options.file), data)
    print(f"{bytes_text(len(data))} of KV of the session written to {options.file}")
    return 0


def import_file(options: KvImportOptions) -> int:
    """Import a file to a folder or a server. Returns 0, or 1 if the server cannot use the file.

    Raises:
        ConfigError, RemoteError, OSError: as for ``export``.
    """
    if options.kv_disk is None:
        answer = asyncio.run(_upload(options, Path(options.file).read_bytes()))
        tokens = answer["cached_tokens"]
        print(f"KV of {tokens:,} tokens imported from {options.file}" if tokens else _NO_MATCH)
        return int(not tokens)
    Path(options.kv_disk).expanduser().mkdir(mode=0o700, parents=True, exist_ok=True)
    with _opened(options.kv_disk) as folder:
        taken, left = folder.import_file(Path(options.file), int(options.kv_disk_gib * 2**30))
    print(f"{taken} pages of KV imported from {options.file}" + (f", {left} skipped for lack of space" if left else ""))
    return 0


@contextmanager
def _opened(path: str) -> Iterator[KvFolder]:
    folder = KvFolder(Path(path).expanduser())
    try:
        yield folder
    finally:
        folder.close()


async def _download(options: KvExportOptions) -> bytes:
    body = {"prompt_cache_key": options.session, "tenant": options.tenant}
    async with RemoteServer.connect(RemoteOptions(options.url, options.api_key, "-")) as server:
        return await server.download("cache/sessions/export", body)


async def _upload(options: KvImportOptions, data: bytes) -> Any:
    async with RemoteServer.connect(RemoteOptions(options.url, options.api_key, "-")) as server:
        return await server.call("POST", "cache/sessions/import", data)


async def _ask(options: KvCacheOptions, method: str, path: str) -> Any:
    async with RemoteServer.connect(RemoteOptions(options.url, options.api_key, "-")) as server:
        return await server.call(method, path, None if method == "GET" else {})


def _row(group: KvGroup) -> tuple[str, ...]:
    if group.base is None:
        names = group.folder, _ENCRYPTED, "", _ENCRYPTED
    else:
        adapter = "-" if group.adapter is None else group.adapter[:_SHOWN_DIGITS]
        names = group.tenant or "-", adapter, str(group.prompts), group.base[:_SHOWN_DIGITS]
    tenant, adapter, prompts, base = names
    return tenant, adapter, prompts, str(group.pages), bytes_text(group.num_bytes), ago_text(group.used), base


def _tier_row(name: str, tier: dict[str, float]) -> tuple[str, ...]:
    size = f"{bytes_text(tier['bytes'])} of {bytes_text(tier['capacity_bytes'])}"
    counted = (tier[each] for each in ("hits", "misses", "stored", "evicted", "rejected", "errors"))
    return name, f"{tier['pages']:,.0f}", size, *(f"{count:,.0f}" for count in counted)
