"""Every kind of grammar through the offline class, on the real core with a worker made of integers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.engine.fake_worker import FakeWorker
from support.machine.thoroughness import taking_turns
from support.models.tiny_tokenizers import train_byte_level, write_folder

from rootgraft import LLM, SamplingParams
from rootgraft.engine.checkpoint.locate import ModelFiles
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import GrammarRefused
from rootgraft.engine.offline.request_output import RequestOutput
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.grammar.spec import GrammarSpec

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}<|im_start|>"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}


def _is_answer(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["name", "age"] and len(value["name"]) <= 12 and value["age"] <= 99


FORMS: dict[str, tuple[GrammarSpec, Callable[[str], object]]] = {
    "json_schema": (GrammarSpec.json_schema(SCHEMA), _is_answer),
    "json_object": (GrammarSpec.json_object(), lambda text: isinstance(json.loads(text), dict)),
    "regex": (GrammarSpec.regex("(yes|no)!{2,9}"), lambda text: re.fullmatch("(yes|no)!{2,9}", text)),
    "choice": (GrammarSpec.choice(["the fox", "a dog"]), lambda text: text in ("the fox", "a dog")),
    "ebnf": (GrammarSpec.ebnf('root ::= "x" [0-9]{2,4}'), lambda text: re.fullmatch("x[0-9]{2,4}", text)),
    "lark": (GrammarSpec.lark('start: "x" N\nN: /[0-9]{2,4}/'), lambda text: re.fullmatch("x[0-9]{2,4}", text)),
    "tag": (
        GrammarSpec.structural_tag({"format": TAG}),
        lambda text: _is_answer(text.removeprefix("<f>").removesuffix("</f>")),
    ),
}
SAMPLING = (
    SamplingParams(max_tokens=60),
    SamplingParams(max_tokens=60, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=60, temperature=2.0, top_p=0.9, top_k=9, min_p=0.01, seed=3),
    SamplingParams(max_tokens=60, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
)


@pytest.fixture(scope="module")
def structured_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    tokens = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_folder(folder, train_byte_level().to_str(), **tokens, chat_template=TEMPLATE)
    worker = FakeWorker(400, 16, vocab_size=420, eos=tuple(Tokenizer.load(folder).eos_ids))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCore, "load", lambda config, path: EngineCore(config, worker))
        patch.setattr(
            "rootgraft.engine.offline.offline_model.resolve_served_model", lambda config: ModelFiles(folder, "tiny")
        )
        llm = LLM()
    yield llm
    llm.close()


def check(form: str, outputs: list[RequestOutput], count: int) -> None:
    answers = [answer for output in outputs for answer in output.outputs]
    assert len(answers) == count
    for answer in answers:
        assert answer.finish_reason == "stop", answer
        assert FORMS[form][1](answer.text), answer.text


@pytest.mark.parametrize(
    ("params", "form"),
    [(params, form) for place, params in enumerate(SAMPLING) for form in taking_turns([*FORMS], 2, place)],
)
def test_texts_and_conversations_alone_and_several_with_every_way_of_sampling(structured_llm, form, params):
    grammar = FORMS[form][0]
    prompts = ["the quick brown fox", "the dog"]
    check(form, structured_llm.generate(prompts, params, n=3, grammar=grammar, use_tqdm=False), 6)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    check(form, structured_llm.chat(chats, params, grammar=grammar, use_tqdm=False), 2)


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_from_the_cache_is_the_same(structured_llm, form):
    prompt, params = "and of to in is the quick brown fox " * 4 + form, SamplingParams(max_tokens=60, seed=5)
    first, second = (
        structured_llm.generate(prompt, params, grammar=FORMS[form][0], use_tqdm=False)[0] for _ in range(2)
    )
    check(form, [first, second], 2)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert second.usage[0].cached > first.usage[0].cached


@pytest.mark.parametrize("form", FORMS)
def test_the_shortest_answer_is_told_and_fits(structured_llm, form):
    grammar = FORMS[form][0]
    [cut] = structured_llm.generate("the", SamplingParams(max_tokens=1), grammar=grammar, use_tqdm=False)
    shortest = cut.usage[0].shortest
    assert shortest
    params = SamplingParams(max_tokens=shortest)
    check(form, structured_llm.generate("the", params, n=2, grammar=grammar, use_tqdm=False), 2)


def test_a_refused_grammar_names_keyword_and_place_and_harms_nobody(structured_llm):
    refused = GrammarSpec.json_schema({"properties": {"a": {"pattern": "(?<=x)y"}}})
    [output] = structured_llm.generate("the", grammar=FORMS["choice"][0], use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    with pytest.raises(GrammarRefused, match=r"'pattern' at '/properties/a/pattern'.*lookbehind"):
        structured_llm.generate("the", grammar=refused, use_tqdm=False)
    [output] = structured_llm.generate("the", grammar=FORMS["choice"][0], use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
