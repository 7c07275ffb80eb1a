"""One tiny model and its engine for all tests of the offline face."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine.tiny_llm import open_llm, write_adapter, write_model

from rootgraft import LLM


@pytest.fixture(scope="package")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [write_adapter(tmp_path_factory.mktemp("adapters") / str(seed), seed) for seed in (1, 2)]


@pytest.fixture(scope="package")
def llm(tiny_model: Path) -> Iterator[LLM]:
    llm = open_llm(tiny_model)
    yield llm
    llm.close()
