"""Options of the commands about this machine."""

from __future__ import annotations

from dataclasses import dataclass

from ....engine.config import check_options, option
from ....engine.errors import ConfigError
from ....engine.json_options import QUANTIZATIONS

_ADAPTER_CACHE = "Folder of downloaded adapters, as a server has it."
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class ListOptions:
    """Options of ``rootgraft list``."""

    json: bool = option(False, "Print JSON for programs.", group="output")
    adapter_cache_dir: str | None = option(None, _ADAPTER_CACHE, group="model")


@dataclass(frozen=True, slots=True)
class PsOptions:
    """Options of ``rootgraft ps``."""

    json: bool = option(False, "Print JSON for programs.", group="output")


@dataclass(frozen=True, slots=True)
class RmOptions:
    """Options of ``rootgraft rm``."""

    model: str = option("", "Name of a model or adapter, as rootgraft list shows it.", group="model")
    adapter_cache_dir: str | None = option(None, _ADAPTER_CACHE, group="model")
    yes: bool = option(False, "Remove it without asking.", group="model")

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model must name a model or adapter in the caches; rootgraft list shows them.")


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Options of ``rootgraft doctor``."""

    model: str | None = option(
        None,
        "Also tell how this model's weights are stored, what they will take in memory, and how they will be computed: "
        "a folder, a GGUF file, or a name on the hub that was downloaded before. Of a published model it tells which "
        "forms load, also before a download.",
        group="model",
    )
    quantization: str | None = option(None, "As of rootgraft serve.", choices=QUANTIZATIONS, group="model")

    json: bool = option(False, "Print JSON for programs.", group="output")


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of ``rootgraft search``."""

    words: str = option("", "Words that a model's name, form, use or licence has. Without them: all.", group="model")
    json: bool = option(False, "Print JSON for programs.", group="output")


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """Options of ``rootgraft show``."""

    model: str = option("", "Name in the catalogue, as rootgraft search lists it.", group="model")
    json: bool = option(False, "Print JSON for programs.", group="output")

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model must name a model of the catalogue; rootgraft search lists them.")


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Options of ``rootgraft completion``."""

    shell: str = option("bash", "Shell to complete in.", choices=SHELLS, group="shell")

    def __post_init__(self) -> None:
        check_options(self)
