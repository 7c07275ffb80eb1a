"""Requests of every kind with an MTP module: n, stop strings, logprobs, grammars on adapters, prefix hits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.engine.core_hooks import core_of
from support.engine.draft_engine import drafting_despite_others
from support.machine.thoroughness import taking_turns
from support.models.tiny_tokenizers import train_byte_level, write_folder
from support.speculation.mtp_models import BASES, save_mtp, save_mtp_adapter

from rootgraft import LLM, SamplingParams
from rootgraft.grammar.spec import GrammarSpec

PROMPTS = ["The quick brown fox", "def add(a, b):", "It's a dog. It's a dog. It's a", "in the"]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=48, seed=5)
OBJECT = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 9, "maxLength": 30}, "is_known": {"type": "boolean"}},
        "required": ["name", "is_known"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module", autouse=True)
def drafting() -> Iterator[None]:
    """Draft three tokens for every row, whatever that costs and whatever other sources know."""
    with pytest.MonkeyPatch.context() as patch:
        drafting_despite_others(patch, 3)
        yield


# Of a request, its parameters and the other options.
KINDS: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "n": (SAMPLED, {"n": 3}),
    "logprobs": (SamplingParams(temperature=0.8, max_tokens=40, seed=2, logprobs=3, prompt_logprobs=2), {"n": 2}),
    "stop": (SamplingParams(temperature=0.0, max_tokens=40, logprobs=0), {"stop": ["e", "the"]}),
    "adapter-regex": (SAMPLED, {"adapter": "adapter", "grammar": GrammarSpec.regex(r"[ -~]{30,60}")}),
    "adapter-object": (
        SamplingParams(temperature=0.0, max_tokens=48, logprobs=2),
        {"adapter": "adapter", "grammar": OBJECT},
    ),
    "object": (SAMPLED, {"n": 2, "grammar": OBJECT}),
}
# Each base with one half of the kinds, and each kind with one half of the bases; the other halves have the next turn.
PAIRS = [(base, kind) for place, base in enumerate(BASES) for kind in taking_turns([*KINDS], 2, place)]


@pytest.fixture(scope="module")
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LLM]]:
    """An engine without drafts and one with, on the same checkpoint and adapter."""
    folder, tokenizer = tmp_path_factory.mktemp(request.param), train_byte_level()
    vocab = tokenizer.get_vocab_size()
    save_mtp(request.param, folder / "base", shared=True, vocab=vocab)
    write_folder(folder / "base", tokenizer.to_str(), eos_token="<|im_end|>", bos_token="<|endoftext|>")
    save_mtp_adapter(request.param, folder / "adapter", vocab)
    found = []
    for drafts in ({"method": "off"}, {"method": "mtp", "num_speculative_tokens": 4}):
        llm = LLM(
            str(folder / "base"), dtype="float32", device="cpu", max_num_seqs=4, max_num_batched_tokens=32,
            num_gpu_blocks_override=60, enable_lora=True, speculative_config=json.dumps(drafts),
        )  # fmt: skip
        llm.load_adapter("adapter", str(folder / "adapter"))
        found.append(llm)
    yield found
    for llm in found:
        llm.close()


@pytest.mark.parametrize(("engines", "kind"), PAIRS, indirect=["engines"], scope="module")
def test_a_request_gets_what_it_gets_without(engines: list[LLM], kind: str) -> None:
    params, options = KINDS[kind]
    plain, drafted = engines
    before = core_of(drafted).stats().get("drafted_model", 0)
    for _ in range(2):  # the second time the prompts are prefix hits
        expected, got = (llm.generate(PROMPTS, params, use_tqdm=False, **options) for llm in engines)
        for one, other in zip(got, expected, strict=True):
            assert (one.prompt_logprobs, one.outputs) == (other.prompt_logprobs, other.outputs)
    assert core_of(drafted).stats()["drafted_model"] > before
    assert "drafted_model" not in core_of(plain).stats()
