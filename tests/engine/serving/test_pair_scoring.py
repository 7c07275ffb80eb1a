"""The scores of pairs by a classification head."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rootgraft.engine.errors import RequestError
from rootgraft.engine.serving.pair_scoring import head_score
from rootgraft.engine.types import Pooler


@pytest.mark.parametrize(("is_raw", "score"), [(True, 0.5), (False, 1 / (1 + math.exp(-0.5)))])
def test_a_head_of_one_class(is_raw: bool, score: float) -> None:
    pooler = Pooler(generates=False, labels=("relevant",), is_raw_score=is_raw)
    assert head_score(np.array([0.5], np.float32).tobytes(), pooler) == pytest.approx(score)


@pytest.mark.parametrize("is_raw", [True, False])
def test_an_adapters_head_of_several_classes_scores_no_pairs(is_raw: bool) -> None:
    pooler = Pooler(generates=False, labels=("relevant",), is_raw_score=is_raw)
    with pytest.raises(RequestError, match="This adapter has a head of 3 classes"):
        head_score(np.zeros(3, np.float32).tobytes(), pooler)
