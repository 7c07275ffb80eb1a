"""Client of the engine template: engine processes are forked from a process that has loaded the weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from ..config import EngineConfig
from ..machine.visible_gpus import torch_takes_gpus, visible_gpus
from .engine_spawn import EngineProcess, spawn_engine
from .fork_server import ForkServer


class EngineTemplate:
    """Template process: it holds a model's weights, and engine processes with the same options are forked from it.

    Where no template process is possible (GPU, several ranks, a system without ``pidfd_open``, a model that cannot be
    loaded), engine processes are started directly, and each of them loads the weights itself.

    Args:
        config, model_path: configuration and model path of the engine processes.
    """

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        words = str(model_path), json.dumps(asdict(config))
        self._server = ForkServer("rootgraft.engine.core.engine_template", *words)
        self._is_possible = config.num_ranks == 1 and config.device != "cuda" and not _has_gpu(config)

    async def start(self) -> None:
        """Start the template process and wait until it has loaded the weights.

        Does nothing if the process runs already, or if the engine uses several ranks or a GPU.
        """
        if self._is_possible:
            await self._server.start()

    def spawn(self, fd: int, liveness: int, model_path: str, options: str) -> EngineProcess:
        """Fork an engine process, or start one directly. For the arguments see ``spawn_engine``."""
        return self._server.fork((fd, liveness)) or spawn_engine(fd, liveness, model_path, options)

    def close(self) -> None:
        """End the template process. Forked engine processes continue; ``start`` starts a new template process."""
        self._server.close()


def _has_gpu(config: EngineConfig) -> bool:
    """Return whether the engine may choose a GPU, as far as this is known without importing torch."""
    return config.device == "auto" and torch_takes_gpus() and bool(visible_gpus())
