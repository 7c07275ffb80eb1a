"""What quantisation costs the real model, within bounds that a wrong formula would break."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality import measure, windows
from rootgraft.kernels import quantised_weights

# form -> most that perplexity may grow, least agreement of first choices with float32
BOUNDS = {
    "bfloat16": (1.01, 0.97),
    "stored": (1.01, 0.93),
    "int8_weight_only": (1.02, 0.92),
    "int8_dynamic": (1.08, 0.80),
}


@pytest.mark.heavy
@pytest.mark.skipif(not quantised_weights.available(), reason="no compiler")
def test_perplexity_and_agreement(smollm2_gguf: Path) -> None:
    for line in measure(smollm2_gguf, windows(smollm2_gguf)[:1], ["float32", *BOUNDS]):
        if line.form in BOUNDS:
            most, least = BOUNDS[line.form]
            assert line.perplexity_ratio < most, line
            assert line.agreement > least, line
