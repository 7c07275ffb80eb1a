"""The table of vLLM's classes against vLLM's own signatures, and against what the classes here take."""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest

import rootgraft
from rootgraft import LLM, EngineArgs, PoolingParams, SamplingParams
from rootgraft.engine.errors import RequestError
from rootgraft.engine.offline.offline_model import read_config
from rootgraft.engine.offline.vllm_table import NotOffered, PeerName, check_values, peer_names
from rootgraft.engine.serving.request import RequestLimits
from rootgraft.lora.request import LoRARequest
from rootgraft.sampling_params import BeamSearchParams, StructuredOutputsParams

SIGNATURES: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_signatures.json").read_text())
MESSAGES = [{"role": "user", "content": "a"}]
# What asks for something, of the kind that vLLM takes there.
ASKING: dict[str, Any] = {
    "best_of": 3, "allowed_token_ids": [5], "bad_words": ["a"], "logits_processors": [print],
    "thinking_token_budget": 0, "repetition_detection": {"min_count": 2}, "logprob_token_ids": [1],
    "flat_logprobs": True, "prompt_logprob_token_ids": [1], "prompt_logprob_start": 2, "trace_decode_token_ids": [4],
    "disable_any_whitespace": True, "disable_additional_properties": True, "whitespace_pattern": " ",
    "tensorizer_config_dict": {"a": 1}, "multi_modal_data": {"image": 1}, "mm_processor_kwargs": {"a": 1},
    "multi_modal_uuids": {"image": 1}, "token_type_ids": [0], "tokenization_kwargs": {"a": 1},
    "prompt_adapter_request": 5, "guided_options_request": {"regex": "a"},
    "detokenize": False, "spaces_between_special_tokens": False, "stream_interval": 5, "skip_clone": True,
    "skip_reading_prefix_cache": True, "routed_experts_prompt_start": 4, "extra_args": {"a": 1}, "priority": [1],
    "watermarking": {"key": 1}, "structured_outputs": {"regex": "a"}, "skip_special_tokens": False,
    "use_activation": False, "pooling_params": PoolingParams(dimensions=1),
    "softmax": False, "activation": False, "truncate_prompt_tokens": 5, "step_tag_id": 1, "returned_token_ids": [1],
    "late_interaction_params": {"a": 1}, "late_chunking_params": {"a": 1}, "extra_kwargs": {"a": 1},
    "media_io_kwargs": {"image": {}}, "chat_template": "x",
    "output_text_buffer_length": 3, "chat_template_content_format": "openai",
}  # fmt: skip
CALLED = [owner for owner, names in SIGNATURES.items() if isinstance(names, dict)]


def named(owner: str, status: str) -> list[tuple[str, PeerName]]:
    return [(name, row) for name, row in peer_names(owner).items() if row.status == status]


@pytest.mark.parametrize("owner", SIGNATURES)
def test_the_table_has_all_names_of_vllm(owner: str) -> None:
    assert set(SIGNATURES[owner]) <= set(peer_names(owner))
    assert all(row.words or row.status == "done" for row in peer_names(owner).values())


def call(llm: LLM, owner: str, name: str, value: Any) -> None:
    """Give a value to what the name belongs to."""
    match owner:
        case "SamplingParams":
            params = SamplingParams(**{name: value})
            llm.generate("the fox", params, use_tqdm=False)
        case "StructuredOutputsParams":
            StructuredOutputsParams(**{"regex": "a"} | {name: value}).spec()
        case "BeamSearchParams":
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2} | {name: value})
        case "LoRARequest":
            request = LoRARequest(**{"lora_name": "a"} | {name: value})
            check_values("LoRARequest", {"tensorizer_config_dict": request.tensorizer_config_dict})
        case "TextPrompt" | "TokensPrompt":
            prompt: Any = {"prompt": "a"} if owner == "TextPrompt" else {"prompt_token_ids": [5]}
            llm.generate(prompt | {name: value}, use_tqdm=False)
        case "LLM.generate":
            own: dict[str, Any] = {} if name in ("prompts", "prompt_token_ids") else {"prompts": "a"}
            llm.generate(**{**own, "use_tqdm": False, name: value})
        case "PoolingParams":
            llm.embed(["a"], pooling_params=PoolingParams(**{name: value}), use_tqdm=False)
        case "LLM.beam_search":
            beams = BeamSearchParams(beam_width=2, max_tokens=1)
            llm.beam_search(**{"prompts": ["a"], **({} if name == "params" else {name: value}), "params": beams})
        case "LLM.embed" | "LLM.encode":
            getattr(llm, owner.removeprefix("LLM."))(**{"prompts": ["a"], "use_tqdm": False, name: value})
        case "LLM.classify":
            with pytest.raises(RequestError) as found:
                llm.classify(**{"prompts": ["a"], "use_tqdm": False, name: value})
            if found.value.param == name:
                raise found.value
            assert "classif" in str(found.value)  # the tiny model has no head
        case "LLM.score":
            texts = ["a", "a"]
            if name.startswith("data_"):
                assert llm.score(*texts, use_tqdm=False)
            else:
                llm.score(*texts, **{"use_tqdm": False, name: value})
        case "LLM.chat":
            llm.chat(**{"messages": MESSAGES, "use_tqdm": False, name: value})


