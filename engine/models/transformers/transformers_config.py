"""Configuration of a model of the transformers library, and refusal of features that are not computed exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...checkpoint.config_fields import Fields
from ...checkpoint.families.library_classes import LIBRARY_WRAPPERS, LibraryWrapper
from ...checkpoint.model_config import KvShape
from ...checkpoint.read_config import CONFIG, GENERATION_CONFIG, read_config_file, read_generation_config
from ...checkpoint.text_config import TEXT, shared_keys
from ...errors import ModelError, quoted, shortened

# Keys that are refused, with the values at which they have no effect (None always has none), and the reason.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "quantization_config": ((), "quantised weights are not supported there"),
    "compression_config": ((), "quantised weights are not supported there"),
    "is_encoder_decoder": ((False,), "encoders are not supported"),
    "add_cross_attention": ((False,), "cross attention is not supported"),
    "text_config": ((), "only the multimodal models in docs/reference/models.md are supported"),
    "vision_config": ((), "only the multimodal models in docs/reference/models.md are supported"),
    "audio_config": ((), "only the multimodal models in docs/reference/models.md are supported"),
    "alibi": ((False,), "biases of attention are not supported"),
}
# Kinds of layers that transformers' attention interface covers, as ``layer_types`` names them.
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class TransformersConfig:
    """The part of the model's configuration that the engine reads; see ``ModelConfig``.

    Attributes:
        shapes: number and dimensions of the heads in each layer's caches.
        kv_sources: for each layer the layer whose keys and values it reads, mostly itself.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    shapes: tuple[KvShape, ...]
    kv_sources: tuple[int | None, ...]
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.shapes)

    @property
    def num_kv_heads(self) -> int:
        return self.shapes[0].heads

    @property
    def head_dim(self) -> int:
        return self.shapes[0].dim

    @property
    def kv_shapes(self) -> tuple[KvShape | None, ...]:
        own = zip(self.shapes, self.kv_sources, strict=True)
        return tuple(shape if source == index else None for index, (shape, source) in enumerate(own))

    @property
    def has_states(self) -> bool:
        return False

    @property
    def latent(self) -> None:
        """None, as attention has keys and values of its own."""

    @property
    def index_keys(self) -> tuple[None, ...]:
        """None for each layer, as attention sees all tokens, or those of a window."""
        return (None,) * self.num_layers

    @property
    def has_position_keys(self) -> bool:
        """False, as keys are those of the library, without ALiBi."""
        return False

    @property
    def rope_switch(self) -> None:
        """None, as sequences are limited to the length of one rotary embedding."""


@dataclass(frozen=True, slots=True)
class LibraryModel:
    """A class of the library, and a checkpoint's configuration for it.

    Attributes:
        model_class: class of the causal model.
        config: the library's configuration object.
        longest: number of tokens of the longest sequence.
        towers: modules of the checkpoint beside the language model, which are not loaded.
    """

    model_class: Any
    config: Any
    longest: int
    towers: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the class."""
        return str(self.model_class.__name__)


def has_class(fields: Mapping[str, Any]) -> bool:
    """Return whether the library has the causal model that a ``config.json`` names."""
    return _wrapper(fields) is not None or _class_name(fields) is not None


def read_library_model(folder: Path) -> LibraryModel:
    """Read the configuration of a folder in Hugging Face format; code that the configuration names is never run.

    Raises:
        ModelError: the library has no such causal model, or the model has a part that is refused.
    """
    fields = read_config_file(folder)
    if (wrapper := _wrapper(fields)) is not None:
        fields = _language_fields(fields, wrapper)
    _refuse(fields)
    name = _class_name(fields)
    if name is None:
        raise ModelError(
            f"{CONFIG}: transformers {transformers.__version__} has no causal language model "
            f"{quoted(fields.get('architectures'))} with model_type {quoted(fields.get('model_type'))}; code from the "
            "model's repository is never run."
        )
    model_class = getattr(transformers, name)
    if not model_class._can_set_attn_implementation():
        raise ModelError(
            f"{CONFIG}: {name} of transformers computes its attention outside of the library's attention interface, "
            "which is not supported."
        )
    try:
        config = CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields))
    except Exception as error:
        # The class's own checks may raise anything.
        raise ModelError(f"{CONFIG}: transformers refuses it: {shortened(str(error), 300)}") from error
    # The class may set these keys by its defaults.
    _refuse({key: getattr(config, key, None) for key in _REFUSED})
    kinds = getattr(config, "layer_types", None) or []
    if others := sorted(set(map(str, kinds)) - _LAYER_TYPES):
        raise ModelError(
            f"{CONFIG}: {name} has layers of {others[0]}, which --model-impl transformers does not support."
        )
    return LibraryModel(model_class, config, _longest(config, name), () if wrapper is None else wrapper.towers)


def _wrapper(fields: Mapping[str, Any]) -> LibraryWrapper | None:
    """Return the multimodal class that a configuration names, if its language model is served."""
    names = fields.get("architectures")
    return LIBRARY_WRAPPERS.get(names[0]) if isinstance(names, list) and names and isinstance(names[0], str) else None


def _language_fields(fields: Mapping[str, Any], wrapper: LibraryWrapper) -> dict[str, Any]:
    """Return the configuration of a multimodal checkpoint's language model. Raises ModelError without one."""
    text = Fields(fields, CONFIG).mapping(TEXT)
    if text.get("model_type", wrapper.text_type) != wrapper.text_type:
        raise Fields(text, f"{CONFIG}: {TEXT}").wrong("model_type", wrapper.text_type)
    quantised = {key: fields[key] for key in ("quantization_config", "compression_config") if key in fields}
    own = {"architectures": [wrapper.text_class], "model_type": wrapper.text_type}
    return {**text, **shared_keys(fields), **quantised, **own}


def end_tokens(folder: Path, config: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the end tokens of ``generation_config.json``, or those of the configuration if it names none."""
    key = "eos_token_id"
    named = Fields(read_generation_config(folder), GENERATION_CONFIG).token_ids(key, vocab_size)
    return named or Fields({key: getattr(config, key, None)}, CONFIG).token_ids(key, vocab_size)


def _refuse(fields: Mapping[str, Any]) -> None:
    """Raise ModelError for the first key with an unsupported value."""
    for key, (harmless, reason) in _REFUSED.items():
        if (value := fields.get(key)) is not None and value not in harmless:
            raise ModelError(
                f"{CONFIG}: {key} = {quoted(value)} is not supported by --model-impl transformers: {reason}."
            )


def _class_name(fields: Mapping[str, Any]) -> str | None:
    """Return the single class under ``architectures`` if it is the library's causal model for the ``model_type``.

    If ``architectures`` is missing, return the causal model for the type if the library has only one.
    """
    names, model_type = fields.get("architectures"), fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
        return None
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ())
    known = (known,) if isinstance(known, str) else known
    if not names and len(known) == 1:
        return str(known[0])
    return names[0] if isinstance(names, list) and len(names) == 1 and names[0] in known else None


def _longest(config: Any, name: str) -> int:
    """Return the longest sequence; with LongRoPE the length up to which all sequences have the same rotation."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or isinstance(longest, bool) or longest < 1:
        raise ModelError(
            f"{CONFIG}: max_position_embeddings of {name} must be a whole number above 0, not {longest!r}."
        )
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            outer: Any = getattr(config, "original_max_position_embeddings", None)
            original: Any = rope.get("original_max_position_embeddings") or outer or longest
            longest = min(longest, int(original))
    return longest
