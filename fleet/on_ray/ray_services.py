"""Changes to the start of Ray's processes for busy machines, on which Ray's own time limits are too short.

A raylet waits 15 seconds for ports that its agent, a Python process with many imports, writes into files, and aborts
without them. A driver waits 30 seconds for its node and up to 60 for a dashboard. No option of Ray changes these times,
so functions of Ray are replaced in this process.
"""

from __future__ import annotations

import importlib
import inspect
import socket
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

START_SECONDS = 120.0
"""Seconds that a local Ray has to start. Ray's own limit of 30 may be too short on a machine that is busy."""
_NO_PORT = -1  # the value that an agent without dashboard modules writes


def change_services(*, is_local: bool) -> None:
    """Change Ray's start: it waits longer; a local cluster has no dashboard, and does not wait for its agent's port."""
    services: Any = importlib.import_module("ray._private.services")
    services.get_node = until_there(services.get_node)
    if is_local:
        services.start_api_server = _start_no_dashboard
        services.start_raylet = without_agent_ports(services.start_raylet)


def until_there(get_node: Callable[..., Any], seconds: float = START_SECONDS) -> Callable[..., Any]:
    """Return Ray's look-up of a node, changed to wait at most ``seconds`` for a node that is not there yet."""
    if hasattr(get_node, "__wrapped__"):
        # An earlier start in this process has replaced the function.
        return get_node

    @wraps(get_node)
    def find(*given: Any, **named: Any) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return get_node(*given, **named)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.2)

    return find


def without_agent_ports(start_raylet: Callable[..., Any]) -> Callable[..., Any]:
    """Return Ray's function that starts a raylet, changed so that the raylet need not wait for the ports of its agents.

    The ports are set before the raylet starts. The dashboard's agent is not used here, so its files say that it has no
    port. The other agent, for runtime environments, gets a free port, at which callers retry until the agent answers.
    """
    if hasattr(start_raylet, "__wrapped__"):
        return start_raylet
    signature = inspect.signature(start_raylet)

    @wraps(start_raylet)
    def start(*given: Any, **named: Any) -> Any:
        call = signature.bind(*given, **named)
        raylet: Any = importlib.import_module("ray._raylet")
        for name in (
            raylet.METRICS_AGENT_PORT_NAME,
            raylet.METRICS_EXPORT_PORT_NAME,
            raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
        ):
            raylet.persist_port(call.arguments["session_dir"], call.arguments["node_id"], name, _NO_PORT)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            call.arguments["runtime_env_agent_port"] = listener.getsockname()[1]
        return start_raylet(*call.args, **call.kwargs)

    return start


def _start_no_dashboard(*given: Any, **named: Any) -> tuple[None, None]:
    """Replace Ray's start of its dashboard, for which Ray waits even if no dashboard is wanted."""
    return None, None
