"""Loaded model: what the main process tells gateways of a model, as they need to know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...engine.messages import Ready, decode, encode
from ...engine.types import SamplingDefaults


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a gateway makes requests with.

    Attributes:
        names: names of the base model.
        path: the path of its files, for the tokenizer.
        ready: limits of the engine.
        defaults: sampling parameters of requests that name none.
    """

    names: tuple[str, ...]
    path: Path
    ready: Ready
    defaults: SamplingDefaults

    def pack(self) -> dict[str, Any]:
        """Return it as values that msgpack knows."""
        return {
            "names": self.names,
            "path": str(self.path),
            "ready": encode([self.ready]),
            "defaults": asdict(self.defaults),
        }

    @classmethod
    def unpack(cls, values: Mapping[str, Any]) -> LoadedModel:
        """Return what ``pack`` was called on."""
        [ready] = decode(values["ready"])
        assert isinstance(ready, Ready)
        defaults = SamplingDefaults(**values["defaults"])
        return cls(tuple(values["names"]), Path(values["path"]), ready, defaults)
