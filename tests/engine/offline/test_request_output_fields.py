"""Field probabilities offline: those of the oracle's next tokens, in ``generate`` and ``chat``."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.engine.tiny_llm import make_model

from rootgraft import LLM, SamplingParams
from rootgraft.engine.errors import RequestError
from rootgraft.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["calm", "angry"]}, "late": {"type": "boolean"}},
    "required": ["mood"],
    "additionalProperties": False,
}


def params(schema: Any, **fields: Any) -> SamplingParams:
    form = StructuredOutputsParams(json=schema)
    return SamplingParams(max_tokens=60, structured_outputs=form, field_probabilities=True, **fields)


def test_a_choice_of_one_token_has_its_share(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode("the quick")
    with torch.no_grad():
        logits = make_model()(torch.tensor([prompt])).logits[0, -1]
    [one], [two] = (tokenizer.encode(digit, add_special_tokens=False) for digit in "12")
    shares = torch.stack([logits[one], logits[two]]).double().softmax(0)
    [output] = llm.generate({"prompt_token_ids": prompt}, params({"enum": [1, 2]}, temperature=0.0))
    [found] = output.outputs[0].field_probabilities or []
    assert (found.path, found.kind) == ("", "value")
    assert str(found.value) == output.outputs[0].text.strip()
    assert found.probability == pytest.approx(float(shares[found.value - 1]), abs=1e-4)


def test_every_answer_has_its_fields(llm: LLM) -> None:
    messages = [{"role": "user", "content": "How is it?"}]
    [output] = llm.chat(messages, params(SCHEMA, n=3, seed=5))
    for answer in output.outputs:
        value = json.loads(answer.text)
        assert answer.field_probabilities is not None
        found = {(each.path, each.kind): each for each in answer.field_probabilities}
        assert found["/mood", "value"].value == value["mood"]
        assert found["/late", "presence"].value == ("late" in value)
        assert ("late" in value) == (("/late", "value") in found)
        assert all(0 < each.probability <= 1 for each in answer.field_probabilities)
    [plain] = llm.chat(messages, SamplingParams(max_tokens=2))
    assert plain.outputs[0].field_probabilities is None


@pytest.mark.parametrize("form", [None, StructuredOutputsParams(choice=["a", "b"])])
def test_needs_a_schema(llm: LLM, form: StructuredOutputsParams | None) -> None:
    with pytest.raises(RequestError, match=r"field_probabilities needs .* JSON Schema"):
        llm.generate("a", SamplingParams(structured_outputs=form, field_probabilities=True))
