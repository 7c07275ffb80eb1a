"""ALiBi's slopes against transformers, and its bias as a rotation against the formula, also in bfloat16."""

from __future__ import annotations

import pytest
import torch
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from rootgraft.engine.checkpoint.model_config import ALIBI_DIMS, MOST_ALIBI_POSITIONS
from rootgraft.engine.models.alibi import alibi_slopes, pair_constants, position_table

CPU = torch.device("cpu")
HALF = ALIBI_DIMS // 2


@pytest.mark.parametrize("heads", [1, 6, 12, 16, 25, 32, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    slopes = alibi_slopes(heads, 8.0)
    torch.testing.assert_close(slopes, _get_alibi_slopes(heads, CPU), rtol=1e-5, atol=0)
    torch.testing.assert_close(slopes, -build_mpt_alibi_tensor(heads, 2)[:, 0, 0], rtol=1e-6, atol=0)


def rotated(pairs: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., ALIBI_DIMS] as a rotary embedding leaves them, rounded to ``dtype`` once."""
    first, second = pairs.float().split(HALF, dim=-1)
    one, part = table.split(HALF, dim=-1)
    return torch.cat((first * one - second * part, second * one + first * part), dim=-1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "scale", "largest"), [(6, 0.25, 8.0), (32, 128**-0.5, 16.0)])
def test_differences_of_scores_are_slopes_times_distances(
    dtype: torch.dtype, heads: int, scale: float, largest: float
) -> None:
    """At positions up to the last one, between whose keys the softmax decides."""
    slopes = alibi_slopes(heads, largest)
    constants = pair_constants(slopes, scale, dtype, CPU).view(heads + 1, ALIBI_DIMS)
    table = position_table(MOST_ALIBI_POSITIONS, CPU)
    places = torch.tensor([0, 1, 255, 256, 2047, 2048, 65_534, 65_535])
    keys = rotated(constants[-1].expand(len(places), -1), table[places], dtype).double()
    for head in range(heads):
        for query in (0, 300, 65_535):
            scores = scale * keys @ rotated(constants[head], table[query], dtype).double()
            expected = slopes[head].double() * places
            torch.testing.assert_close(scores - scores[0], expected, rtol=1e-6, atol=1e-9)


def test_positions_beyond_those_that_are_exact() -> None:
    with pytest.raises(ValueError, match="below 65536, not 65537"):
        position_table(MOST_ALIBI_POSITIONS + 1, CPU)
