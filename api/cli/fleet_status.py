"""``rootgraft fleet status``: prints the replicas and the gateways of a server as tables."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from .machine.text_table import duration_text, text_table
from .options import FleetStatusOptions, RemoteOptions
from .remote_server import RemoteServer

_HEAD = ("REPLICA", "STATE", "RUNNING", "WAITING", "KV", "HIT RATE", "UP", "PLACE", "ADAPTERS")
_GATEWAY_HEAD = ("GATEWAY", "STATE", "ACTIVE", "UP", "PLACE")


def print_fleet(options: FleetStatusOptions) -> int:
    """Print the replicas and gateways of a server. Returns 0. Raises RemoteError, ConfigError."""
    fleet = asyncio.run(_ask(options))
    if options.json:
        print(json.dumps(fleet, indent=2))
        return 0
    print(summary_of(fleet))
    rows = [row_of(replica) for replica in fleet["data"]]
    if rows:
        print(text_table(_HEAD, rows))
    if gateways := fleet.get("gateways"):
        print(f"Gateways since the server's start: {gateways['started']} started, {gateways['lost']} lost.")
        print(text_table(_GATEWAY_HEAD, [gateway_row(each) for each in gateways["data"]]))
    return 0


async def _ask(options: FleetStatusOptions) -> dict[str, Any]:
    # "-" is not a model's name. It keeps the client from requesting the list of models, which needs another scope.
    async with RemoteServer.connect(RemoteOptions(options.url, options.api_key, "-")) as server:
        return await server.get("fleet")


def summary_of(fleet: Mapping[str, Any]) -> str:
    """Return one or two lines with the number of serving replicas and the events since the start."""
    states = [replica["state"] for replica in fleet["data"]]
    bounds = fleet["autoscale"]
    parts = [f"{states.count('serving')} of {fleet['wanted']} replicas serve"]
    if bounds:
        parts[0] += f" ({bounds['min']} to {bounds['max']} by load)"
    for count, what in (
        (fleet["starting"], "starting"),
        (states.count("draining"), "draining"),
        (fleet["held_requests"], "requests wait for one"),
    ):
        parts += [f"{count} {what}"] if count else []
    since = [f"{fleet['started']} started", f"{fleet['lost']} lost", f"{fleet['drained']} drained"]
    since += [f"{fleet['replays']} replays"]
    if bounds:
        since += [f"scaled up {fleet['scaled_up']}, down {fleet['scaled_down']}"]
    return f"{', '.join(parts)}.\nSince the server's start: {', '.join(since)}."


def row_of(replica: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a replica's row."""
    rate = replica["prefix_cache_hit_rate"]
    return (
        replica["id"],
        replica["state"],
        str(replica["running"]),
        str(replica["waiting"]),
        f"{replica['kv_cache_usage']:.0%}",
        "-" if rate is None else f"{rate:.0%}",
        duration_text(replica["up_seconds"]),
        replica["place"],
        ", ".join(replica["adapters"]) or "-",
    )


def gateway_row(gateway: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the cells of a gateway's row."""
    up = duration_text(gateway["up_seconds"])
    return gateway["id"], gateway["state"], str(gateway["active"]), up, gateway["place"]
