"""lm-eval's ``local-completions`` beside its transformers backend on one checkpoint: the same numbers and texts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from support.api.real_server import RealServer, start

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm_eval[api], which is not installed"),
]
TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "Once upon a time there was a little girl who lived in a village near the forest.",
    "def add(a, b): return a + b",
    "It's 3.14, isn't it?",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer of its own, which knows its texts well."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    made = tmp_path_factory.mktemp("evaluated")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXTS,
        tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"], initial_alphabet=alphabet),
    )
    PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>").save_pretrained(made)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=bpe.get_vocab_size(),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(made)
    return made


@pytest.fixture
def server(folder: Path) -> Iterator[RealServer]:
    running = start("--model", str(folder), "--dtype", "float32", "--device", "cpu", "--threads", "1")
    yield running
    running.close()


@pytest.mark.parametrize("concurrent", [1, 4])
def test_the_numbers_of_both_backends(folder: Path, server: RealServer, concurrent: int) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    ours = LocalCompletionsAPI(
        base_url=f"{server.http.base_url}/v1/completions",
        model="small",
        tokenizer=str(folder),
        num_concurrent=concurrent,
        batch_size=4,
        max_retries=1,
        max_length=512,
    )
    # Its cache of logits mixes up requests that are the same text cut at different places, as those below are.
    theirs = HFLM(
        pretrained=str(folder), device="cpu", dtype="float32", batch_size=1, logits_cache=False, max_length=512
    )

    def both(kind: str, arguments: list[Any]) -> tuple[Any, Any]:
        asked = [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]
        return getattr(ours, kind)(asked), getattr(theirs, kind)(asked)

    words = [text.split(" ") for text in TEXTS]
    pairs = [(" ".join(w[:cut]), " " + " ".join(w[cut:])) for w in words for cut in (1, len(w) // 2, len(w) - 1)]
    found, wanted = both("loglikelihood", [*pairs, ("", TEXTS[0])])
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], abs=1e-3)
    found, wanted = both("loglikelihood_rolling", [(text,) for text in TEXTS])
    assert found == pytest.approx(wanted, abs=1e-3)
    until = {"until": ["\n\n"], "max_gen_toks": 16}
    found, wanted = both("generate_until", [(text[:20], dict(until)) for text in TEXTS])
    assert found == wanted
