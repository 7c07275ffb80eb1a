"""``rootgraft models``: lists, adds, promotes, weights, rolls back and removes versions of a server's models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .machine.text_table import ago_text, text_table
from .options import AddOptions, AdminOptions, CanaryOptions, NameOptions, RemoteOptions, VersionOptions
from .remote_server import RemoteServer

_HEAD = ("NAME", "VERSION", "WEIGHT", "STATE", "ADDED", "SOURCE")
_PATH = "admin/models"
_SHOWN_DIGITS = 12


def list_models_of(admin: AdminOptions) -> int:
    """Print the names in a server's catalogue, with their versions. Returns 0."""
    answer = _ask(admin, "GET", _PATH)
    _print(admin, answer, _table(answer["data"]) if answer["data"] else "The server's catalogue is empty.")
    return 0


def add(admin: AdminOptions, options: AddOptions) -> int:
    """Add a version to a name. Returns 0."""
    body = {"name": options.name, "source": options.source, "digest": options.digest, "model": options.base}
    _show(admin, _ask(admin, "POST", _PATH, {name: value for name, value in body.items() if value is not None}))
    return 0


def promote(admin: AdminOptions, options: VersionOptions) -> int:
    """Send all new requests to a version. Returns 0."""
    name, version = options.parts
    _show(admin, _ask(admin, "POST", _path(name, "promote"), {"version": version}))
    return 0


def canary(admin: AdminOptions, options: VersionOptions, share: CanaryOptions) -> int:
    """Send a share of new requests to a version. Returns 0."""
    name, version = options.parts
    _show(admin, _ask(admin, "POST", _path(name, "canary"), {"version": version, "weight": share.weight}))
    return 0


def rollback(admin: AdminOptions, options: NameOptions) -> int:
    """Undo the last promote or canary of a name. Returns 0."""
    _show(admin, _ask(admin, "POST", _path(options.parts[0], "rollback"), {}))
    return 0


def remove(admin: AdminOptions, options: NameOptions) -> int:
    """Retire a version or a name, or stop serving a base model. Returns 0."""
    name, version = options.parts
    body = {} if version is None else {"version": version}
    answer = _ask(admin, "POST", _path(name, "remove"), body)
    gone = ", ".join(_short(digest) for digest in answer["removed"])
    _print(admin, answer, f"{name}: removed {gone}")
    return 0


def _path(name: str, verb: str) -> str:
    """Return the URL path of a name, which may contain slashes."""
    return f"{_PATH}/{name}/{verb}"


def _ask(admin: AdminOptions, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """Return the server's answer. Raises RemoteError, ConfigError."""

    async def ask() -> Any:
        remote = RemoteOptions(url=admin.url, api_key=admin.api_key, model="-")
        async with RemoteServer.connect(remote) as server:
            return await server.call(method, path, body)

    return asyncio.run(ask())


def _show(admin: AdminOptions, answer: Mapping[str, Any]) -> None:
    _print(admin, answer, _table([answer]))


def _print(admin: AdminOptions, answer: Any, text: str) -> None:
    print(json.dumps(answer, indent=2) if admin.json else text)


def _table(names: Sequence[Mapping[str, Any]]) -> str:
    return text_table(_HEAD, [_row(each["id"], version) for each in names for version in each["versions"]])


def _row(name: str, version: Mapping[str, Any]) -> tuple[str, ...]:
    weight = f"{version['weight']} %" if version["weight"] else "-"
    source = version["source"].removesuffix(f"@sha256:{version['digest']}")
    return name, _short(version["digest"]), weight, version["state"], ago_text(version["added"]), source


def _short(digest: str) -> str:
    return digest[:_SHOWN_DIGITS]
