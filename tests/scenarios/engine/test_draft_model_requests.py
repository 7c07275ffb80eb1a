"""Requests of every kind with a draft model: n, stop strings, logprobs, grammars on adapters, preemption, replicas."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.api.real_server import RealServer, start
from support.engine.core_hooks import core_of
from support.engine.draft_engine import drafting_despite_others
from support.machine.waits import wait_until
from support.models.tiny_tokenizers import train_byte_level, write_folder

from rootgraft import LLM, SamplingParams
from rootgraft.engine.offline.request_output import RequestOutput
from rootgraft.grammar.spec import GrammarSpec

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}<|im_start|>"
PROMPTS = ["The quick brown fox", "def add(a, b):", "It's a dog. It's a dog. It's a", "in the"]
SAMPLED = SamplingParams(temperature=1.0, max_tokens=48, seed=5)
PLAIN_TEXT = GrammarSpec.regex(r"[ -~]{30,60}")
OBJECT = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "minLength": 9, "maxLength": 30}, "is_known": {"type": "boolean"}},
        "required": ["name", "is_known"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random Llamas of one tokenizer, ``target`` and ``draft``, and an ``adapter`` of the target."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("drafting")
    tokenizer = train_byte_level()
    for name, layers in (("target", 2), ("draft", 1)):
        torch.manual_seed(layers)
        config = LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(), hidden_size=48, intermediate_size=80, num_hidden_layers=layers,
            num_attention_heads=6, num_key_value_heads=2, head_dim=16, max_position_embeddings=256,
            eos_token_id=tokenizer.token_to_id("<|im_end|>"), initializer_range=0.3,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder / name)
        ends = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
        write_folder(folder / name, tokenizer.to_str(), **ends, chat_template=TEMPLATE)
    target = LlamaForCausalLM.from_pretrained(folder / "target")
    options = {"r": 4, "target_modules": ["q_proj", "o_proj", "down_proj"], "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(target, LoraConfig(task_type="CAUSAL_LM", **options)).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture(scope="module", autouse=True)
def drafting() -> Iterator[None]:
    """Draft three tokens for every row, whatever that costs and whatever other sources know."""
    with pytest.MonkeyPatch.context() as patch:
        drafting_despite_others(patch, 3)
        yield


def engine(folder: Path, drafts: dict[str, Any], pages: int = 100) -> LLM:
    llm = LLM(
        str(folder / "target"), dtype="float32", device="cpu", max_num_seqs=4, max_num_batched_tokens=32,
        num_gpu_blocks_override=pages, enable_lora=True, speculative_config=json.dumps(drafts),
    )  # fmt: skip
    llm.load_adapter("adapter", str(folder / "adapter"))
    return llm


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[LLM]:
    llm = engine(folder, {"method": "off"})
    yield llm
    llm.close()


@pytest.fixture(scope="module", params=["target", "draft"])
def drafted(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    """The target drafts for itself, but for the adapter; or a model that is right by chance."""
    llm = engine(folder, {"model": str(folder / request.param)})
    yield llm
    llm.close()


def num_accepted(llm: LLM) -> float:
    return core_of(llm).stats().get("drafts_accepted_model", 0)


def answers(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    """What each request got, but for what tells of drafts."""
    found = []
    for output in outputs:
        lengths = [usage.completion for usage in output.usage]
        found.append((output.prompt, output.prompt_logprobs, output.outputs, lengths))
    return found


@pytest.mark.parametrize(
    ("params", "options"),
    [
        (SAMPLED, {"n": 3}),
        (SamplingParams(temperature=1.0, max_tokens=60, seed=1), {"n": 2, "stop": ["e", "the", "\n"]}),
        (SamplingParams(temperature=0.8, max_tokens=40, seed=2, logprobs=3, prompt_logprobs=2), {"n": 2}),
        (SamplingParams(temperature=0.0, max_tokens=40, logprobs=0), {"stop": "a"}),
        (SAMPLED, {"adapter": "adapter", "grammar": PLAIN_TEXT}),
        (SamplingParams(temperature=0.0, max_tokens=48, logprobs=2), {"adapter": "adapter", "grammar": OBJECT}),
        (SAMPLED, {"n": 2, "grammar": OBJECT, "stop": "x"}),
    ],
    ids=["n", "stop", "logprobs", "greedy", "adapter-regex", "adapter-object", "object-stop"],
)
def test_a_request_gets_what_it_gets_without(
    plain: LLM, drafted: LLM, params: SamplingParams, options: dict[str, Any]
) -> None:
    before = core_of(drafted).stats().get("drafted_model", 0)
    expected = plain.generate(PROMPTS, params, use_tqdm=False, **options)
    got = drafted.generate(PROMPTS, params, use_tqdm=False, **options)
    assert answers(got) == answers(expected)
    assert core_of(drafted).stats()["drafted_model"] > before
    for output in got:
        assert all(usage.drafted <= usage.completion for usage in output.usage)


@pytest.mark.parametrize("adapter", [None, "adapter"])
def test_drafts_under_a_grammar_are_accepted(drafted: LLM, adapter: str | None) -> None:
    """The property above says something only if there are such; the bias makes models draw the same now and then."""
    letters = [drafted.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcdefgh"]
    bias = tuple((token, 40.0) for token in letters)
    params = SamplingParams(temperature=1.0, max_tokens=60, seed=5, logit_bias=bias)
    before = num_accepted(drafted)
    drafted.generate(PROMPTS, params, grammar=GrammarSpec.regex("[a-h]{40,60}"), adapter=adapter, use_tqdm=False)
    assert num_accepted(drafted) > before


def test_a_draft_model_draws_by_the_masks_of_the_grammar(folder: Path) -> None:
    """Random weights alone hardly say what is allowed: a target that drafts for itself is right nearly always."""
    llm = engine(folder, {"model": str(folder / "target")})
    for grammar in (PLAIN_TEXT, OBJECT, GrammarSpec.regex("[a-h]{40,60}")):
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=60, seed=5)
            before = core_of(llm).stats()
            llm.generate(PROMPTS, params, grammar=grammar, use_tqdm=False)
            after = core_of(llm).stats()
            drafted, accepted = (
                after[name] - before.get(name, 0) for name in ("drafted_model", "drafts_accepted_model")
            )
            assert accepted > 0.9 * drafted > 20
    llm.close()


def test_a_preempted_request_goes_on_with_the_same_tokens(folder: Path, plain: LLM) -> None:
    """Twelve pages on either side: neither the target's nor the draft's hold four answers."""
    params = SamplingParams(temperature=1.0, max_tokens=90, seed=9, ignore_eos=True)
    expected = plain.generate(PROMPTS, params, use_tqdm=False)
    crowded = engine(folder, {"model": str(folder / "target")}, pages=12)
    assert answers(crowded.generate(PROMPTS, params, use_tqdm=False)) == answers(expected)
    assert core_of(crowded).stats()["preemptions"] and num_accepted(crowded)
    crowded.close()


def num_drafted(server: RealServer) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    drafted = "rootgraft:spec_decode_num_draft_tokens_total{"
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(drafted))


def test_replicas_over_http_answer_as_one_engine_without_drafts(folder: Path, plain: LLM) -> None:
    messages = [{"role": "user", "content": "the fox"}]
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=3)
    expected = plain.chat(messages, params, n=2, use_tqdm=False)[0].outputs
    drafts = json.dumps({"model": str(folder / "draft"), "num_speculative_tokens": 3})
    engines = ["--replicas", "2", "--dtype", "float32", "--device", "cpu", "--num-gpu-blocks-override", "60"]
    server = start("--model", str(folder / "target"), *engines, "--speculative-config", drafts)
    try:
        body = {"messages": messages, "max_tokens": 24, "temperature": 1.0, "seed": 3, "n": 2}
        for _ in range(4):
            choices = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]
            assert [each["message"]["content"] for each in choices] == [each.text for each in expected]
        wait_until(lambda: num_drafted(server) > 0, pause=0.05)  # a replica tells its counts a few times a second
    finally:
        server.close()


@pytest.mark.heavy
def test_the_default_model_in_8_bits_drafts_for_itself(smollm2_gguf: Path) -> None:
    """Most drafts are accepted at temperature 1: both draw by the same random numbers."""
    drafts = {"model": str(smollm2_gguf), "quantization": "int8_dynamic"}
    got = []
    for config in ({"method": "off"}, drafts):
        llm = LLM(str(smollm2_gguf), kv_cache_memory=0.2, max_num_seqs=4, speculative_config=json.dumps(config))
        prompts = ["The capital of France is", "Once upon a time", "1, 2, 3,"]
        asked = [SamplingParams(temperature=1.0, max_tokens=48, ignore_eos=True, seed=seed) for seed in range(3)]
        got.append([output.outputs for output in llm.generate(prompts, asked, use_tqdm=False)])
        stats = core_of(llm).stats()
        llm.close()
    assert got[0] == got[1]
    assert stats["drafts_accepted_model"] > 0.6 * stats["drafted_model"] > 30
