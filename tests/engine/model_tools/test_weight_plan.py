"""The plan of a model on several ranks, from its configuration alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models.quantised_llama import save_quantised

from rootgraft.api.cli.main import main
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.model_tools.weight_plan import WeightPlan, plan_weights
from rootgraft.kernels import quantised_weights

LAYERS, WIDTH, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 3, 64, 96, 8, 4, 16, 1000
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def plan(folder: Path, ranks: int, **options: object) -> WeightPlan:
    config = EngineConfig(
        load_format="dummy", tensor_parallel_size=ranks, device="cpu", dtype="float32", kv_cache_memory=0.25, **options
    )
    return plan_weights(config, folder)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_all_but_the_embedding_the_norms_and_repeated_kv_heads(folder: Path, ranks: int) -> None:
    alone, part = plan(folder, 1), plan(folder, ranks)
    repeated = max(0, ranks - KV_HEADS) * LAYERS * 2 * WIDTH * HEAD_DIM
    whole_on_each = VOCABULARY * WIDTH + (2 * LAYERS + 1) * WIDTH
    assert ranks * part.memory_bytes == alone.memory_bytes + 4 * ((ranks - 1) * whole_on_each + repeated)
    assert part.kv_token_bytes * min(ranks, KV_HEADS) == alone.kv_token_bytes == LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    assert (part.ranks, part.sums, alone.sums) == (ranks, 2 * LAYERS, 0)
    assert part.kv_tokens == (1 << 28) // (16 * part.kv_token_bytes) * 16


def test_the_last_stage_has_the_head_and_the_last_layers(folder: Path) -> None:
    alone, part = plan(folder, 1), plan(folder, 1, pipeline_parallel_size=3)
    layers = alone.memory_bytes // 4 - 2 * VOCABULARY * WIDTH - WIDTH
    assert part.memory_bytes == 4 * (layers // LAYERS + VOCABULARY * WIDTH + WIDTH)
    assert LAYERS * part.kv_token_bytes == alone.kv_token_bytes
    assert (part.ranks, part.sums) == (3, 0)
    with pytest.raises(ConfigError, match="--pipeline-parallel-size 4 is more than the model's 3 layers"):
        plan(folder, 1, pipeline_parallel_size=4)


def test_stages_of_ranks_share_layers_and_their_sums(folder: Path) -> None:
    part, stage = (plan(folder, ranks, pipeline_parallel_size=3) for ranks in (2, 1))
    shard = plan(folder, 2)
    assert (part.ranks, part.stages, part.sums) == (6, 3, 2)
    assert part.kv_token_bytes == shard.kv_token_bytes // 3 == stage.kv_token_bytes // 2
    assert part.memory_bytes < min(shard.memory_bytes, stage.memory_bytes)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_a_token_reads_its_experts_and_a_row_of_the_embedding(family: str, tmp_path: Path) -> None:
    """Also where the experts of a layer are one tensor; stages read together what one rank does."""
    names = {"mixtral": "MixtralForCausalLM", "gpt_oss": "GptOssForCausalLM"}
    count, chosen = 4, 1
    fields = {"architectures": [names[family]], "model_type": family, "num_local_experts": count}
    fields |= {"num_experts_per_tok": chosen, "layer_types": ["full_attention"] * LAYERS, "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | fields))
    biases = 2 * INNER + WIDTH if family == "gpt_oss" else 0
    unread = VOCABULARY * WIDTH + LAYERS * (count - chosen) * (3 * WIDTH * INNER + biases)
    alone, part = plan(tmp_path, 1), plan(tmp_path, 2)
    read, read_in_stages = (
        each.h200_milliseconds[0] * 4.8e9 for each in (alone, plan(tmp_path, 1, pipeline_parallel_size=3))
    )
    assert read == read_in_stages == pytest.approx(alone.memory_bytes - 4 * unread)
    assert part.h200_milliseconds[0] < 0.6 * alone.h200_milliseconds[0]


@pytest.mark.parametrize(("ranks", "reads"), [(4, "7.2"), (8, "3.6")])
def test_a_dry_run_tells_what_70b_takes(
    ranks: int, reads: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the shape alone: bytes of each rank, sums in a step, and milliseconds on H200s, of which a token's row of the
    embedding takes none."""
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    others = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | shape | others))
    words = ["serve", str(tmp_path), "--load-format", "dummy", "--dtype", "bfloat16", "--device", "cpu", "--dry-run"]
    main([*words, "--tensor-parallel-size", str(ranks)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "160 all-reduces of hidden states" in printed
    assert f"{reads} ms to read the weights and 1.6 to 2.4 ms for all-reduces" in printed, printed


@pytest.mark.skipif(not quantised_weights.available(), reason="no compiler")
def test_activations_are_said_to_be_rounded_where_they_are(tmp_path: Path) -> None:
    """To 8 bits where the model was made for that and is in bfloat16; weights of 8 bits are not rounded again."""
    save_quantised("compressed-tensors w8a8", tmp_path)

    def computed(dtype: str) -> str:
        return plan_weights(EngineConfig(device="cpu", dtype=dtype, kv_cache_memory=0.25), tmp_path).computed

    exact = "integers of 8 bits as stored, sums scaled in fp32"
    assert computed("bfloat16") == computed("float32") == exact
    config = json.loads((tmp_path / "config.json").read_text())
    [group] = config["quantization_config"]["config_groups"].values()
    group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert computed("bfloat16") == "integers of 8 bits as stored, activations rounded to 8 bits too"
    assert computed("float32") == exact


def test_ranks_that_do_not_divide_the_model_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 does not divide"):
        plan(folder, 3)


def test_a_dry_run_tells_the_plan_and_ends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["serve", str(folder), "--load-format", "dummy", "--device", "cpu", "--dry-run"]
    assert main([*common, "-tp", "2"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "weights on each of 2 ranks" in told
    assert "2; per step, 6 all-reduces of hidden states and one gather of the logits" in told
    assert main([*common, "-pp", "2"]) == 0
    assert "2; each has some of the layers" in " ".join(capsys.readouterr().out.split())
    assert main([*common, "-tp", "3"]) == 1
    assert "does not divide" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 1 << 24, "hidden_size": 1 << 16}))
    assert main([*common, "-tp", "2"]) == 1
    assert "The weights do not fit" in " ".join(capsys.readouterr().out.split())


def test_a_dry_run_of_a_models_file_names_the_entry_that_cannot_be_served(folder: Path, capsys) -> None:
    lines = [
        "load-format: dummy",
        "dry-run: true",
        "models:",
        *(f"  - model: {folder}\n    served-model-name: m{n}" for n in (0, 1)),
    ]
    (folder / "models.yaml").write_text("\n".join([*lines, "    tensor-parallel-size: 3"]))
    assert main(["serve", "--config", str(folder / "models.yaml")]) == 1
    assert "models[1]: --tensor-parallel-size 3 does not divide" in capsys.readouterr().err
