"""MTP modules: what they propose is what a plain implementation says, and answers are those without."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.core_hooks import worker_of
from support.engine.draft_engine import always_drafting
from support.models.gguf_files import write_gguf
from support.models.lora_models import base
from support.models.tiny_models import save
from support.speculation.draft_pair import Asked, DraftPair, requests, watch_proposals
from support.speculation.mtp_models import BASES, HIDDEN, PlainModule, save_mtp, save_mtp_adapter
from torch import Tensor

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import ConfigError, ModelError
from rootgraft.engine.executor.draft_weights import DraftModel, draft_pages
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.load_mtp import load_mtp

LENGTH = 3
MODULE = BASES["glm4_moe"].module
MTP = {"method": "mtp"}


pytestmark = pytest.mark.usefixtures("native_kernels_again")


@pytest.fixture(scope="module", autouse=True)
def drafting() -> Iterator[None]:
    """Draft so many tokens for every row, whatever that costs."""
    with pytest.MonkeyPatch.context() as patch:
        always_drafting(patch, LENGTH)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family a folder with the checkpoint ``base`` and its adapter ``large``."""
    found = {name: tmp_path_factory.mktemp(name) for name in BASES}
    for name, folder in found.items():
        save_mtp(name, folder / "base", shared=name != "deepseek_v3")
        save_mtp_adapter(name, folder / "large")
    return found


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], str | None, list[int]]]:
    return watch_proposals(monkeypatch)


GREEDY = {"temperature": 0.0, "max_tokens": 14, "ignore_eos": True}


