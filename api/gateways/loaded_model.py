"""Loaded model: the facts about a model that the main process sends to gateways."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...engine.messages import Ready, decode, encode
from ...engine.types import SamplingDefaults


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The facts about a model with which a gateway builds requests.

    Attributes:
        names: names of the base model.
        path: path of the model's files, for the tokenizer.
        ready: limits of the engine.
        defaults: sampling parameters of requests that set none.
    """

    names: tuple[str, ...]
    path: Path
    ready: Ready
    defaults: SamplingDefaults

    def pack(self) -> dict[str, Any]:
        """Convert the facts to values that msgpack can serialize."""
        return {
            "names": self.names,
            "path": str(self.path),
            "ready": encode([self.ready]),
            "defaults": asdict(self.defaults),
        }

    @classmethod
    def unpack(cls, values: Mapping[str, Any]) -> LoadedModel:
        """Convert the values of ``pack`` back to the object."""
        [ready] = decode(values["ready"])
        assert isinstance(ready, Ready)
        defaults = SamplingDefaults(**values["defaults"])
        return cls(tuple(values["names"]), Path(values["path"]), ready, defaults)
