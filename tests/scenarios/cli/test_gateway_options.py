"""``--gateways``: its bounds, what it does not go with, and vLLM's name for it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from rootgraft.api.config import MOST_GATEWAYS, ServerConfig
from rootgraft.api.http.listener import private_socket
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
    with pytest.raises(ConfigError, match="--gateways can serve only one base model"):
        serve_models([model], lambda: [model])


def test_the_main_process_listens_where_only_its_user_can_connect() -> None:
    with private_socket() as (sock, path):
        assert sock.getsockname() == path
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    assert not os.path.exists(path) and not os.path.exists(os.path.dirname(path))


def test_a_temporary_folder_whose_path_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match=r"--gateways needs a socket in .*path too long"), private_socket():
        pass
    assert not list(folder.iterdir())
