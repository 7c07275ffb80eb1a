"""EAGLE-3 heads: what they propose is what a plain implementation says, and answers are those without."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine.core_hooks import worker_of
from support.engine.draft_engine import always_drafting
from support.models.lora_models import LINEARS, base, make_adapter
from support.speculation.draft_pair import Asked, DraftPair, requests, watch_proposals
from support.speculation.eagle_heads import DIM, EPS, HEADS, KV_HEADS, THETA, save_head
from torch import Tensor
from torch.nn import functional

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import ConfigError, ModelError

LENGTH = 3


pytestmark = pytest.mark.usefixtures("native_kernels_again")


@pytest.fixture(scope="module", autouse=True)
def drafting() -> Iterator[None]:
    """Draft so many tokens for every row, whatever that costs."""
    with pytest.MonkeyPatch.context() as patch:
        always_drafting(patch, LENGTH)
        yield


class PlainHead:
    """A head in plain torch: whole sequences, no cache, one token after another."""

    def __init__(self, folder: Path, target: Path, adapter: Path | None) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        self.target: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        embedding = self.target.get_input_embeddings().weight.detach().clone()
        if adapter is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.target = PeftModel.from_pretrained(self.target, adapter).eval()
        self.config = json.loads((folder / "config.json").read_text())
        weights = load_file(folder / "model.safetensors")
        self.weights = {name.replace("midlayer.", "layers.0."): weight for name, weight in weights.items()}
        self.embedding = self.weights.get("embed_tokens.weight", embedding)

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Greedy drafts behind known tokens, of which the target has read all but the last."""
        seen = self.target(input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        hidden = torch.cat((seen[0][0], seen[1][0]), dim=-1) @ self.weights["fc.weight"].T
        read, drafts = list(tokens[1:]), []
        for _ in range(count):
            out, before_norm = self._layer(torch.tensor(read), hidden)
            own = int((out[-1] @ self.weights["lm_head.weight"].T).argmax())
            shift = self.weights.get("d2t")
            drafts.append(own if shift is None else own + int(shift[own]))
            read.append(drafts[-1])
            hidden = torch.cat((hidden, before_norm[-1:]))
        return drafts

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.weights[f"{name}.weight"]

    def _layer(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        w, count = self.weights, len(tokens)
        beside = self._norm("layers.0.hidden_norm", hidden)
        residual = beside if self.config["norm_before_residual"] else hidden
        x = torch.cat((self._norm("layers.0.input_layernorm", self.embedding[tokens]), beside), dim=-1)
        q, k, v = ((x @ w[f"layers.0.self_attn.{n}_proj.weight"].T).view(count, -1, DIM).transpose(0, 1) for n in "qkv")
        angles = torch.arange(count)[:, None] * THETA ** -(torch.arange(0, DIM, 2) / DIM)
        cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
        q, k = (y * cos + torch.cat((-y[..., DIM // 2 :], y[..., : DIM // 2]), -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).reshape(count, -1)
        residual = residual + mixed @ w["layers.0.self_attn.o_proj.weight"].T
        x = self._norm("layers.0.post_attention_layernorm", residual)
        gate, up = (x @ w[f"layers.0.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        residual = residual + (functional.silu(gate) * up) @ w["layers.0.mlp.down_proj.weight"].T
        return self._norm("norm", residual), residual


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Llama that runs on the native kernels, ``llama``, and of its adapter ``large``."""
    folder = tmp_path_factory.mktemp("adapted")
    base("native_llama", folder)
    make_adapter("native_llama", folder, folder / "large", r=12, target_modules=LINEARS, lora_alpha=20)
    return (folder / "native_llama").rename(folder / "llama").parent


@pytest.fixture(scope="module")
def head(adapted: Path) -> Path:
    return save_head(adapted / "head", adapted / "llama")


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], str | None, list[int]]]:
    return watch_proposals(monkeypatch)


GREEDY = {"temperature": 0.0, "max_tokens": 14, "ignore_eos": True}


@pytest.mark.parametrize(("native", "eager"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("kind", ["own vocabulary", "target's vocabulary", "normed residual"])
def test_a_head_proposes_what_a_plain_implementation_says(
    adapted: Path, tmp_path: Path, proposed: list[Any], kind: str, native: bool, eager: bool
) -> None:
    """Cold, chunked and cached prompts, one token and many, alone and together, on the base and on an adapter."""
    target = adapted / "llama"
    options = {"own_vocab": kind != "target's vocabulary", "normed": kind == "normed residual"}
    folder = save_head(tmp_path / "head", target, named=kind == "own vocabulary", **options)
    pair = DraftPair(adapted, native=native, drafts={"method": "eagle3", "model": str(folder)}, eager=eager)
    long = [number % 50 + 2 for number in range(3, 48)]
    asked: list[Asked] = [([9], GREEDY, None), (long, GREEDY, None), (long[:20], GREEDY, "large")]
    again: list[Asked] = [([*long, 5, 6], GREEDY, None), (long, GREEDY, "large")]
    for each in (asked, again, asked):
        assert pair.run("on", each) == pair.run("off", each)
    assert len(proposed) > 40 and max(len(drafts) for _, _, drafts in proposed) >= LENGTH
    plain = {adapter: PlainHead(folder, target, adapter) for adapter in (None, adapted / "large")}
    for tokens, adapter, drafts in proposed[:: 3 if native else 7]:
        oracle = plain[adapter and adapted / "large"]
        assert drafts == oracle.drafts(tokens, len(drafts))


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_same_with_a_head_and_without(adapted: Path, head: Path, seed: int) -> None:
    pair = DraftPair(adapted, native=True, drafts={"model": str(head), "num_speculative_tokens": 5})
    asked = requests(seed)
    for (tokens, logprobs, end), (drafted, drafted_logprobs, drafted_end) in zip(
        pair.run("off", asked), pair.run("on", asked), strict=True
    ):
        assert drafted == tokens and drafted_end == end
        assert [entry.token for entry in drafted_logprobs] == [entry.token for entry in logprobs]
    assert pair.cores["on"].stats()["drafted_model"]


def test_preempted_requests_get_the_same_tokens(adapted: Path, head: Path) -> None:
    pair = DraftPair(adapted, native=True, drafts={"model": str(head)}, pages=10)
    asked: list[Asked] = [([number, 3, 5], {**GREEDY, "max_tokens": 60}, None) for number in range(4)]
    assert pair.run("on", asked) == pair.run("off", asked)
    assert pair.cores["on"].stats()["preemptions"] and pair.cores["on"].stats()["drafted_model"]


def load(target: Path, speculative: dict[str, Any], **options: Any) -> EngineCore:
    config = EngineConfig(
        dtype="float32", device="cpu", max_num_seqs=2, threads=1, speculative_config=json.dumps(speculative), **options
    )
    return EngineCore.load(config, target)


def test_the_start_tells_of_the_head_and_memory_holds_its_hidden_states(adapted: Path, head: Path) -> None:
    target = adapted / "llama"
    plain = load(target, {"method": "off"}, kv_cache_memory=0.01)
    core = load(target, {"method": "eagle3", "model": str(head)}, kv_cache_memory=0.01)
    assert any(line.startswith("Draft model: EAGLE-3 head, a layer of 64; KV pool of") for line in core.ready.summary)
    worker, without = worker_of(core), worker_of(plain)
    page = 4 * 16 * (2 * 2 * 2 * 16)  # two layers, K and V, two heads of 16, float32
    own, hidden = page // 2, 4 * 16 * 64
    assert worker.num_pages * (page + hidden) + worker.draft.num_pages * own <= without.num_pages * page + 2 * page
    core.close()
    plain.close()


def changed(folder: Path, head: Path, config: dict[str, Any] | None = None, **tensors: Tensor | None) -> Path:
    """A head that is written anew with other fields and tensors; None removes one."""
    folder.mkdir()
    found = {**load_file(head / "model.safetensors"), **{name.replace("__", "."): t for name, t in tensors.items()}}
    save_file({name: tensor for name, tensor in found.items() if tensor is not None}, folder / "model.safetensors")
    fields = json.loads((head / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"vocab_size": 100}, {}, "vocab_size must be that of its model, 101, not 100"),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers must be 1, not 2"),
        ({"norm_before_fc": True}, {}, "norm_before_fc must be absent: this part of a head is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state must be true, not False"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}},
            {},
            r"must be in ascending order and from 0 to 1, not \[0, 2\]",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0]}},
            {},
            "must be in ascending order and from 0 to 1",
        ),
        ({"eagle_config": None}, {}, r"must be in ascending order and from 0 to 1, not \[2, 1, -1\]"),
        ({}, {"d2t": None}, "lacks d2t, which maps its 61 tokens to the model's"),
        ({}, {"d2t": torch.arange(61)}, "d2t must map 61 tokens to ascending token ids below 101"),
        ({}, {"fc__weight": torch.zeros(64, 192)}, r"model.fc.weight has shape \(64, 192\), but the config requires"),
        ({}, {"midlayer__extra__weight": torch.zeros(3)}, "tensors that this architecture does not use: .*extra"),
        ({"hidden_size": 32}, {"embed_tokens__weight": None}, "hidden_size must be that of its model, 64, because"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    adapted: Path, head: Path, tmp_path: Path, config: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    folder = changed(tmp_path / "head", head, config, **tensors)
    with pytest.raises(ModelError, match=message):
        load(adapted / "llama", {"method": "eagle3", "model": str(folder)}, num_gpu_blocks_override=20)


def test_models_without_a_head_are_refused(adapted: Path, head: Path) -> None:
    target = adapted / "llama"
    with pytest.raises(ConfigError, match="model of --speculative-config is not an EAGLE-3 head: llama has neither"):
        load(target, {"method": "eagle3", "model": str(target)}, num_gpu_blocks_override=20)
    with pytest.raises(ConfigError, match="is a head, which --load-format dummy cannot create"):
        load(target, {"model": str(head)}, num_gpu_blocks_override=20, load_format="dummy")
    with pytest.raises(ConfigError, match="is a head, which reads hidden states that --model-impl transformers"):
        load(target, {"model": str(head)}, num_gpu_blocks_override=20, model_impl="transformers")
