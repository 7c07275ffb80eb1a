"""Overrides of a model's configuration: ``--hf-overrides``, a JSON object whose keys replace those of ``config.json``.

The files stay as they are: beside the downloaded models there is a folder for each pair of a model and its overrides,
with links to its files and a ``config.json`` of its own, so that whoever reads the model reads one configuration.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..errors import ConfigError, ModelError
from ..json_options import HF_OVERRIDES, parse_overrides
from .locate import ModelFiles, cache_folder, resolve_model

_CONFIG = "config.json"
_NESTED = "_config"
_FOLDER = "overridden"


def resolve_served_model(config: EngineConfig, *, on_machine: bool = False) -> ModelFiles:
    """Return the files of the model that an engine serves, with the overrides of its configuration.

    Args:
        on_machine: of the hub only what was downloaded before.

    Raises:
        ModelError, ConfigError: as ``resolve_model``, or the overrides are of no folder.
    """
    files = resolve_model(config.model, revision=config.revision, on_machine=on_machine)
    overrides = parse_overrides(config.hf_overrides)
    return _overridden(files, overrides) if overrides else files


def with_overrides(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration whose keys are replaced; those inside ``text_config`` and its like one by one."""
    merged = dict(content)
    for key, value in overrides.items():
        within = merged.get(key)
        is_nested = key.endswith(_NESTED) and isinstance(within, dict) and isinstance(value, dict)
        merged[key] = with_overrides(within, value) if is_nested else value  # type: ignore[arg-type]
    return merged


def _overridden(files: ModelFiles, overrides: Mapping[str, Any]) -> ModelFiles:
    if not files.path.is_dir():
        raise ConfigError(f"{HF_OVERRIDES}: {files.path.name} is a GGUF file, which has no config.json.")
    source = files.path.resolve()
    try:
        content = json.loads((source / _CONFIG).read_bytes())
        if not isinstance(content, dict):
            raise ModelError(f"{_CONFIG} must be a JSON object.")
        written = json.dumps(with_overrides(content, overrides), indent=2).encode()
        links = {each.name: str(each.resolve()) for each in source.iterdir() if each.name != _CONFIG}
        key = hashlib.sha256(repr((str(source), sorted(links.items()), written)).encode()).hexdigest()[:32]
        folder = cache_folder().parent / _FOLDER / key
        if not folder.is_dir():
            _make(folder, source.name, written, links)
    except OSError as error:
        raise ModelError(
            f"{HF_OVERRIDES}: no folder for the model with its overrides could be made: {error.strerror or error}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{_CONFIG} is not JSON.") from error
    return ModelFiles(folder / source.name, files.name, source)


def _make(folder: Path, name: str, config: bytes, links: Mapping[str, str]) -> None:
    """Make a folder whole or not at all. Another process may make the same one meanwhile."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "made" / name
        made.mkdir(parents=True)
        (made / _CONFIG).write_bytes(config)
        for link, target in links.items():
            (made / link).symlink_to(target)
        try:
            os.rename(made.parent, folder)
        except OSError:
            if not folder.is_dir():
                raise
            shutil.rmtree(made.parent)
