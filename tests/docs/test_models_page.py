"""The page of what loads says what the tables say, and a tiny model proves each of its classes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from support.models.models_page import ELSEWHERE, IN_TRANSFORMERS, page
from support.models.tiny_models import MODELS
from support.models.tiny_multimodal import MULTIMODAL as TINY_MULTIMODAL
from support.models.tiny_multimodal import PUBLISHED

from rootgraft.engine.checkpoint.families.family_table import FAMILIES
from rootgraft.engine.checkpoint.hf_config import model_config
from rootgraft.engine.checkpoint.text_config import MULTIMODAL
from rootgraft.engine.errors import ModelError

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_the_tables_say() -> None:
    made = "run PYTHONPATH=tests python tests/support/models/models_page.py > docs/reference/models.md"
    assert (ROOT / "docs" / "reference" / "models.md").read_text("utf-8") == page(), made


def test_every_class_has_a_tiny_model() -> None:
    """Those that ``test_families``, ``test_renamed_tensors`` and ``test_text_towers`` compare with transformers."""
    renamed = {family.architecture for family in FAMILIES if family.tensor_names}
    tested = renamed | {changes.get("architectures", [model.__name__])[0] for _, model, changes in MODELS.values()}
    assert tested == {family.architecture for family in FAMILIES}
    whole = {model.__name__ for _, model, _ in TINY_MULTIMODAL.values()} | set(PUBLISHED.values())
    assert whole == {each.family.architecture for each in MULTIMODAL}


@pytest.mark.parametrize("name", [*IN_TRANSFORMERS.values(), *ELSEWHERE.values()])
def test_what_the_page_calls_missing_is_refused_by_name(name: str) -> None:
    assert hasattr(transformers, name) is (name in IN_TRANSFORMERS.values())
    with pytest.raises(ModelError, match=name):
        model_config({"architectures": [name], "model_type": "other"})


def test_a_family_is_a_row_of_few_lines() -> None:
    files = (ROOT / "engine" / "checkpoint" / "families").glob("*_families.py")
    begin = re.compile(r"^(?:    |_\w+ = )(?:Family|replace)\($", re.MULTILINE)
    rows = [row for file in files for row in begin.split(file.read_text("utf-8"))[1:]]
    assert len(rows) == len(FAMILIES)
    assert max(re.split(r"^ *\)", row, maxsplit=1, flags=re.MULTILINE)[0].count("\n") + 2 for row in rows) <= 50
