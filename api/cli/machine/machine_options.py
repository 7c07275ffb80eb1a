"""Options of the commands about this machine."""

from __future__ import annotations

from dataclasses import dataclass

from ....engine.config import check_options, option
from ....engine.errors import ConfigError
from ....engine.json_options import QUANTIZATIONS

_ADAPTER_CACHE = "Folder of downloaded adapters: the server's --adapter-cache-dir."
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
        "Also show how this model's weights are stored, how much memory they need, and how they are computed: a "
        "folder, a GGUF file, or the Hub name of a downloaded model. For a published model, show which formats can "
        "be loaded, even before the download.",
        group="model",
    )
    quantization: str | None = option(None, "As for rootgraft serve.", choices=QUANTIZATIONS, group="model")

    json: bool = option(False, "Print JSON for programs.", group="output")


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of ``rootgraft search``."""

    words: str = option(
        "", "Words to find in a model's name, format, use or licence. Default: all models.", group="model"
    )
    json: bool = option(False, "Print JSON for programs.", group="output")


@dataclass(frozen=True, slots=True)
class ShowOptions:
    """Options of ``rootgraft show``."""

    model: str = option("", "Name in the catalogue, as rootgraft search lists it.", group="model")
    json: bool = option(False, "Print JSON for programs.", group="output")

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model must name a model in the catalogue; rootgraft search lists them.")


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Options of ``rootgraft completion``."""

    shell: str = option("bash", "Shell to print the script for.", choices=SHELLS, group="shell")

    def __post_init__(self) -> None:
        check_options(self)
