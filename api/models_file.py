"""Models file: a YAML file of several base models on one port, for ``rootgraft serve --config``.

port: 8000                        # options of the whole server, and for all models
threads: 1
models:
  - model: org/small              # options of one model
    served-model-name: small
    replicas: 2
  - model: ./big
    served-model-name: big
    digest: 3f2a...               # of its content; an error message or rootgraft models list shows it
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..engine.config import EngineConfig
from ..engine.errors import ConfigError, ModelError
from .config import ServerConfig
from .fallback_plan import FallbackPlan, Provider, check_plan, read_plan, read_providers

MOST_MODELS = 16
_DIGEST = re.compile(r"[0-9a-f]{32}")
MODEL_OPTIONS = frozenset(
    {
        *("served_model_name", "replicas", "replica_roles", "autoscale", "keep_alive", "model_catalog"),
        *("tool_call_parser", "reasoning_parser"),
        *("default_chat_template_kwargs", "heartbeat_timeout", "watchdog_timeout", "max_queued_requests"),
        *("max_queued_tokens", "max_queue_seconds"),
    }
)
"""Server options that each model may set for itself, in addition to all options of the engine."""
OWN_OPTIONS = frozenset({"model", "revision", "served_model_name", "model_catalog", "lora_modules"})
"""Options that cannot be set above ``models`` for all models, because no two models may have the same value."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One entry of ``models``.

    Attributes:
        place: position of the entry in the models file, for errors; "" for a model that is in no models file.
        options: option names and values, not checked yet.
        digest: required digest of the base model's content; None accepts any content.
        plan: the models that may answer instead of this model.
    """

    place: str = ""
    options: Mapping[str, Any] | None = None
    digest: str | None = None
    plan: FallbackPlan = field(default_factory=FallbackPlan)


@dataclass(frozen=True, slots=True)
class ModelsFile:
    """The content of a models file.

    Attributes:
        common: options of the whole server and for all models; this is the file without ``models`` and ``providers``.
    """

    common: Mapping[str, Any]
    models: Sequence[ModelEntry]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model to serve, with checked options.

    Attributes:
        entry: the entry of the models file.
        server: the options of the whole server, combined with those of this model.
    """

    entry: ModelEntry
    engine: EngineConfig
    server: ServerConfig

    @property
    def own_options(self) -> dict[str, Any]:
        """The server's options that belong to this model."""
        return {name: getattr(self.server, name) for name in MODEL_OPTIONS}


def models_file_of(name: str, content: Mapping[str, Any]) -> ModelsFile | None:
    """Parse the content of a YAML file as a models file. Returns None for a file that contains only options.

    Raises:
        ConfigError: ``models`` is not a list of mappings, or a digest is malformed.
    """
    if "models" not in content:
        return None
    source, models = f"--config {name}", content["models"]
    if not isinstance(models, list) or not 1 <= len(models) <= MOST_MODELS:
        raise ConfigError(f"{source}: models must be a list of 1 to {MOST_MODELS} models, each with its options.")
    common = {key: value for key, value in content.items() if key not in ("models", "providers")}
    providers = read_providers(source, content.get("providers", []))
    entries = [_entry(f"{source}: models[{place}]", each, providers) for place, each in enumerate(models)]
    return ModelsFile(common, entries)


def _entry(place: str, content: Any, providers: Mapping[str, Provider]) -> ModelEntry:
    if not isinstance(content, dict):
        raise ConfigError(f"{place} must contain options, such as 'model: org/name', not {content!r}.")
    options = {str(key): value for key, value in content.items()}
    digest = options.pop("digest", None)
    if digest is not None and not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise ConfigError(f"{place}.digest must have 32 hexadecimal digits in quotes, not {digest!r}.")
    return ModelEntry(place, options, digest, read_plan(place, options, providers))


@contextmanager
def naming_place(entry: ModelEntry) -> Iterator[None]:
    """Context manager: errors about options and models that the block raises name the entry that they concern."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        if not entry.place:
            raise
        raise type(error)(f"{entry.place}: {error}") from error


def check_models(models: Sequence[ServedModel], names: Sequence[Sequence[str]]) -> None:
    """Check that models can be served together.

    Args:
        names: names of each model, without the names of its adapters.

    Raises:
        ConfigError: two models have a name or a catalogue in common, or an option is allowed for a single model only.
    """
    owners: dict[str, str] = {}
    for model, own in zip(models, names, strict=True):
        place = model.entry.place
        catalog = model.server.model_catalog
        for option, key, what in (
            *(("served-model-name", name, f"the name {name}") for name in own),
            *(("lora-modules", name, f"the name {name}") for name in model.engine.named_adapters),
            *([] if catalog is None else [("model-catalog", f"file {catalog}", f"the catalogue {catalog}")]),
        ):
            if key in owners:
                first = owners[key].rpartition(": ")[2]
                raise ConfigError(f"{place}.{option}: {first} also has {what}: change one of them.")
            owners[key] = place


def check_plans(models: Sequence[ServedModel], names: Sequence[Sequence[str]]) -> None:
    """Check that fallbacks and routes refer to existing models or providers.

    Arguments as for ``check_models``. Raises ConfigError.
    """
    served = [name for own in names for name in own]
    for model, own in zip(models, names, strict=True):
        check_plan(model.entry.place, model.entry.plan, own, served)


def check_digest(entry: ModelEntry, path: Path, found: str) -> None:
    """Check that a model has the content that its entry requires. Raises ConfigError."""
    if entry.digest not in (None, found):
        raise ConfigError(f"{entry.place}.digest: the content of {path} has the digest {found}, not {entry.digest}.")
