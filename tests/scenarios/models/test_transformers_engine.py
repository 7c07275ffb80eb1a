"""The whole offline engine over a model of the transformers library: prefix cache, adapters, structured answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.models.library_models import library_logits, make_library_adapter, save_library_model
from support.models.tiny_tokenizers import train_byte_level, write_folder

from rootgraft import LLM, SamplingParams
from rootgraft.grammar.spec import GrammarSpec

GPT2, WORDS = "GPT2LMHeadModel", 440
PROMPT = [7, 300, 12, 99, 5, 210, 33, 8, 150, 42, 3, 17, 260, 11, 9, 77, 31, 5, 8, 64]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 with a tokenizer, and an adapter of it."""
    root = tmp_path_factory.mktemp("gpt2")
    save_library_model(GPT2, root / "model", WORDS)
    write_folder(root / "model", train_byte_level().to_str(), eos_token="<|im_end|>")
    make_library_adapter(GPT2, root / "adapter", 3, WORDS)
    return root


def greedy(count: int, adapter: Path | None = None) -> list[int]:
    """The library's own continuation of the prompt, from the whole text at each token."""
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(library_logits(GPT2, tokens, adapter, WORDS)[-1].argmax()))
    return tokens[len(PROMPT) :]


def test_the_engine_over_gpt2(folder: Path) -> None:
    llm = LLM(
        str(folder / "model"), dtype="float32", device="cpu", threads=1, num_gpu_blocks_override=40, block_size=4,
        enable_lora=True, max_num_batched_tokens=64, model_impl="transformers",
    )  # fmt: skip
    try:
        llm.load_adapter("tuned", str(folder / "adapter"))
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        for _ in range(2):  # the second time from the prefix cache
            [plain] = llm.generate([PROMPT], params, use_tqdm=False)
            [tuned] = llm.generate([PROMPT], params, adapter="tuned", use_tqdm=False)
            assert list(plain.outputs[0].token_ids) == greedy(8)
            assert list(tuned.outputs[0].token_ids) == greedy(8, folder / "adapter")
        assert plain.usage[0].cached >= 16 and tuned.usage[0].cached >= 16
        schema = {"type": "object", "properties": {"n": {"enum": [1, 22, 333]}}, "required": ["n"]}
        params, grammar = SamplingParams(max_tokens=40, temperature=0), GrammarSpec.json_schema(schema)
        [answer] = llm.generate("the fox", params, adapter="tuned", grammar=grammar, use_tqdm=False)
        assert json.loads(answer.outputs[0].text)["n"] in (1, 22, 333)
    finally:
        llm.close()