@pytest.mark.parametrize(
    ("owner", "name"), [(o, n) for o, names in SIGNATURES.items() if isinstance(names, dict) for n in names]
)
def test_vllms_own_default_is_taken_everywhere(llm: LLM, owner: str, name: str) -> None:
    value = SIGNATURES[owner][name]
    if (owner, name) in {("StructuredOutputsParams", "regex"), ("LLM.generate", "prompt_token_ids")}:
        value = "a" if owner == "StructuredOutputsParams" else [5]
    call(llm, owner, name, value)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (owner, name)
        for owner in SIGNATURES
        if isinstance(SIGNATURES[owner], dict)
        for name, _ in named(owner, "refuse")
    ],
)
def test_what_is_refused_says_what_to_do(llm: LLM, owner: str, name: str) -> None:
    with pytest.raises(RequestError) as found:
        call(llm, owner, name, ASKING[name])
    assert str(found.value) == f"{name} is not supported: {peer_names(owner)[name].words}."
    assert found.value.param == name


@pytest.mark.parametrize("owner", ["SamplingParams", "LLM.generate", "LLM.chat"])
def test_what_has_no_effect_is_taken(llm: LLM, owner: str) -> None:
    for name, _ in named(owner, "inert"):
        if name in ASKING:
            call(llm, owner, name, ASKING[name])


def test_methods_that_are_not_there_say_what_to_do(llm: LLM) -> None:
    for name, row in named("LLM", "refuse"):
        with pytest.raises(NotOffered, match="does not exist") as found:
            getattr(llm, name)
        assert str(found.value) == f"LLM.{name} does not exist: {row.words}."
        assert not hasattr(llm, name)
    for name, _ in named("LLM", "inert"):
        getattr(llm, name)()
    for name, _ in named("LLM", "done"):
        assert callable(getattr(llm, name))
    with pytest.raises(AttributeError, match="no attribute 'generates'"):
        _ = llm.generates


def test_outputs_have_all_fields_of_vllm(llm: LLM) -> None:
    [output] = llm.generate("the fox", SamplingParams(logprobs=1), use_tqdm=False)
    for name in peer_names("RequestOutput"):
        getattr(output, name)
    for name in peer_names("CompletionOutput"):
        getattr(output.outputs[0], name)
    [pooled] = llm.embed("the fox", pooling_params=PoolingParams(dimensions=3), use_tqdm=False)
    for name in peer_names("PoolingRequestOutput"):
        getattr(pooled, name)
    assert pooled.outputs.hidden_size == 3
    assert output.outputs[0].logprobs is not None
    score = next(iter(output.outputs[0].logprobs[0].values()))
    for name in peer_names("Logprob"):
        getattr(score, name)


def test_the_package_has_the_names_of_vllms() -> None:
    for name, row in named("vllm", "done"):
        assert getattr(rootgraft, name), row
        assert name in rootgraft.__all__
    for name, row in named("vllm", "refuse"):
        with pytest.raises(ImportError, match=re.escape(f"rootgraft has no {name}: {row.words}.")):
            exec(f"from rootgraft import {name}")


def test_parameters_of_pooling_differ_in_no_call(llm: LLM) -> None:
    texts = ["a", "b"]
    same = [PoolingParams(dimensions=2), PoolingParams(dimensions=2)]
    assert [each.outputs.hidden_size for each in llm.embed(texts, pooling_params=same, use_tqdm=False)] == [2, 2]
    [array] = llm.encode("a", PoolingParams(dimensions=2, normalize=True), use_tqdm=False)
    assert array.outputs.data.shape == (2,) and abs(float((array.outputs.data**2).sum()) - 1) < 1e-5
    for wrong in ([PoolingParams(dimensions=1), PoolingParams()], [PoolingParams()] * 3, [], {"dimensions": 2}):
        with pytest.raises(RequestError, match="pooling_params must be"):
            llm.embed(texts, pooling_params=wrong, use_tqdm=False)  # type: ignore[arg-type]


def test_options_of_the_engine_on_a_command_line(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = EngineArgs.add_cli_args(ArgumentParser())
    parser.set_defaults(model=str(tiny_model), runner="auto")
    parser.add_argument("--max-tokens", type=int)
    line = ["--max-model-len", "64", "--enforce-eager", "--max_num_seqs", "2", "--dtype", "float32"]
    args = parser.parse_args(line)
    found = vars(EngineArgs.from_cli_args(args))
    assert found == {
        "model": str(tiny_model), "runner": "auto", "max_model_len": 64, "enforce_eager": True, "max_num_seqs": 2,
        "dtype": "float32",
    }  # fmt: skip
    config = read_config(found.pop("model"), found)
    assert (config.max_model_len, config.max_num_seqs, config.dtype) == (64, 2, "float32")
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(LLM, "__init__", lambda self, **options: made.append(options))
    LLM.from_engine_args(EngineArgs.from_cli_args(args))
    assert made == [found | {"model": str(tiny_model)}]


def test_a_name_that_vllm_does_not_have_is_a_type_error(llm: LLM) -> None:
    with pytest.raises(TypeError, match="generate has no parameter 'nonsense'"):
        llm.generate("a", nonsense=1)
    with pytest.raises(TypeError, match="nonsense"):
        SamplingParams(nonsense=1)  # type: ignore[call-arg]


def test_named_and_allowed_tokens_reach_the_engine() -> None:
    """Named tokens are scored without a number of likeliest ones, as in vLLM."""
    params = SamplingParams(allowed_token_ids=[5, 6], logprob_token_ids=[1]).engine_params(3, RequestLimits(100, 50))
    assert (params.allowed_token_ids, params.logprob_token_ids, params.logprobs) == ((5, 6), (1,), 0)
    again = SamplingParams.of(params)
    assert (again.allowed_token_ids, again.logprob_token_ids) == ([5, 6], [1])
