"""``rootgraft list`` and ``rootgraft rm``: list and remove models and downloaded adapters of the local caches."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from ....engine.adapter_sources.cached_adapters import (
    CachedAdapter,
    adapter_cache_folder,
    cached_adapters,
    remove_cached,
)
from ....engine.checkpoint.locate import cache_folder, hub_name
from ....engine.checkpoint.model_cache import CachedModel, cached_models, hub_cache, remove
from ....engine.errors import ModelError
from ....engine.peer_options import nearest
from ...http.run_record import running_servers
from .machine_options import ListOptions, RmOptions
from .text_table import ago_text, bytes_text, path_text, text_table


def list_models(options: ListOptions) -> int:
    """Print models and adapters with size, format, last use and whether they can be served. Returns 0."""
    root = adapter_cache_folder(options.adapter_cache_dir)
    models, adapters = cached_models(), cached_adapters(root)
    if options.json:
        rows = [asdict(model) | {"path": str(model.path), "cache": str(model.cache)} for model in models]
        print(json.dumps(rows + [_adapter_fields(adapter, root) for adapter in adapters], indent=2))
    elif models or adapters:
        rows_of_text = [*map(_row, models), *map(_adapter_row, adapters)]
        print(text_table(("NAME", "SIZE", "FORMAT", "USED", "SERVE IT WITH"), rows_of_text))
    else:
        where = f"{path_text(cache_folder())} or {path_text(hub_cache())}"
        print(f"No models in {where}. Try: rootgraft pull", file=sys.stderr)
    return 0


def remove_model(options: RmOptions) -> int:
    """Remove a model or an adapter from its cache after confirmation. Returns 0, or 1 if it was not removed.

    Raises:
        ModelError: nothing has this name, a server uses it, or it cannot be removed.
    """
    models, root = cached_models(), adapter_cache_folder(options.adapter_cache_dir)
    found = [model for model in models if {options.model, hub_name(options.model)} & {model.name, str(model.path)}]
    adapters = cached_adapters(root)
    named = [each for each in adapters if options.model in each.names]
    if not found and named:
        return _remove_adapter(root, named[0], options.yes)
    if not found:
        names = [model.name for model in models] + [adapter.name for adapter in adapters]
        raise ModelError(
            f"there is no {options.model} in the caches.{nearest(options.model, names)} Try: rootgraft list"
        )
    model = found[0]
    _check_unused(model)
    if not options.yes and not _confirmed(model.name, model.size, model.path):
        print("Nothing was removed.", file=sys.stderr)
        return 1
    remove(model)
    print(f"Removed {model.name}: {bytes_text(model.size)} are free again.")
    return 0


def _remove_adapter(root: Path, adapter: CachedAdapter, is_confirmed: bool) -> int:
    if not is_confirmed and not _confirmed(adapter.name, adapter.size, adapter.path):
        print("Nothing was removed.", file=sys.stderr)
        return 1
    remove_cached(root, adapter)
    print(f"Removed {adapter.name}: {bytes_text(adapter.size)} are free again.")
    return 0


def _check_unused(model: CachedModel) -> None:
    path = model.path.resolve()
    # Records of other users are not trusted.
    for record in running_servers({0, os.getuid(), path.stat().st_uid}):
        used = [Path(each) for each in (record.path, *record.more_paths) if each]
        if any(path in (each, *each.parents) for each in used):
            raise ModelError(
                f"{model.name} is served by process {record.pid} at {record.url}. "
                f"Try: kill {record.pid}, then rootgraft rm"
            )


def _confirmed(name: str, size: int, path: Path) -> bool:
    """Ask the user at the terminal. Without a terminal, the answer is no."""
    question = f"Remove {name} ({bytes_text(size)}) from {path_text(path)}? [y/N] "
    if not sys.stdin.isatty():
        raise ModelError(f"cannot ask for confirmation without a terminal. Try: rootgraft rm {name} --yes")
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _row(model: CachedModel) -> tuple[str, ...]:
    command = " ".join(filter(None, ("rootgraft serve", path_text(Path(model.model)) if model.model else "")))
    served = f"- {model.fault}" if model.fault else command
    return model.name, bytes_text(model.size), model.format, ago_text(model.used), served


def _adapter_row(adapter: CachedAdapter) -> tuple[str, ...]:
    served = f"--lora-modules NAME={adapter.name}" if "://" in adapter.name else "- source unknown"
    used = "in use" if adapter.is_loaded else ago_text(adapter.used)
    return adapter.name, bytes_text(adapter.size), "adapter", used, served


def _adapter_fields(adapter: CachedAdapter, root: Path) -> dict[str, object]:
    """Return an adapter's fields for programs: those of a model, and further fields."""
    fields = {"model": "", "format": "adapter", "cache": str(root), "fault": ""}
    return fields | asdict(adapter) | {"path": str(adapter.path)}
