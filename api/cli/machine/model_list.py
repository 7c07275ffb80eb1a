"""`rootgraft list` and `rootgraft rm`: the models in the local caches."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from ....engine.checkpoint.locate import cache_folder
from ....engine.checkpoint.model_cache import CachedModel, cached_models, hub_cache, remove
from ....engine.errors import ModelError
from ....engine.peer_options import nearest
from ...http.run_record import running_servers
from .machine_options import ListOptions, RmOptions
from .text_table import ago_text, bytes_text, path_text, text_table


def list_models(options: ListOptions) -> int:
    """Print the models with size, format, last use and whether they can be served. Returns 0."""
    models = cached_models()
    if options.json:
        rows = [asdict(model) | {"path": str(model.path), "cache": str(model.cache)} for model in models]
        print(json.dumps(rows, indent=2))
    elif models:
        print(text_table(("NAME", "SIZE", "FORMAT", "USED", "SERVE IT WITH"), [_row(model) for model in models]))
    else:
        where = f"{path_text(cache_folder())} or {path_text(hub_cache())}"
        print(f"No models in {where}. Try: rootgraft pull", file=sys.stderr)
    return 0


def remove_model(options: RmOptions) -> int:
    """Remove a model from its cache, once that is confirmed. Returns 0, or 1 if it is not.

    Raises:
        ModelError: there is none of this name, a server has it, or it cannot be removed.
    """
    models = cached_models()
    found = [model for model in models if options.model in (model.name, str(model.path))]
    if not found:
        names = [model.name for model in models]
        raise ModelError(
            f"there is no {options.model} in the caches.{nearest(options.model, names)} Try: rootgraft list"
        )
    model = found[0]
    _check_unused(model)
    if not options.yes and not _confirmed(model):
        print("Nothing was removed.", file=sys.stderr)
        return 1
    remove(model)
    print(f"Removed {model.name}: {bytes_text(model.size)} are free again.")
    return 0


def _check_unused(model: CachedModel) -> None:
    path = model.path.resolve()
    for record in running_servers({0, os.getuid(), path.stat().st_uid}):  # others may write what they like
        used = Path(record.path)
        if record.path and (path == used or path in used.parents):
            raise ModelError(
                f"{model.name} is served by process {record.pid} at {record.url}. "
                f"Try: kill {record.pid}, then rootgraft rm"
            )


def _confirmed(model: CachedModel) -> bool:
    """Ask at the terminal; without one the answer is no."""
    question = f"Remove {model.name} ({bytes_text(model.size)}) from {path_text(model.path)}? [y/N] "
    if not sys.stdin.isatty():
        raise ModelError(f"there is no terminal to ask at. Try: rootgraft rm {model.name} --yes")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _row(model: CachedModel) -> tuple[str, ...]:
    command = " ".join(filter(None, ("rootgraft serve", path_text(Path(model.model)) if model.model else "")))
    served = f"- {model.fault}" if model.fault else command
    return model.name, bytes_text(model.size), model.format, ago_text(model.used), served
