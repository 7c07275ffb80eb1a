"""``rootgraft serve``: checks the models of the command line, and serves them.

If there is a single engine, its process imports the engine while this process imports the server.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from ...engine.config import EngineConfig
from ...engine.errors import ConfigError
from ...engine.machine.resources import memory
from ...engine.machine.visible_gpus import takes_gpu
from ...engine.process_memory import uncollected
from ...engine.serving.engine_spawn import EnginePreload
from ..config import ServerConfig
from ..models_file import ModelEntry, ServedModel, check_digest, check_models, check_plans, naming_place
from .pull import fetch_model

ParsedModels = Sequence[tuple[ModelEntry, list[Any]]]
"""Entry and instances of options of each model."""


def serve(models: ParsedModels, read_again: Callable[[], ParsedModels]) -> int:
    """Serve models until the process is asked to end. Returns the exit code.

    Args:
        read_again: reads the models again, after a SIGHUP.

    Raises:
        ConfigError: options or models are not compatible.
        ModelError: a model does not exist, or cannot be loaded.
    """
    if models[0][1][-1].dry_run:
        return _dry_run(models)
    for entry, options in models:
        with naming_place(entry):
            _check_kv_memory(options[0])
    with ExitStack() as stack:
        # A SIGHUP rereads the models file. The signal stays pending until the server can handle it.
        if models[0][0].options is not None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
            stack.callback(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGHUP})
        spawn = stack.enter_context(EnginePreload()).spawn if _is_single_engine(models) else None
        served = _checked(models)
        with uncollected():
            from ..http.server import serve_models
        return serve_models(served, lambda: _checked(read_again()), spawn)


def _dry_run(models: ParsedModels) -> int:
    """Print what each model would need on this machine with these options. Returns 0, or 1 if a model does not fit."""
    from .machine.doctor import print_report
    from .machine.doctor_checks import check_model

    findings = []
    for entry, options in models:
        with naming_place(entry):
            findings += check_model(options[0])
    _checked(models)
    return print_report(findings)


def _check_kv_memory(config: EngineConfig) -> None:
    """Check that the KV pool of a CPU fits in its memory.

    Otherwise the error would occur only after loading weights.
    """
    asked, has = config.kv_cache_memory, memory().total / 2**30
    if asked is not None and asked > has and not takes_gpu(config.device):
        raise ConfigError(
            f"--kv-cache-memory {asked:g} (GiB) is more than the {has:.1f} GiB of memory that this process may use. "
            f"Try: rootgraft serve --kv-cache-memory {min(4.0, has / 4):.2g}"
        )


def _is_single_engine(models: ParsedModels) -> bool:
    servers: list[ServerConfig] = [options[-1] for _, options in models]
    return len(servers) == 1 and not servers[0].is_fleet and servers[0].ray_address is None


def _checked(parsed: ParsedModels) -> Sequence[ServedModel]:
    """Return the models, after checks that their files are here and they are compatible.

    Raises ConfigError, ModelError.
    """
    from ...engine.checkpoint.base_digest import base_digest

    models, names = [ServedModel(entry, *options) for entry, options in parsed], []
    for model in models:
        engine = model.engine
        with naming_place(model.entry):
            files = fetch_model(engine.model, engine.revision)
            digest = model.entry.digest and base_digest(files.path, dummy=engine.load_format == "dummy")
        if digest is not None:
            check_digest(model.entry, files.path, digest)
        names.append(model.server.served_model_name or (files.name,))
    if len(models) > 1:
        check_models(models, names)
    check_plans(models, names)
    return models
