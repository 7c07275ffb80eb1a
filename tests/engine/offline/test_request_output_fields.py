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


def test_the_rank_of_a_drawn_token_is_that_of_the_model_beside_named_ones(llm: LLM) -> None:
    names = [5, 9, 300]
    [output] = llm.generate("the quick", SamplingParams(max_tokens=4, temperature=2.0, seed=3, logprob_token_ids=names))
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    with torch.no_grad():
        logits = make_model()(torch.tensor([tokens])).logits[0, len(output.prompt_token_ids) - 1 :]
    # The drawn tokens are named, so that each is among the others too.
    again = SamplingParams(
        max_tokens=4, temperature=2.0, seed=3, logprob_token_ids=[*names, *output.outputs[0].token_ids]
    )
    for params, each in ((None, output), (again, None)):
        found = each or llm.generate("the quick", params)[0]
        assert found.outputs[0].token_ids == output.outputs[0].token_ids and found.outputs[0].logprobs is not None
        for token, line, scores in zip(found.outputs[0].token_ids, logits, found.outputs[0].logprobs, strict=False):
            assert scores.pop(token).rank == 1 + int((line > line[token]).sum())
            assert all(score.rank is None for score in scores.values()), "only the drawn token's is computed"
