"""Replica view: the replicas of an engine and the gateways as JSON, for ``GET /v1/fleet`` and the live page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...engine.metric_tables import kv_usage
from ...engine.serving.replica_status import FleetStatus, ReplicaStatus


@dataclass(frozen=True, slots=True)
class GatewayStatus:
    """One process that answers HTTP.

    Attributes:
        name: unique name, which is never used for another gateway.
        state: serving, starting or draining.
        up_seconds: seconds since the gateway's process was started.
        silent_seconds: seconds since the gateway's last sign of life.
        active: number of answers that the gateway is generating.
    """

    name: str
    state: str
    pid: int
    up_seconds: float
    silent_seconds: float
    active: int


@dataclass(frozen=True, slots=True)
class GatewaysStatus:
    """All running gateways, the numbers of started and lost ones, and whether they serve the model yet."""

    gateways: tuple[GatewayStatus, ...]
    num_started: int
    num_lost: int
    serves: bool = True


def gateways_json(status: GatewaysStatus) -> dict[str, Any]:
    """Return the gateways' status as a JSON object."""
    return {
        "started": status.num_started,
        "lost": status.num_lost,
        "data": [
            {
                "id": each.name,
                "object": "gateway",
                "state": each.state,
                "place": f"process {each.pid}",
                "up_seconds": round(each.up_seconds, 1),
                "silent_seconds": round(each.silent_seconds, 2),
                "active": each.active,
            }
            for each in status.gateways
        ],
    }


def fleet_json(status: FleetStatus, gateways: GatewaysStatus | None = None) -> dict[str, Any]:
    """Return a fleet's status as a JSON object, with the status of the gateways if there are any."""
    bounds = None if status.bounds is None else {"min": status.bounds[0], "max": status.bounds[1]}
    return {
        "object": "fleet",
        "wanted": status.wanted,
        "autoscale": bounds,
        "starting": status.num_starting,
        "held_requests": status.num_held,
        "started": status.num_started,
        "lost": status.num_lost,
        "replays": status.num_replays,
        "drained": status.num_drained,
        "scaled_up": status.num_scaled_up,
        "scaled_down": status.num_scaled_down,
        "data": [replica_json(each) for each in status.replicas],
        **({} if gateways is None else {"gateways": gateways_json(gateways)}),
    }


def replica_json(replica: ReplicaStatus) -> dict[str, Any]:
    """Return a replica's status as a JSON object. Its counters start with the replica."""
    stats = replica.stats
    prompt, cached = (int(stats.get(name, 0)) for name in ("prompt_tokens", "prompt_tokens_cached"))
    return {
        "id": replica.name,
        "object": "replica",
        "engine": replica.engine,
        "state": replica.state,
        "role": replica.role,
        "place": replica.place,
        "up_seconds": round(replica.up_seconds, 1),
        "silent_seconds": round(replica.silent_seconds, 2),
        "running": int(stats.get("running", 0)),
        "waiting": int(stats.get("waiting", 0)),
        "kv_cache_usage": round(kv_usage(stats), 4),
        "prompt_tokens": prompt,
        "prompt_tokens_cached": cached,
        "prefix_cache_hit_rate": round(cached / prompt, 4) if prompt else None,
        "generation_tokens": int(stats.get("generation_tokens", 0)),
        "adapters": list(replica.adapters),
    }
