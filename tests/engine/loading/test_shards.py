"""Shards of tensor-parallel ranks: the logits of one rank, for every family that is split; the others by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.lockstep_ranks import run_ranks
from support.models.paged_run import CPU, run_whole
from support.models.tiny_models import COMMON, LONGROPE, MODELS, VOCAB, save
from transformers import FalconH1Config, FalconH1ForCausalLM, LlamaConfig, LlamaForCausalLM

from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.shards import Shard, check_split
from rootgraft.engine.loading.tensor_names import expected_shapes
from rootgraft.engine.loading.weight_readers import SafetensorsFolder
from rootgraft.kernels.collectives import ALONE, Ranks

TOLERANCE = 1e-4  # of the largest logit
TOKENS = [(7 * i + i * i) % VOCAB for i in range(20)]

NORMS = "norms over all query heads together cannot be split over ranks"
CONVOLUTIONS = "short convolutions cannot be split over ranks"
SHARED = "blocks that layers share cannot be split over ranks"
BLOCKS = "an index of blocks cannot be split over ranks"
AMONG_QUERIES = "KV heads, which are stored in one tensor with their queries"
INDIVISIBLE = "no size divides this model"
REFUSED = {
    **dict.fromkeys(
        ("olmoe", "olmo2", "olmo3", "olmo3_plain", "flex_olmo", "minimax_m2", "olmo_hybrid", "olmo_hybrid_rotated"),
        NORMS,
    ),
    **dict.fromkeys(("lfm2", "lfm2_biased", "lfm2_moe", "lfm3", "lfm3_biased"), CONVOLUTIONS),
    **dict.fromkeys(("zamba2", "zamba2_plain"), SHARED),
    **dict.fromkeys(("minimax_m3", "minimax_m3_chosen", "minimax_m3_wide_blocks"), BLOCKS),
    **dict.fromkeys(("falcon", "falcon_new_one_norm", "gpt_bigcode"), AMONG_QUERIES),
    **dict.fromkeys(("falcon_h1", "falcon_h1_normed", "granite_hybrid", "qwen3_5_biased"), INDIVISIBLE),
}
"""Why a family is not split; the last ones are small models whose sizes have no common divisor."""


def load(folder: Path, ranks: Ranks = ALONE):
    shard = None if ranks is ALONE else Shard.of(read_model_config(folder), ranks)
    return load_model(folder, dtype=torch.float32, device=CPU, shard=shard)


@pytest.mark.parametrize("name", [*MODELS, *LONGROPE])
def test_ranks_have_the_logits_of_one(name: str, tmp_path: Path) -> None:
    """Each family has them with two ranks or with more than there are KV heads, but those that are refused by name."""
    folder = save(name, tmp_path)
    config = read_model_config(folder)
    if name in REFUSED:
        for size in (2, 6):
            with pytest.raises(ConfigError, match=REFUSED[name]):
                check_split(config, size)
        return
    sizes = [size for size in (2, 6) if splits(config, size)]
    assert sizes
    expected = run_whole(load(folder), TOKENS)
    for size in sizes:
        logits, *others = run_ranks(size, lambda ranks: run_whole(load(folder, ranks), TOKENS))
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))
        assert all(part.shape[1] < VOCAB for part in others)


def test_a_model_whose_index_chooses_all_blocks_is_split(tmp_path: Path) -> None:
    folder = save("minimax_m3", tmp_path)
    check_split(read_model_config(folder).up_to(128), 2)
    expected = run_whole(load(folder), TOKENS)
    logits, _ = run_ranks(2, lambda ranks: run_whole(load(folder, ranks), TOKENS))
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def test_a_rank_reads_its_slices_of_what_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank has a split tensor whole in memory, not even for a moment."""
    folder, whole, read = save("llama", tmp_path), [], SafetensorsFolder.read

    def noted(source: SafetensorsFolder, name: str, out: torch.Tensor, part: int | None = None) -> None:
        whole.append(name)
        read(source, name, out, part)

    monkeypatch.setattr(SafetensorsFolder, "read", noted)
    run_ranks(2, lambda ranks: load(folder, ranks))
    assert {name.split(".")[-2] for name in whole} == {
        "embed_tokens",
        "input_layernorm",
        "post_attention_layernorm",
        "norm",
    }


