"""Sampling parameters by vLLM's names: what reaches the engine, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft import LLM, SamplingParams
from rootgraft.engine.errors import GrammarRefused, RequestError
from rootgraft.engine.serving.request import RequestLimits
from rootgraft.engine.types import SamplingParams as EngineParams
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.lora.request import LoRARequest
from rootgraft.sampling_params import StructuredOutputsParams

LIMITS = RequestLimits(100, 50)


@given(
    st.fixed_dictionaries(
        {
            "max_tokens": st.integers(1, 90),
            "temperature": st.floats(0, 2),
            "top_p": st.floats(0.01, 1),
            "top_k": st.integers(0, 90),
            "presence_penalty": st.floats(-2, 2),
            "seed": st.none() | st.integers(0, 1 << 62),
            "min_tokens": st.integers(0, 90),
            "ignore_eos": st.booleans(),
            "logprobs": st.none() | st.integers(0, 20),
            "logit_bias": st.dictionaries(st.integers(0, 49), st.floats(-100, 100), min_size=1),
            "stop_token_ids": st.lists(st.integers(0, 49), min_size=1),
        }
    )
)
def test_values_reach_the_engine_and_come_back(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    found = params.engine_params(9, LIMITS)
    assert {name: getattr(found, name) for name in values if name not in ("logit_bias", "stop_token_ids")} == {
        name: value for name, value in values.items() if name not in ("logit_bias", "stop_token_ids")
    }
    assert dict(found.logit_bias) == values["logit_bias"] and list(found.stop_token_ids) == values["stop_token_ids"]
    assert SamplingParams.of(found) == params == params.clone()


def test_what_has_another_form() -> None:
    found = SamplingParams(max_tokens=None, seed=-1, logprobs=True, logit_bias={"7": 1.0}).engine_params(9, LIMITS)  # type: ignore[dict-item]
    assert found == EngineParams(max_tokens=91, logprobs=1, logit_bias=((7, 1.0),))
    assert SamplingParams.from_optional(n=None, max_tokens=5) == SamplingParams(max_tokens=5)
    for bias in ({"x": 1}, 5, [3]):
        with pytest.raises(RequestError, match="logit_bias must be a dict"):
            SamplingParams(logit_bias=bias).engine_params(9, LIMITS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("form", "spec"),
    [
        ({"json": {"type": "integer"}}, GrammarSpec.json_schema({"type": "integer"})),
        ({"json": '{"type": "integer"}'}, GrammarSpec.json_schema({"type": "integer"})),
        ({"regex": "a+"}, GrammarSpec.regex("a+")),
        ({"choice": ["a", "b"]}, GrammarSpec.choice(["a", "b"])),
        ({"grammar": 'root ::= "a"'}, GrammarSpec.ebnf('root ::= "a"')),
        ({"grammar": 'start: "a"'}, GrammarSpec.lark('start: "a"')),
        ({"json_object": True}, GrammarSpec.json_object()),
        ({"structural_tag": "{}"}, GrammarSpec.structural_tag({})),
    ],
)
def test_forms(form: dict[str, Any], spec: GrammarSpec) -> None:
    assert SamplingParams(structured_outputs=form).grammar() == spec
    assert SamplingParams(guided_decoding=StructuredOutputsParams(**form)).grammar() == spec


def test_forms_that_are_refused() -> None:
    for wrong in ({"regex": "a", "choice": ["a"]}, {"json_object": False}):
        with pytest.raises(RequestError, match="must hold exactly one of json, regex"):
            SamplingParams(structured_outputs=wrong).grammar()
    with pytest.raises(RequestError, match="are both given"):
        SamplingParams(structured_outputs={"regex": "a"}, guided_decoding={"regex": "a"}).grammar()
    with pytest.raises(RequestError, match="must be StructuredOutputsParams or a dict, not int"):
        SamplingParams(structured_outputs=5).grammar()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="no parameter 'schema'"):
        SamplingParams(structured_outputs={"schema": {}}).grammar()
    with pytest.raises(GrammarRefused) as found:
        SamplingParams(structured_outputs={"choice": []}).grammar()
    assert found.value.param == "structured_outputs.choice"


def test_requests_of_one_call_with_other_adapters_are_those_of_calls_of_their_own(
    llm: LLM, adapters: list[Path]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    requests = [None, *(LoRARequest(f"own-{i}", i + 1, str(path)) for i, path in enumerate(adapters))]
    together = llm.generate(["the quick"] * 3, params, lora_request=requests, use_tqdm=False)
    alone = [llm.generate("the quick", params, lora_request=each, use_tqdm=False)[0] for each in requests]
    assert [each.outputs for each in together] == [each.outputs for each in alone]
    assert len({tuple(each.outputs[0].token_ids) for each in together}) == 3
    assert [each.lora_request for each in together] == requests
    by_name = llm.generate("the quick", params, lora_request=LoRARequest("own-0"), use_tqdm=False)
    assert by_name[0].outputs[0].token_ids == together[1].outputs[0].token_ids


def test_another_path_under_a_name_is_another_adapter(llm: LLM, adapters: list[Path]) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    found = [
        llm.generate("the quick", params, lora_request=LoRARequest("moved", 1, str(path)), use_tqdm=False)
        for path in (adapters[0], adapters[1], adapters[0])
    ]
    first, second, third = (tuple(each[0].outputs[0].token_ids) for each in found)
    assert first == third != second
    two = [LoRARequest("moved", 1, str(path)) for path in adapters]
    with pytest.raises(RequestError, match="'moved' names two adapters in one call"):
        llm.generate(["a", "b"], params, lora_request=two)
    with pytest.raises(RequestError, match="1 lora_request for 2 prompts"):
        llm.generate(["a", "b"], params, lora_request=two[:1])
    with pytest.raises(RequestError, match="both given"):
        llm.generate("a", params, lora_request=two[0], adapter="moved")
    with pytest.raises(RequestError, match="lora_name must be"):
        llm.generate("a", params, lora_request=LoRARequest(""))


def test_messages_and_tokens_of_other_kinds_are_clear_errors(llm: LLM) -> None:
    wrong: list[tuple[Any, str]] = [
        ("hi", "messages must be a list of messages"),
        ([["hi"]], "A message must be an object"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "must be text, not image_url"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}],
            "arguments of a call of f must be a JSON object",
        ),
    ]
    for messages, text in wrong:
        with pytest.raises(RequestError, match=text):
            llm.chat(messages, use_tqdm=False)
    for most in (0, -2, 1.5):
        with pytest.raises(RequestError, match="truncate_prompt_tokens must be at least 1"):
            llm.generate("a", SamplingParams(truncate_prompt_tokens=most), use_tqdm=False)  # type: ignore[arg-type]
