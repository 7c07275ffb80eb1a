"""Sampling defaults: reads the values that a model recommends in ``generation_config.json`` or in its GGUF file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint.read_config import GENERATION_CONFIG, GGUF_SAMPLING, read_generation_config, read_gguf_sampling
from ..config import EngineConfig
from ..errors import RequestError
from ..sampling_options import OPTIONS, without_aliases
from ..types import SamplingDefaults, SamplingParams
from .request import check_parameter

# Keys of the file that are applied, with the parameters that they set. The other keys (do_sample, max_length, ...) are
# ignored, as in vLLM.
_APPLIED = {option.name: option.name for option in OPTIONS if option.recommended} | {"max_new_tokens": "max_tokens"}


class DefaultsRead(NamedTuple):
    """Sampling defaults of a model, with log messages about the values that are applied and those that are ignored."""

    defaults: SamplingDefaults
    applied: str = ""
    ignored: tuple[str, ...] = ()


def read_sampling_defaults(config: EngineConfig, model: Path) -> DefaultsRead:
    """Read the sampling defaults of a model's folder or GGUF file, unless ``--generation-config`` is ``vllm``.

    A value that a request could not have is ignored, and ``ignored`` gets a message about it.

    Raises:
        ModelError: ``generation_config.json`` is not a JSON object, or the file is not a GGUF file.
    """
    if config.generation_config != "auto":
        return DefaultsRead(SamplingDefaults())
    source = GGUF_SAMPLING if model.is_file() else GENERATION_CONFIG
    content = read_gguf_sampling(model) if model.is_file() else read_generation_config(model)
    values: dict[str, Any] = {}
    ignored = []
    for key, name in _APPLIED.items():
        value = content.get(key)
        if value is None:
            continue
        value = without_aliases(name, value)
        try:
            check_parameter(name, value)
        except RequestError as error:
            ignored.append(f"{source}: ignored: {str(error).replace(name, key, 1)}")
        else:
            values[name] = value
    if not values:
        return DefaultsRead(SamplingDefaults(), ignored=tuple(ignored))
    shown = ", ".join(f"{key} {values[name]:g}" for key, name in _APPLIED.items() if name in values)
    applied = f"sampling defaults of {source}: {shown} (--generation-config vllm turns them off)"
    return DefaultsRead(SamplingDefaults(**values), applied, tuple(ignored))


def default_params(defaults: SamplingDefaults) -> SamplingParams:
    """Return the sampling parameters of an offline request that sets none."""
    params = SamplingParams(**{option.name: getattr(defaults, option.name) for option in OPTIONS})
    return params if defaults.max_tokens is None else replace(params, max_tokens=defaults.max_tokens)
