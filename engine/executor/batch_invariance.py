"""Batch invariance (``--batch-invariant``): when a request's tokens can be independent of other requests."""

from __future__ import annotations

import torch

from ...kernels import ops
from ..checkpoint.model_config import ModelConfig
from ..config import EngineConfig
from ..errors import ConfigError


def check_invariance(config: EngineConfig, model: ModelConfig | None, device: torch.device, dtype: torch.dtype) -> None:
    """If ``--batch-invariant`` is given, check that the model can be computed so. Called before the weights are read.

    The results of a token must not depend on the other tokens of a step. The native CPU kernels always add up the terms
    of a token in a fixed order. The GPU kernels for this option do so too, but they compute only dense models.

    Args:
        model: configuration of the model; None for a model of the transformers library.

    Raises:
        ConfigError: the option is not possible; the message gives the reason.
    """
    if config.batch_invariant and (reason := _reason(model, device, dtype)):
        raise ConfigError(f"--batch-invariant is not possible: {reason}")


def _reason(model: ModelConfig | None, device: torch.device, dtype: torch.dtype) -> str:
    """Return why the option cannot be kept and what to try instead; an empty string if it can be kept."""
    if model is None:
        return "the transformers library computes this model with torch's matrix products. Leave the option out."
    if device.type == "cpu":
        return (
            ""
            if ops.native_kernels()
            else "plain torch computes, because there are no native kernels. Leave the option out."
        )
    if not ops.on_triton(device) or dtype is torch.float32:
        return "plain torch computes on this GPU or in float32. Try: --dtype bfloat16 on a GPU of sm_80 or newer"
    kinds = {
        "a mixture of experts": any(layer.mixture is not None for layer in model.layers),
        "latent attention": model.latent is not None,
        "recurrent layers": model.has_states,
    }
    found = [name for name, is_there in kinds.items() if is_there]
    return (
        f"models with {' and '.join(found)} do not support it on a GPU. Leave the option out, or use --device cpu"
        if found
        else ""
    )


def check_weights(config: EngineConfig, form: str, device: torch.device) -> None:
    """Check that a form of weights has products of that kind. Raises ConfigError."""
    if config.batch_invariant and device.type == "cuda" and form != "plain":
        raise ConfigError(
            "--batch-invariant is not possible with quantised weights on a GPU. Try: rootgraft serve --quantization "
            "widened"
        )
