"""The model catalogue: short names, such as ``qwen3:4b``, for models on the hub, with their sizes and needs."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

_CONTEXT = 8192
_BYTES_OF_A_NUMBER = 2
# Memory bandwidth of a usual laptop, in GB/s: two channels of DDR4-3200 or DDR5-4800 deliver about half of their peak.
LAPTOP_BANDWIDTH = 40.0


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model of the catalogue; sizes are as published.

    Attributes:
        name: the short name.
        repository: name on the hub, with ``:TAG`` for one GGUF file.
        form: form in which the weights are stored.
        gigabytes: size of the weights, in 1e9 bytes.
        kv: number of layers that keep KV, number of key heads, and size of a head.
        context: length of the longest sequence, in tokens.
        use: purpose of the model.
        license: license, as the publisher names it.
        active: gigabytes of weights that one token reads, if not all experts are active; 0 if a token reads all
            weights.
    """

    name: str
    repository: str
    form: str
    gigabytes: float
    kv: tuple[int, int, int]
    context: int
    use: Literal["chat", "reasoning", "embedding"]
    license: str
    active: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """Return the bytes of the stored weights and of the KV of 8,192 tokens in 16 bits."""
        layers, heads, size = self.kv
        return self.gigabytes * 1e9 + 2 * layers * heads * size * _BYTES_OF_A_NUMBER * min(_CONTEXT, self.context)

    @property
    def laptop_tokens_per_second(self) -> float:
        """Return the bound that a laptop's memory sets to one stream: each token reads all active weights once."""
        return LAPTOP_BANDWIDTH / (self.active or self.gigabytes)


@cache
def catalogue() -> Mapping[str, CatalogueModel]:
    """Return the models by name, in the order of the file."""
    table = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text("utf-8"))
    return {name: CatalogueModel(name, **fields | {"kv": tuple(fields["kv"])}) for name, fields in table.items()}


def family_sizes(name: str) -> list[str]:
    """Return the short names whose part before the colon equals that of ``name``, such as ``qwen3`` or ``qwen3:5b``."""
    return [known for known in catalogue() if known.partition(":")[0] == name.partition(":")[0]]


def search_catalogue(words: str) -> list[CatalogueModel]:
    """Return the models that contain each of the words in name, repository, form, use or license, in any case."""
    wanted = words.lower().split()
    texts = {
        model: " ".join((model.name, model.repository, model.form, model.use, model.license)).lower()
        for model in catalogue().values()
    }
    return [model for model, text in texts.items() if all(word in text for word in wanted)]
