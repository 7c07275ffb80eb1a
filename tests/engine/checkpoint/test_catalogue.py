"""The catalogue: names that the hub understands, words that find models, and files behind a short name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import validate_repo_id
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.checkpoint.catalogue import catalogue, search_catalogue
from rootgraft.engine.checkpoint.locate import hub_name, resolve_model
from rootgraft.engine.errors import ModelError

MODELS = list(catalogue().values())
ANY_MODEL = st.sampled_from(MODELS)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_model_is_named_as_the_hub_names_it(model: Any) -> None:
    assert re.fullmatch(r"[a-z0-9.-]+:[a-z0-9.-]+", model.name)
    repository, _, tag = model.repository.partition(":")
    validate_repo_id(repository)
    assert repository.count("/") == 1
    # A file of the repository has its form for a tag, and a folder has no tag.
    assert tag in ("", model.form) and bool(tag) == model.form.startswith("Q")
    assert 0 <= model.active < model.gigabytes < model.memory_bytes / 1e9


@given(ANY_MODEL, st.data())
def test_a_search_finds_what_has_all_words_in_any_case(model: Any, data: st.DataObject) -> None:
    words = data.draw(
        st.lists(st.sampled_from([model.name, model.form, model.use, *model.license.split()]), max_size=3)
    )
    assert model in search_catalogue(" ".join(words).upper())
    assert search_catalogue(f"{model.name} no-such-word") == []


@pytest.mark.parametrize("name", ["qwen3:4b", "qwen2.5:0.5b"])
def test_a_short_name_is_fetched_from_the_hub_and_served_as_itself(name: str, tmp_path: Path, monkeypatch) -> None:
    repository, _, tag = catalogue()[name].repository.partition(":")

    def snapshot(asked: str, **options: Any) -> str:
        assert asked == repository
        (tmp_path / ("config.json" if not tag else f"Some-{tag}.gguf")).write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    files = resolve_model(name)
    assert files.name == name
    assert files.path == (tmp_path / f"Some-{tag}.gguf" if tag else tmp_path)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "qwen3:4b").mkdir()
    (tmp_path / "qwen3:4b" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("qwen3:4b").path == Path("qwen3:4b")


@pytest.mark.parametrize("name", ["qwen3", "qwen3:9b"])
def test_a_family_without_that_size_is_told_with_its_sizes(name: str) -> None:
    with pytest.raises(ModelError, match=rf"the catalogue has no {name}; it has qwen3:0.6b, .* Try: rootgraft search$"):
        resolve_model(name)


@given(st.text())
def test_any_other_name_stays(name: str) -> None:
    assert hub_name(name) == name or name in catalogue()
