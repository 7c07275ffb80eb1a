"""Observers: the metrics, trace exporter, GPU usage collector and live page snapshots of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .gpu_usage import GpuCollector
from .live_page import EngineWatch
from .metrics import Metrics
from .recent_requests import RecentRequests
from .replica_view import GatewaysStatus
from .tracing import Tracer


@dataclass(slots=True)
class Observers:
    """The metrics, the tracer and other observers of one base model's requests and engine.

    Attributes:
        metrics: metrics of the model; ``ServerState`` creates them again when it learns the model's names and its
            engine.
        tracer: tracer of the whole server; None without ``--otlp-traces-endpoint``.
        gpus: collector of GPU use for the metrics; None without a GPU, and in all states but the main one.
        gateways: returns the status of the gateways; None if this process alone answers HTTP.
        watch: snapshots of the engine for the live page.
        recent: last requests of this process, for the live page. With several models, the main state holds those of all
            models.
    """

    metrics: Metrics
    tracer: Tracer | None = None
    gpus: GpuCollector | None = None
    gateways: Callable[[], GatewaysStatus] | None = None
    watch: EngineWatch = field(default_factory=EngineWatch)
    recent: RecentRequests = field(default_factory=RecentRequests)
