"""Read the config of a model from a Hugging Face folder or a GGUF file, without torch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ModelError
from ..sampling_options import OPTIONS
from .config_fields import Fields
from .gguf import GgufFile, begins_as_gguf
from .gguf_config import gguf_model_config
from .hf_config import model_config
from .model_config import ModelConfig
from .quantization_config import with_quantization_files
from .text_config import shared_value

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
GGUF_SAMPLING = "general.sampling"
_GGUF_SAMPLING_KEYS = {option.name: option.gguf for option in OPTIONS if option.gguf}


def open_checkpoint(path: Path) -> Path | GgufFile:
    """Return a GGUF file with its parsed header, which takes long for a large vocabulary; return a folder as it is.

    Raises:
        ModelError: the path is neither of the two, or the header is malformed.
    """
    return path if path.is_dir() else _open_gguf(path)


def read_model_config(checkpoint: Path | GgufFile) -> ModelConfig:
    """Read ``config.json`` of a folder in Hugging Face format, or the metadata of a GGUF file, opened or not.

    End tokens come from ``generation_config.json`` if it names any, else from the config.

    Raises:
        ModelError: the checkpoint is neither of the two, is malformed, or its model is not supported.
    """
    found = open_checkpoint(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    if isinstance(found, GgufFile):
        return gguf_model_config(found)
    config = model_config(read_config_file(found))
    fields = Fields(read_generation_config(found), GENERATION_CONFIG)
    eos = fields.token_ids("eos_token_id", config.vocab_size)
    return replace(config, eos_token_ids=eos) if eos else config


def read_config_file(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's ``config.json``, with the quantisation from other files of the folder.

    Raises:
        ModelError: the file is missing or malformed.
    """
    return with_quantization_files(_read_json(folder / CONFIG), folder)


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's ``generation_config.json``; an empty object without such a file.

    Raises:
        ModelError: the file is malformed.
    """
    file = folder / GENERATION_CONFIG
    return _read_json(file) if file.is_file() else {}


def read_gguf_sampling(path: Path) -> dict[str, Any]:
    """Return the sampling parameters that the metadata of a GGUF file recommend, as llama.cpp's converter writes them.

    Returns:
        Values by their keys in ``generation_config.json``, from which the converter takes them; 32-bit numbers are
        rounded back to the decimals of that file.

    Raises:
        ModelError: the path is not a GGUF file, or the header is malformed.
    """
    metadata = _open_gguf(path).metadata
    found = {key: metadata.get(f"{GGUF_SAMPLING}.{name}") for key, name in _GGUF_SAMPLING_KEYS.items()}
    return {key: _plain(value) for key, value in found.items()}


def _plain(value: Any) -> Any:
    """Return a value of GGUF metadata without the decimals that the rounding to 32 bits has added."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    return value.tolist() if isinstance(value, np.ndarray) else value


def config_end_tokens(path: Path, vocab_size: int) -> tuple[int, ...]:
    """Return the end tokens that a folder's ``config.json`` itself names, regardless of ``generation_config.json``.

    Raises:
        ModelError: the file is missing or malformed.
    """
    value = shared_value(read_config_file(path), "eos_token_id")
    return Fields({"eos_token_id": value}, CONFIG).token_ids("eos_token_id", vocab_size)


def _open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file, which needs no suffix: Ollama's store has none."""
    if path.suffix != ".gguf" and not begins_as_gguf(path):
        raise ModelError(
            f"{path.name} is neither a folder in Hugging Face format nor a GGUF file. Pickles (.bin, .pt, .pth) are "
            "not read, because they can run any code."
        )
    return GgufFile.open(path)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path.name} is missing from the model's folder.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not JSON.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path.name} must be a JSON object.")
    return content
