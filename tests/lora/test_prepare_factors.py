"""From files to factors: the identity of a content, values beyond a type's range, and files in half precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models.lora_folders import (
    DOWN,
    HIDDEN,
    VOCAB,
    K,
    Q,
    file_of,
    good_config,
    good_tensors,
    key,
    small_layout,
    small_reader,
    write_folder,
)

from rootgraft.lora.base_projections import EMBEDDING, BaseLayout
from rootgraft.lora.errors import AdapterError
from rootgraft.lora.prepare_factors import row_norms
from rootgraft.lora.published.module_weights import ModuleWeights
from rootgraft.lora.read_adapter import AdapterReader


def other_digests(tmp_path: Path) -> list[str]:
    """Digests of adapters that differ in one thing each."""
    base = good_tensors()
    half = {name: tensor.half() for name, tensor in base.items()}
    moved = dict(base)
    moved[key(Q, "lora_A.weight")] = base[key(Q, "lora_A.weight")] + 1e-6
    embedding = {
        key(EMBEDDING, "lora_embedding_A"): torch.ones(2, VOCAB),
        key(EMBEDDING, "lora_embedding_B"): torch.ones(HIDDEN, 2),
    }
    cases = [
        (good_config(), base),
        (good_config(lora_alpha=5), base),
        (good_config(use_rslora=True), base),
        (good_config(alpha_pattern={"q_proj": 3}), base),
        (good_config(alora_invocation_tokens=[1]), base),
        (good_config(alora_invocation_tokens=[1, 2]), base),
        (good_config(), half),
        (good_config(), moved),
        (good_config(), {name: tensor for name, tensor in base.items() if DOWN not in name}),
        (good_config(target_modules="all"), {**base, **embedding}),
    ]
    return [
        small_reader().read(str(write_folder(tmp_path / str(i), config, file_of(tensors)))).digest
        for i, (config, tensors) in enumerate(cases)
    ]


def test_whatever_changes_the_result_changes_the_identity(tmp_path):
    digests = other_digests(tmp_path)
    assert len(set(digests)) == len(digests)


def test_what_does_not_change_the_result_does_not_change_the_identity(tmp_path):
    plain = small_reader().read(str(write_folder(tmp_path / "1"))).digest
    config = good_config(lora_dropout=0.3, inference_mode=True, revision="x", base_model_name_or_path="y")
    turned = dict(reversed(good_tensors().items()))
    assert small_reader().read(str(write_folder(tmp_path / "2", config, file_of(turned)))).digest == plain


def dora(**magnitudes: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {**good_tensors(), **{key(m, "lora_magnitude_vector"): torch.ones(HIDDEN) for m in (Q, DOWN)}}
    return {**found, **magnitudes}


def test_values_beyond_the_models_type(tmp_path):
    huge = {**good_tensors(), key(Q, "lora_A.weight"): torch.full((2, HIDDEN), 1e6)}
    path = str(write_folder(tmp_path, None, file_of(huge)))
    assert small_reader(dtype=torch.bfloat16).read(path).rank == 2
    with pytest.raises(AdapterError, match=r"beyond the range of torch\.float16"):
        small_reader(dtype=torch.float16).read(path)


def test_a_dora_norm_of_zero(tmp_path):
    layout = small_layout()
    zero = BaseLayout(
        layout.projections, layout.dtype, layout.device, lambda _: torch.zeros(HIDDEN, HIDDEN), layout.read_bias
    )
    tensors = dora()
    tensors[key(Q, "lora_B.weight")] = torch.zeros(HIDDEN, 2)
    path = str(write_folder(tmp_path, good_config(use_dora=True), file_of(tensors)))
    with pytest.raises(AdapterError, match="norm"):
        AdapterReader(zero, 8).read(path)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [1, 7, 4096])
def test_norms_of_dora_in_any_blocks(block, transposed):
    """As long as the rows of ``W + s B A`` are; of an embedding, which is stored transposed, as its columns."""
    g = torch.Generator().manual_seed(block)
    weight, a, b = torch.randn(23, 11, generator=g), torch.randn(3, 11, generator=g), torch.randn(23, 3, generator=g)
    module = ModuleWeights(0.7, a, b, None, torch.ones(23))
    stored = weight
    if transposed:
        stored = weight.T.contiguous()
    expected = (weight.double() + 0.7 * b.double() @ a.double()).norm(dim=1)
    found = row_norms(stored, module, torch.device("cpu"), block, transposed=transposed)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_read_exactly(dtype, tmp_path):
    tensors = {name: tensor.to(dtype) for name, tensor in good_tensors(3).items()}
    adapter = small_reader().read(str(write_folder(tmp_path, None, file_of(tensors))))
    torch.testing.assert_close(adapter.factors[Q].a, tensors[key(Q, "lora_A.weight")].float(), rtol=0, atol=0)
    assert adapter.factors[Q].ranks == (2, 0) and K not in adapter.factors
