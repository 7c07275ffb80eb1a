"""Scripts of vLLM import from its modules under our name: they find what is here, and words about what is not."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.machine.import_graph import ROOT

import rootgraft
from rootgraft.engine.offline import vllm_modules
from rootgraft.engine.offline.print_embeddings import print_embeddings

TABLE = tomllib.loads((ROOT / "engine" / "offline" / "vllm_modules.toml").read_text("utf-8"))
NAMED = [(module, name, row) for module, rows in TABLE.items() for name, row in rows.items() if name != "*"]


@pytest.mark.parametrize(("module", "name", "row"), NAMED)
def test_each_name_of_the_table(module: str, name: str, row: str | dict[str, str]) -> None:
    statement = f"from rootgraft.{module} import {name} as found"
    match row:
        case {"refuse": words}:
            with pytest.raises(ImportError, match=re.escape(f"rootgraft has no {module}.{name}: {words}.")):
                exec(statement)
        case {"inert": _}:
            names: dict[str, object] = {}
            exec(statement, names)
            assert isinstance(names["found"], type) and names["found"](1, a=2) is None
        case str():
            names = {}
            exec(statement, names)
            place, _, ours = row.partition(":")
            assert names["found"] is getattr(importlib.import_module(place, "rootgraft"), ours)


def test_modules_of_the_table_are_no_files_of_ours() -> None:
    for module in TABLE:
        assert not (ROOT / (module.replace(".", "/") + ".py")).exists(), module


def test_names_within_a_module_that_is_refused_as_a_whole() -> None:
    with pytest.raises(ImportError, match=r"rootgraft has no multimodal\.utils\.fetch_image: images, audio"):
        exec("from rootgraft.multimodal.utils import fetch_image")
    envs = importlib.import_module("rootgraft.envs")
    with pytest.raises(ImportError, match=r"rootgraft has no envs\.VLLM_USE_V1: read os\.environ"):
        _ = envs.VLLM_USE_V1
    # Tools that walk sys.modules ask each module for such names.
    assert not hasattr(envs, "__wrapped__")


def test_other_names_are_missing_as_everywhere() -> None:
    for name in ("rootgraft.nonsense", "rootgraft.utils.nonsense", "rootgraft.engine.nonsense"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        exec("from rootgraft.entrypoints.llm import Nonsense")
    ours = find_spec("rootgraft.sampling_params")
    assert ours is not None and ours.origin == str(Path(rootgraft.__file__).with_name("sampling_params.py"))


def test_the_finder_is_installed_once() -> None:
    vllm_modules.install()
    assert sum(isinstance(each, vllm_modules.PeerModuleFinder) for each in sys.meta_path) == 1


def test_a_vector_is_printed_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_embeddings([1.5, 2, 3, 4, 5], prefix="Reward")
    print_embeddings([0.5])
    assert capsys.readouterr().out == "Reward: [1.5, 2, 3, 4, ...] (size=5)\nEmbeddings: [0.5] (size=1)\n"
