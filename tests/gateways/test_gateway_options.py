"""``--gateways``: its bounds, what it does not go with, and vLLM's name for it."""

from __future__ import annotations

import pytest

from rootgraft.api.config import MOST_GATEWAYS, ServerConfig
from rootgraft.api.http.server import serve_models
from rootgraft.api.models_file import ModelEntry, ServedModel
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError


@pytest.mark.parametrize("count", [1, 2, MOST_GATEWAYS])
def test_bounds(count: int) -> None:
    assert ServerConfig(gateways=count).gateways == count


@pytest.mark.parametrize(("count", "limit"), [(0, "at least 1"), (-1, "at least 1"), (MOST_GATEWAYS + 1, "at most 16")])
def test_beyond_the_bounds(count: int, limit: str) -> None:
    with pytest.raises(ConfigError, match=f"--gateways must be {limit}, not {count}"):
        ServerConfig(gateways=count)


def test_a_models_file_is_refused_before_anything_starts() -> None:
    entry = ModelEntry("fleet.yaml: models[0]", {"model": "m"})
    model = ServedModel(entry, EngineConfig(model="m"), ServerConfig(gateways=2, host="256.0.0.1"))
    with pytest.raises(ConfigError, match="--gateways serves one base model"):
        serve_models([model], lambda: [model])