@pytest.mark.parametrize(("native", "eager"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("name", BASES)
def test_a_module_proposes_what_a_plain_implementation_says(
    folders: dict[str, Path], proposed: list[Any], name: str, native: bool, eager: bool
) -> None:
    """Cold, chunked and cached prompts, one token and many, alone and together, on the base and on an adapter."""
    folder = folders[name]
    pair = DraftPair(folder, native=native, drafts=MTP, eager=eager, base="base")
    long = [number % 50 + 2 for number in range(3, 48)]
    asked: list[Asked] = [([9], GREEDY, None), (long, GREEDY, None), (long[:20], GREEDY, "large")]
    again: list[Asked] = [([*long, 5, 6], GREEDY, None), (long, GREEDY, "large")]
    for each in (asked, again, asked):
        assert pair.run("on", each) == pair.run("off", each)
    assert len(proposed) > 40 and max(len(drafts) for _, _, drafts in proposed) >= LENGTH
    plain = {adapter: PlainModule(name, folder / "base", adapter) for adapter in (None, folder / "large")}
    for tokens, adapter, drafts in proposed[:: 3 if native else 7]:
        oracle = plain[adapter and folder / "large"]
        assert drafts == oracle.drafts(tokens, len(drafts))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", BASES)
def test_answers_are_the_same_with_a_module_and_without(folders: dict[str, Path], name: str, seed: int) -> None:
    drafts = {"method": "deepseek_mtp", "num_speculative_tokens": 5}
    pair = DraftPair(folders[name], native=True, drafts=drafts, base="base")
    asked = requests(seed)
    for (tokens, logprobs, end), (drafted, drafted_logprobs, drafted_end) in zip(
        pair.run("off", asked), pair.run("on", asked), strict=True
    ):
        assert drafted == tokens and drafted_end == end
        assert [entry.token for entry in drafted_logprobs] == [entry.token for entry in logprobs]
    assert pair.cores["on"].stats()["drafted_model"]


@pytest.mark.parametrize("name", BASES)
def test_preempted_requests_get_the_same_tokens(folders: dict[str, Path], name: str) -> None:
    pair = DraftPair(folders[name], native=True, drafts=MTP, pages=10, base="base")
    asked: list[Asked] = [([number, 3, 5], {**GREEDY, "max_tokens": 60}, None) for number in range(4)]
    assert pair.run("on", asked) == pair.run("off", asked)
    assert pair.cores["on"].stats()["preemptions"] and pair.cores["on"].stats()["drafted_model"]


def test_accepted_and_rejected_drafts_leave_the_right_states(folders: dict[str, Path], tmp_path: Path) -> None:
    """A module that is right now and then: its layer adds nothing, and the layers of the model add little."""
    (tmp_path / "large").symlink_to(folders["qwen3_5"] / "large")
    base = tmp_path / "base"
    shutil.copytree(folders["qwen3_5"] / "base", base)
    tensors = load_file(base / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor *= 0.0 if name.startswith("mtp.") else 0.02
    tensors["mtp.fc.weight"] = torch.eye(HIDDEN, 2 * HIDDEN)
    tensors["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(HIDDEN)
    tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    pair = DraftPair(tmp_path, native=True, drafts=MTP, pages=14, base="base")
    prompt = [number % 23 + 2 for number in range(33)]
    asked: list[Asked] = [
        (prompt[: 33 - number // 3], {**GREEDY, "max_tokens": 40, "logprobs": 0}, [None, "large"][number % 2])
        for number in range(6)
    ]
    for _ in range(2):  # the second time there are prefix hits
        for one, other in zip(pair.run("on", asked), pair.run("off", asked), strict=True):
            assert (one[0], one[2]) == (other[0], other[2])
            assert [at.logprob for at in one[1]] == pytest.approx([at.logprob for at in other[1]], abs=1e-4)
    stats = pair.cores["on"].stats()
    assert 0 < stats["drafts_accepted_model"] < stats["drafted_model"]
    assert stats["prompt_tokens_cached"]


def load(target: Path, speculative: dict[str, Any], **options: Any) -> EngineCore:
    config = EngineConfig(
        dtype="float32", device="cpu", max_num_seqs=2, threads=1, speculative_config=json.dumps(speculative), **options
    )
    return EngineCore.load(config, target)


def test_the_start_tells_of_the_module_and_memory_holds_its_hidden_states(folders: dict[str, Path]) -> None:
    target = folders["glm4_moe"] / "base"
    plain, core = (load(target, each, kv_cache_memory=0.01) for each in ({"method": "off"}, MTP))
    assert any(line.startswith(f"Draft model: MTP module, a layer of {HIDDEN}; KV") for line in core.ready.summary)
    worker, without = worker_of(core), worker_of(plain)
    page = 4 * 16 * (2 * 2 * 2 * 16)  # two layers, K and V, two heads of 16, float32
    own, hidden = page // 2, 4 * 16 * HIDDEN
    assert worker.num_pages * (page + hidden) + worker.draft.num_pages * own <= without.num_pages * page + 2 * page
    core.close()
    plain.close()


def test_too_little_memory_for_its_kv_is_refused(folders: dict[str, Path]) -> None:
    folder, config = folders["glm4_moe"] / "base", EngineConfig(speculative_config=json.dumps(MTP))
    model = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    draft = DraftModel(load_mtp(folder, model, "plain"), "")
    page, own = 16 * 1024, 4096  # bytes of the model's pages and of the module's
    assert draft_pages(config, 2 * (page + own), page, draft) == (2, 2 * own)
    with pytest.raises(
        ConfigError, match=r"^Method mtp of --speculative-config does not have enough memory for its KV in 0\.00 GiB"
    ):
        draft_pages(config, 2 * (page + own) - 1, page, draft)


def test_a_module_in_8_bits_changes_no_answer(folders: dict[str, Path]) -> None:
    """Of a model in bfloat16 it is in 8 bits by default, of one in float32 where it is asked for."""
    pair = DraftPair(folders["deepseek_v3"], native=True, drafts={**MTP, "quantization": "int8_dynamic"}, base="base")
    asked = requests(5)
    assert [each[0] for each in pair.run("on", asked)] == [each[0] for each in pair.run("off", asked)]
    assert pair.cores["on"].stats()["drafted_model"]


def changed(folder: Path, base: Path, config: dict[str, Any], **tensors: Tensor | None) -> Path:
    """A checkpoint that is written anew with other fields and tensors of its module; None removes one."""
    folder.mkdir()
    found = load_file(base / "model.safetensors")
    found |= {f"{MODULE}.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, folder / "model.safetensors")
    fields = json.loads((base / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({}, {"eh_proj__weight": None}, r"The checkpoint lacks model.layers.2.eh_proj.weight\."),
        (
            {},
            {"enorm__weight": torch.ones(32)},
            r"model.layers.2.enorm.weight has shape \(32,\), but the config requires",
        ),
        ({}, {"mixer__weight": torch.ones(2)}, "does not use: model.layers.2.mixer.weight"),
        (
            {"num_nextn_predict_layers": 2},
            {},
            "config.json: num_nextn_predict_layers, the number of MTP modules, must be 1 to draft with one, not 2",
        ),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    folders: dict[str, Path], tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    folder = changed(tmp_path / "model", folders["glm4_moe"] / "base", config, **tensors)
    with pytest.raises(ModelError, match=f"^Method mtp of --speculative-config: .*{message}"):
        load(folder, MTP, num_gpu_blocks_override=20)
    load(folder, {"method": "ngram"}, num_gpu_blocks_override=20).close()


def test_a_checkpoint_without_a_module_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    whole = folders["glm4_moe"] / "base"
    tensors = {name: None for name in load_file(whole / "model.safetensors") if name.startswith(MODULE)}
    folder = changed(tmp_path / "model", whole, {"num_nextn_predict_layers": 0})
    found = {name: each for name, each in load_file(whole / "model.safetensors").items() if name not in tensors}
    save_file(found, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"num_nextn_predict_layers, the number of MTP modules, must be 1 .*, not 0"):
        load(folder, MTP, num_gpu_blocks_override=20)


def test_random_weights_have_no_module(folders: dict[str, Path]) -> None:
    message = "reads a module of the checkpoint, which --load-format dummy cannot create"
    with pytest.raises(ConfigError, match=f"^Method mtp of --speculative-config {message}"):
        load(folders["glm4_moe"] / "base", MTP, num_gpu_blocks_override=20, load_format="dummy")


def test_models_of_other_kinds_are_refused(tmp_path: Path) -> None:
    base("native_llama", tmp_path)
    message = "MTP modules are supported for BailingMoeV2.*, Qwen3_5MoeForCausalLM; LlamaForCausalLM has none"
    with pytest.raises(ModelError, match=f"^Method mtp of --speculative-config: {message}"):
        load(tmp_path / "native_llama", MTP, num_gpu_blocks_override=20)
    save("nemotron_h", tmp_path / "nemotron_h")
    with pytest.raises(ModelError, match=r"; the one of NemotronHForCausalLM is not supported\.$"):
        load(tmp_path / "nemotron_h", MTP, num_gpu_blocks_override=20)
    message = "reads hidden states that --model-impl transformers does not give"
    with pytest.raises(ConfigError, match=f"^Method mtp of --speculative-config {message}"):
        load(tmp_path / "native_llama", MTP, num_gpu_blocks_override=20, model_impl="transformers")


def test_gguf_files_are_refused(tmp_path: Path) -> None:
    file = write_gguf("glm4_moe", tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"^Method mtp of --speculative-config reads a folder .*, but model\.gguf"):
        load(file, MTP, num_gpu_blocks_override=20)