def test_three_ranks_of_three_kv_heads(tmp_path: Path) -> None:
    torch.manual_seed(4)
    fields = COMMON | {"num_key_value_heads": 3, "tie_word_embeddings": True, "vocab_size": VOCAB}
    LlamaForCausalLM(LlamaConfig(**fields, mlp_bias=True, attention_bias=True)).save_pretrained(tmp_path)
    expected = run_whole(load(tmp_path), TOKENS)
    found = run_ranks(3, lambda ranks: run_whole(load(tmp_path, ranks), TOKENS))
    torch.testing.assert_close(found[0], expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))
    assert sorted(part.shape[1] for part in found[1:]) == [44, 44]


def test_attention_and_a_state_space_side_by_side(tmp_path: Path) -> None:
    """Both are split: Falcon H1 with as many heads of either as ranks divide; B and C are on each rank."""
    torch.manual_seed(5)
    fields = MODELS["falcon_h1"][2] | {"mamba_n_heads": 6, "mamba_d_ssm": 96, "vocab_size": VOCAB}
    FalconH1ForCausalLM(FalconH1Config(**COMMON | fields)).save_pretrained(tmp_path)
    expected = run_whole(load(tmp_path), TOKENS)
    found = run_ranks(2, lambda ranks: run_whole(load(tmp_path, ranks), TOKENS))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * float(expected.abs().max()))


def splits(config, size: int) -> bool:
    try:
        check_split(config, size)
    except ConfigError:
        return False
    return True


def test_the_largest_logit_is_that_of_all_ranks(tmp_path: Path) -> None:
    folder = save("llama", tmp_path)

    def best(ranks: Ranks) -> torch.Tensor:
        model = load(folder, ranks)
        hidden = torch.randn(9, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
        hidden[4] = 0.0  # all logits are equal: the first token counts
        hidden[5] = torch.nan
        found = model.best(hidden)
        return torch.stack([found.value.double(), found.column.double()])

    expected, found = best(ALONE), run_ranks(2, best)[0]
    number = ~expected[0].isnan()
    torch.testing.assert_close(found[:, number], expected[:, number])
    assert found[0, 5].isnan()


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("lfm2", 2, "short convolutions cannot be split over ranks"),
        ("falcon_h1_normed", 2, "size 2 does not divide Mamba-2's 5 heads and Mamba-2's 1 groups"),
        ("qwen3_5_biased", 2, "size 2 does not divide the delta net's 3 key heads"),
        ("gemma4_same_values", 2, "neither divides the model's 3 KV heads nor is a multiple of them. It takes 6."),
        ("olmo2", 2, "norms over all query heads together cannot be split"),
        ("llama", 4, "does not divide the model's 6 heads. It takes 2, 6."),
        ("llama", 3, "neither divides the model's 2 KV heads nor is a multiple of them. It takes 2, 6."),
    ],
)
def test_what_is_not_split_is_refused_before_a_weight_is_read(
    name: str, size: int, reason: str, tmp_path: Path
) -> None:
    folder = save(name, tmp_path)
    with pytest.raises(ConfigError, match=reason) as refusal:
        check_split(read_model_config(folder), size)
    assert str(refusal.value).startswith(f"--tensor-parallel-size {size}")


def test_a_model_that_no_size_divides_is_told_so(tmp_path: Path) -> None:
    config = replace(read_model_config(save("llama", tmp_path)), num_heads=5, num_kv_heads=5)
    with pytest.raises(ConfigError, match="no size divides this model"):
        check_split(config, 2)


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma2", "cohere"])
def test_shards_have_each_row_of_a_split_tensor_once(name: str, tmp_path: Path) -> None:
    """The sizes of two shards are those of the whole model, but for what each rank has whole."""
    config = read_model_config(save(name, tmp_path))
    whole = expected_shapes(config)
    parts = run_ranks(2, lambda ranks: expected_shapes(Shard.of(config, ranks).config))
    for tensor, shape in whole.items():
        sizes = [torch.Size(part[tensor]).numel() for part in parts]
        assert sum(sizes) == torch.Size(shape).numel() or sizes == [torch.Size(shape).numel()] * 2
