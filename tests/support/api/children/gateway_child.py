"""A server with gateways in a process of its own, over two fake replicas: ``gateway_child.py FOLDER MODEL OPTIONS``.

FOLDER: a tokenizer's; while it has a file ``hold``, no replica computes. MODEL: the name of the base model. OPTIONS: of
the server, as JSON.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rootgraft.api.access.rate_limits import RateLimits
from rootgraft.api.config import ServerConfig
from rootgraft.api.gateways import main_connection
from rootgraft.api.generate import server_state
from rootgraft.api.http import model_service, server
from rootgraft.engine.checkpoint.locate import ModelFiles
from rootgraft.engine.config import EngineConfig
from rootgraft.fleet.dispatcher import DispatcherLimits
from rootgraft.fleet.fleet import Fleet
from rootgraft.fleet.replica_launcher import ProcessLauncher
from support.engine.core_client import CoreClient

STEP_SECONDS = 0.01
STOPPED_SECONDS = 300.0  # that a test may stop a gateway for


def main(folder: str, model: str, words: str) -> int:
    vocabulary = len(json.loads((Path(folder) / "tokenizer.json").read_text())["model"]["vocab"])
    hold = Path(folder) / "hold"
    main_connection.SILENT_SECONDS = STOPPED_SECONDS
    # Their buckets do not fill: what is left does not depend on the speed of a test.
    server_state.RateLimits = partial(RateLimits, lambda: 0.0)  # type: ignore[assignment,misc]

    def make() -> Any:
        return CoreClient(vocab_size=vocabulary, step_seconds=STEP_SECONDS, rests=hold.exists)

    def fleet(*_args: Any) -> Any:
        return Fleet(ProcessLauncher(make), 2, DispatcherLimits(heartbeat_seconds=STOPPED_SECONDS))

    found = ModelFiles(Path(folder), model)
    model_service.resolve_served_model = lambda config: found  # type: ignore[assignment]
    model_service.engine_of = fleet
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(words).items()}
    return server.serve(EngineConfig(model=folder), ServerConfig(**options))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
