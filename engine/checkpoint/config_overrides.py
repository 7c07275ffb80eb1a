"""Overrides of a model's configuration: ``--hf-overrides``, a JSON object whose keys replace those of ``config.json``.

The model's files are not changed: next to the downloaded models there is a folder for each pair of a model and its
overrides, with links to the model's files and a ``config.json`` of its own, so that all readers of the model read the
same configuration. A process holds the lock of each folder that it uses until the process ends. A process that makes a
folder removes the folders whose lock nobody holds.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..errors import ConfigError, ModelError
from ..json_options import HF_OVERRIDES, parse_overrides
from .locate import ModelFiles, cache_folder, resolve_model

_CONFIG = "config.json"
_NESTED = "_config"
_FOLDER = "overridden"
_ROPE_OLD, _ROPE_NEW = "rope_scaling", "rope_parameters"
_ROPE_KEPT = (
    "rope_theta",
    "partial_rotary_factor",
)  # These keys are given beside ``rope_scaling`` and within ``rope_parameters``.
_held: dict[Path, int] = {}
"""The descriptors of folders that this process uses, whose locks it keeps."""


def resolve_served_model(config: EngineConfig, *, on_machine: bool = False) -> ModelFiles:
    """Return the files of the model that an engine serves, with the overrides of its configuration.

    Args:
        on_machine: whether to use only downloaded models of the hub.

    Raises:
        ModelError, ConfigError: as for ``resolve_model``, or there are overrides for a model that is not a folder.
    """
    files = resolve_model(config.model, revision=config.revision, on_machine=on_machine)
    overrides = parse_overrides(config.hf_overrides)
    return _overridden(files, overrides) if overrides else files


def with_overrides(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with replaced keys; keys inside objects such as ``text_config`` are replaced one by one.

    An override of rotary embeddings under their older or newer key replaces what the file has under the other key.
    """
    merged = dict(content)
    for key, value in overrides.items():
        within = merged.get(key)
        is_nested = key.endswith(_NESTED) and isinstance(within, dict) and isinstance(value, dict)
        merged[key] = with_overrides(within, value) if is_nested else value  # type: ignore[arg-type]
    if _ROPE_NEW in overrides and _ROPE_OLD not in overrides:
        merged.pop(_ROPE_OLD, None)
    newer, older = content.get(_ROPE_NEW), overrides.get(_ROPE_OLD, 0)
    if _ROPE_NEW not in overrides and isinstance(newer, dict) and (older is None or isinstance(older, dict)):
        del merged[_ROPE_OLD]
        merged[_ROPE_NEW] = _scaled(newer, older or {})
    return merged


def _scaled(parameters: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary parameters with another scaling, in full-attention layers if the file has both kinds of layers."""
    if isinstance(full := parameters.get("full_attention"), dict):
        return {**parameters, "full_attention": _scaled(full, scaling)}
    return {key: parameters[key] for key in _ROPE_KEPT if key in parameters} | dict(scaling)


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
        while not _hold(folder):
            _make(folder, source.name, written, links)
    except OSError as error:
        raise ModelError(
            f"{HF_OVERRIDES}: the folder for the model with its overrides could not be created: "
            f"{error.strerror or error}."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{_CONFIG} is not JSON.") from error
    return ModelFiles(folder / source.name, files.name, source)


def _hold(folder: Path) -> bool:
    """Lock a folder until this process ends. Return whether the folder exists and was not removed meanwhile."""
    held = _held.get(folder)
    if held is not None and _is_of(held, folder):
        return True
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    with suppress(OSError):  # a file system without locks, where nothing is removed either
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    if not _is_of(descriptor, folder):
        os.close(descriptor)
        return False
    if held is not None:
        os.close(held)
    _held[folder] = descriptor
    return True


def _is_of(descriptor: int, folder: Path) -> bool:
    """Return whether an opened folder is still the folder at its path."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False


def _remove_unused(parent: Path) -> None:
    """Remove the folders whose processes have ended."""
    for folder in parent.iterdir():
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        with suppress(OSError):  # in use
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _make(folder: Path, name: str, config: bytes, links: Mapping[str, str]) -> None:
    """Make a complete folder, or none if another process has made it meanwhile."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    parent = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # without locks two processes may make the same one
            fcntl.flock(parent, fcntl.LOCK_EX)
        _remove_unused(folder.parent)
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
    finally:
        os.close(parent)
