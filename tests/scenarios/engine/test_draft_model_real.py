"""With a draft model a real model says what it says without: tokens, logprobs, adapters, penalties, seeds, grammars."""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.core_hooks import worker_of
from support.engine.draft_engine import always_drafting
from support.models.tiny_models import VOCAB, save
from support.speculation.draft_pair import DraftPair, requests
from tokenizers import Tokenizer as Library
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import ConfigError, ModelError
from rootgraft.engine.executor.draft_weights import DraftModel, draft_pages, find_draft, load_draft
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.messages import Done, Submit, TokenOut
from rootgraft.engine.types import SamplingParams
from rootgraft.kernels.quantised_weights import QuantisedLinear

pytestmark = pytest.mark.usefixtures("native_kernels_again")


@pytest.fixture(scope="module")
def drafting() -> Iterator[None]:
    """Draft three tokens for every row, whatever that costs."""
    with pytest.MonkeyPatch.context() as patch:
        always_drafting(patch, 3)
        yield


def save_llama(folder: Path, vocab_size: int, seed: int = 11) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=256, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def vocab_of(folder: Path) -> int:
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    assert isinstance(size, int)
    return size


@pytest.fixture(scope="module", params=["itself", "another"])
def pair(
    adapted_llama: Path, drafting: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> DraftPair:
    """The model drafts for itself, but for the adapter; or a model that is right by chance."""
    own = adapted_llama / "llama"
    draft = own if request.param == "itself" else save_llama(tmp_path_factory.mktemp("draft"), vocab_of(own))
    return DraftPair(adapted_llama, native=True, drafts={"model": str(draft), "num_speculative_tokens": 5})


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_the_same_with_a_draft_model_and_without(pair: DraftPair, seed: int) -> None:
    asked = requests(seed)
    for (tokens, logprobs, end), (drafted, drafted_logprobs, drafted_end) in zip(
        pair.run("off", asked), pair.run("on", asked), strict=True
    ):
        assert drafted == tokens and drafted_end == end
        assert [entry.token for entry in drafted_logprobs] == [entry.token for entry in logprobs]
        for ours, theirs in zip(drafted_logprobs, logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_a_sampled_draft_is_the_draw_of_the_same_seed_and_position(adapted_llama: Path, drafting: None) -> None:
    """A model that drafts for itself is right nearly always at temperature 1, which it would not be if it drew anew."""
    own = adapted_llama / "llama"
    pair = DraftPair(adapted_llama, native=True, drafts={"model": str(own)})
    params = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
    asked = [([number, 3, 5], {**params, "seed": number}, None) for number in range(4)]
    assert pair.run("off", asked) == pair.run("on", asked)
    stats = pair.cores["on"].stats()
    assert stats["drafted_model"] > 100
    assert stats["drafts_accepted_model"] > 0.95 * stats["drafted_model"]


def test_the_start_tells_of_the_draft_model_and_its_pool_is_a_share(tmp_path: Path) -> None:
    target, draft = save_llama(tmp_path / "target", 90), save_llama(tmp_path / "draft", 90, seed=1)
    speculative = json.dumps({"model": str(draft)})
    config = EngineConfig(
        dtype="float32", device="cpu", kv_cache_memory=0.01, max_num_seqs=2, speculative_config=speculative
    )
    core = EngineCore.load(config, target)
    assert any(line.startswith("Draft model: llama, 1 layers of 32; KV pool of") for line in core.ready.summary)
    worker = worker_of(core)
    assert 0 < worker.draft.num_pages <= worker.num_pages / 3 + 1  # the models are of one shape
    core.close()


@pytest.mark.parametrize("device_vocab", [80, 100])
def test_logits_of_another_width_are_cut_or_filled(tmp_path: Path, drafting: None, device_vocab: int) -> None:
    """As of two sizes of one model, whose rows of logits are padded to different multiples."""
    target, draft = save_llama(tmp_path / "target", 90), save_llama(tmp_path / "draft", device_vocab, seed=1)
    for folder in (target, draft):
        save_tokenizer(folder, 80)
    answers = []
    for speculative in ({"method": "off"}, {"model": str(draft)}):
        core = load(target, speculative)
        for number, temperature in enumerate((0.0, 1.0, 1.0)):
            params = SamplingParams(temperature=temperature, max_tokens=30, seed=number, logit_bias=((85, 2.0),))
            core.handle([Submit(number, array("i", [number, 2, 3]), params)])
        got: dict[int, list[int]] = {}
        while core.has_work:
            for message in core.step():
                if isinstance(message, TokenOut):
                    got.setdefault(message.id, []).extend(message.tokens)
                else:
                    assert isinstance(message, Done)
        answers.append(got)
        core.close()
    assert answers[0] == answers[1] and len(answers[0]) == 3


def save_tokenizer(folder: Path, size: int, changed: int = -1) -> None:
    words = {f"w{token}" if token != changed else "another": token for token in range(size)}
    library = Library(WordLevel(words, unk_token="w0"))
    library.decoder = ByteLevel()
    library.save(str(folder / "tokenizer.json"))


def load(target: Path, speculative: dict[str, Any]) -> EngineCore:
    config = EngineConfig(
        dtype="float32", device="cpu", num_gpu_blocks_override=40, max_num_seqs=4, threads=1,
        speculative_config=json.dumps(speculative),
    )  # fmt: skip
    return EngineCore.load(config, target)


def test_another_vocabulary_is_refused_by_what_differs(tmp_path: Path) -> None:
    target, draft = save_llama(tmp_path / "target", 90), save_llama(tmp_path / "draft", 91)
    refused = "model of --speculative-config must have the vocabulary of the model: "
    with pytest.raises(ConfigError, match=refused + "it has 90 tokens, and the draft model has 91"):
        load(target, {"model": str(draft)})
    save_tokenizer(target, 80)
    with pytest.raises(ConfigError, match=refused + ".*draft has no tokenizer to compare"):
        load(target, {"model": str(draft)})
    save_tokenizer(draft, 81)
    with pytest.raises(ConfigError, match=refused + "it has 80 tokens, and the draft model has 81"):
        load(target, {"model": str(draft)})
    save_tokenizer(draft, 80, changed=17)
    with pytest.raises(
        ConfigError, match=refused + "token 17 is b'w17' in the model and b'another' in the draft model"
    ):
        load(target, {"model": str(draft)})
    shutil.copy(target / "tokenizer.json", draft)
    load(target, {"model": str(draft)}).close()


@pytest.mark.parametrize(("dtype", "is_rounded"), [("bfloat16", True), ("float32", False)])
def test_a_draft_model_beside_bfloat16_is_of_8_bits_by_default(tmp_path: Path, dtype: str, *, is_rounded: bool) -> None:
    target = save_llama(tmp_path / "target", 90)
    config = EngineConfig(dtype=dtype, device="cpu", speculative_config=json.dumps({"model": str(target)}))
    model = load_model(target, dtype=getattr(torch, dtype), device=torch.device("cpu"))
    found = find_draft(config, model.config, target)
    assert found is not None
    draft = load_draft(config, model, found)
    assert isinstance(draft.model.head.packed, QuantisedLinear) is is_rounded
    assert not isinstance(model.head.packed, QuantisedLinear)


def test_models_that_cannot_draft_are_refused_by_name(tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target", 90)
    with pytest.raises(ModelError, match="The model of --speculative-config: there is no folder or file"):
        load(target, {"model": str(tmp_path / "missing")})
    draft = DraftModel(load_model(target, dtype=torch.float32, device=torch.device("cpu")), "digest")
    with pytest.raises(ConfigError, match="does not have enough memory for its KV in"):
        draft_pages(EngineConfig(device="cpu"), 5000, 2048, draft)  # of which a quarter is its own
    hybrid, plain = save("lfm2", tmp_path / "hybrid"), save_llama(tmp_path / "plain", VOCAB)
    with pytest.raises(ConfigError, match="must have attention in all layers"):
        load(plain, {"model": str(hybrid)})
