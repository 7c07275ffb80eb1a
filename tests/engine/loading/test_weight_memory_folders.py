"""Memory of matrices of quantised folders, known before their numbers are read, against what they then take."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.models import quantised_parts
from support.models.quantised_parts import MATRICES, folder_of

from rootgraft.engine.loading.weight_forms import WeightForm, WeightReader
from rootgraft.engine.loading.weight_memory import held_bytes
from rootgraft.engine.loading.weight_readers import SafetensorsFolder, WeightSource
from rootgraft.kernels import ops, quantised_weights

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not quantised_weights.available(), reason="no compiler")


class SideBySide:
    """Matrices of several folders as tensors of one source, by their numbers."""

    def __init__(self, folders: list[SafetensorsFolder]) -> None:
        self._folders = folders
        self.shapes = {str(index): each.shapes["m.weight"] for index, each in enumerate(folders)}

    def __getattr__(self, method: str) -> Any:
        return lambda name, *rest: getattr(self._folders[int(name)], method)("m.weight", *rest)


FOLDER_FORMS = st.tuples(
    st.sampled_from(sorted(MATRICES)), st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
)
W4, W4_ZEROS = "compressed-tensors w4a16", "compressed-tensors w4a16 asymmetric"


@given(
    st.lists(FOLDER_FORMS, min_size=1, max_size=3),
    st.sampled_from([256, 384]),
    st.sampled_from(["stored", "stored_widened", "stored_dynamic"]),
)
@example([(W4, torch.float32)], 256, "stored_widened")
@example([(W4, torch.bfloat16), (W4_ZEROS, torch.float16), ("awq gemm", torch.float16)], 256, "stored_widened")
@example([("gptq 4 bits", torch.float16)], 256, "stored_widened")
@example([("fp8 in blocks", torch.float32), ("fp8", torch.float32)], 384, "stored_widened")
@example([("compressed-tensors mxfp4", torch.float16), ("modelopt nvfp4", torch.float32)], 256, "stored")
@settings(max_examples=15, deadline=None)
def test_matrices_of_folders_are_held_as_they_are_planned(
    kinds: list[tuple[str, torch.dtype]], width: int, form: WeightForm
) -> None:
    """Side by side in one product, with rows of whole blocks or not, whatever type their scales have."""
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised_parts, "WIDTH", width)
        matrices = [MATRICES[kind]() for kind, _ in kinds]
        sources = []
        for index, (matrix, (_, scale_dtype)) in enumerate(zip(matrices, kinds, strict=True)):
            for part in ("scales", "weight_scale", "weight_scale_inv"):
                if part in matrix.parts and matrix.parts[part].dtype in (torch.float32, torch.float16):
                    matrix.parts[part] = matrix.parts[part].to(scale_dtype)
            (place := Path(folder) / str(index)).mkdir()
            sources.append(folder_of(matrix, place))
        source = SideBySide(sources)
        reader = WeightReader(cast(WeightSource, source), torch.bfloat16, CPU, form)
        packed = reader.packed(*source.shapes)
        parts = ops.parts_of(packed)
        held = sum(part.weight.nbytes + (part.scales.nbytes if hasattr(part, "scales") else 0) for part in parts)
        assert held == sum(
            held_bytes(name, shape, cast(WeightSource, source), torch.bfloat16, form, is_product=True)
            for name, shape in source.shapes.items()
        )
        x = torch.randn(3, width).bfloat16()
        plain = ops.linear(x, ops.pack_linear(reader.tensor(*source.shapes)), torch.float32)
        close = 0.03 if form == "stored_widened" or form == "stored" else 0.1
        torch.testing.assert_close(
            ops.linear(x, packed, torch.float32), plain, rtol=close, atol=close * float(plain.abs().max())
        )
