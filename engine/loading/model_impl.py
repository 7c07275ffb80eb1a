"""Choice of what computes a model, ``--model-impl``: our decoder, or the modules of the transformers library."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch

from ...lora.base_projections import BaseLayout
from ..checkpoint.gguf import GgufFile
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.read_config import read_config_file, read_model_config
from ..errors import ModelError, UnknownArchitecture
from ..models.decoder import DecoderModel
from ..models.model import Model
from .base_layout import base_layout
from .load_model import load_model
from .shards import Shard
from .stages import Stage
from .weight_forms import WeightForm

_INSTALL = "Try: pip install 'rootgraft[transformers]'"


def load_by(
    model_impl: str,
    checkpoint: Path | GgufFile,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None,
    dummy: bool,
    weights: WeightForm,
    available: int | None = None,
    shard: Shard | None = None,
    stage: Stage | None = None,
) -> Model:
    """Load a model by an implementation: ``rootgraft``, ``transformers``, or ``auto`` (rootgraft if it has the model).

    The other arguments are as in ``load_model``.

    Raises:
        ModelError: the implementation does not have the model, or the library is not installed.
        ConfigError: see ``load_model``.
    """
    if own_config(model_impl, checkpoint) is not None:
        return load_model(
            checkpoint,
            dtype=dtype,
            device=device,
            max_positions=max_positions,
            dummy=dummy,
            weights=weights,
            available=available,
            shard=shard,
            stage=stage,
        )
    if not isinstance(checkpoint, Path):
        raise ModelError(
            "--model-impl transformers reads folders in Hugging Face format, not GGUF files. Leave it out."
        )
    if weights != "plain":
        raise ModelError(
            "--quantization is for our own decoder; with --model-impl transformers weights are in --dtype."
        )
    if find_spec("transformers") is None:
        raise ModelError(f"--model-impl transformers needs the package transformers, which is missing. {_INSTALL}")
    from ..models.transformers.load_transformers_model import load_transformers_model

    return load_transformers_model(checkpoint, dtype=dtype, device=device, max_positions=max_positions, dummy=dummy)


def own_config(model_impl: str, checkpoint: Path | GgufFile) -> ModelConfig | None:
    """Return the configuration of a model that our decoder computes; None for one of the transformers library.

    Raises:
        ModelError: neither our decoder nor the library has the model, or the model's configuration is malformed.
    """
    if model_impl == "transformers":
        return None
    try:
        return read_model_config(checkpoint)
    except UnknownArchitecture as error:
        if model_impl != "auto" or not isinstance(checkpoint, Path):
            raise
        if find_spec("transformers") is None:
            raise ModelError(f"{error} The transformers library may support it. {_INSTALL}") from error
        from ..models.transformers.transformers_config import has_class

        if not has_class(read_config_file(checkpoint)):
            raise
        return None


def layout_of(model: Model, checkpoint: Path | GgufFile, *, dummy: bool) -> BaseLayout:
    """Return the layout of a model for adapters; see ``base_layout``."""
    if isinstance(model, DecoderModel):
        return base_layout(model, checkpoint, dummy=dummy)
    from ..models.transformers.transformers_model import TransformersModel

    assert isinstance(model, TransformersModel)
    return model.layout


def notices(model: Model) -> list[str]:
    """Return lines for people on an implementation that is not ours."""
    if isinstance(model, DecoderModel):
        return []
    from ..models.transformers.transformers_model import TransformersModel

    assert isinstance(model, TransformersModel)
    return [model.notice]
