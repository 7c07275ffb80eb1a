"""Beam search over HTTP: the answers of transformers' own, and ends and forms by the same search over its logits."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from support.api.real_server import RealServer, tiny_server
from support.engine.tiny_llm import make_model, write_model

from rootgraft.engine.text.tokenizer import Tokenizer

CHOICES = ["red", "rose", "green", "grey"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("beams"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealServer]:
    with tiny_server(folder, "--served-model-name", "tiny", "--num-gpu-blocks-override", "400") as started:
        yield started


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@torch.no_grad()
def transformers_beams(model: Any, prompt: list[int], width: int, steps: int, penalty: float) -> list[list[int]]:
    """The answers of a search in which nothing ends."""
    model.generation_config.eos_token_id = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=steps,
            do_sample=False,
            length_penalty=penalty,
            pad_token_id=0,
        )
    return [each[len(prompt) :].tolist() for each in found]


Allowed = Callable[[list[int]], set[int]]


@torch.no_grad()
def searched(
    model: Any,
    prompt: list[int],
    width: int,
    steps: int,
    ends: set[int],
    penalty: float,
    allowed: Allowed | None = None,
) -> list[list[int]]:
    """The answers of the search, ends included, from whole prompts at each step."""

    def score(beam: tuple[list[int], float]) -> float:
        return float(beam[1] / (len(prompt) + len(beam[0]) - (beam[0][-1] in ends)) ** penalty)

    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(steps):
        grown = []
        for answer, total in live:
            logprobs = model(torch.tensor([[*prompt, *answer]])).logits[0, -1].log_softmax(-1)
            tokens = range(len(logprobs)) if allowed is None else allowed(answer)
            best = sorted(tokens, key=lambda token: -float(logprobs[token]))[: 2 * width]
            for token in best:
                (ended if token in ends else grown).append(([*answer, token], total + float(logprobs[token])))
        live = sorted(grown, key=score, reverse=True)[:width]
    return [answer for answer, _ in sorted([*ended, *live], key=score, reverse=True)[:width]]


def ask(http: httpx.Client, **fields: Any) -> list[list[int]]:
    reply = http.post("/v1/completions", json={"use_beam_search": True, "return_token_ids": True, **fields})
    assert reply.status_code == 200, reply.text
    return [each["token_ids"] for each in reply.json()["choices"]]


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(54)
    return [[draw.randrange(3, 290) for _ in range(draw.randrange(2, 40))] for _ in range(count)]


def test_beams_are_those_of_transformers(http: httpx.Client, model: Any) -> None:
    """50 prompts, in requests of several; lengths are equal, so the penalty of either kind changes no order."""
    asked = prompts(50)
    for begin, width in zip(range(0, 50, 10), (1, 2, 3, 4, 10), strict=True):
        some = asked[begin : begin + 10]
        found = ask(http, prompt=some, n=width, max_tokens=5, ignore_eos=True, length_penalty=1.5)
        wanted = [beam for prompt in some for beam in transformers_beams(model, prompt, width, 5, 1.5)]
        assert found == wanted


@pytest.mark.parametrize("penalty", [0.0, 1.0, -2.0])
def test_ended_beams_are_ranked_with_the_others(
    http: httpx.Client, model: Any, tokenizer: Tokenizer, penalty: float
) -> None:
    ends = set(tokenizer.eos_ids)
    for prompt in prompts(4):
        wanted = searched(model, prompt, 8, 4, ends, penalty)
        assert ask(http, prompt=prompt, n=8, max_tokens=4, length_penalty=penalty) == wanted


def test_a_form_holds_in_every_beam(http: httpx.Client, model: Any, tokenizer: Tokenizer) -> None:
    """Scores are the model's own, of the tokens that the form allows."""
    ends, texts = set(tokenizer.eos_ids), [each.encode() for each in CHOICES]

    def allowed(answer: list[int]) -> set[int]:
        before = tokenizer.join_bytes(answer, True)
        found = {
            token
            for token in range(tokenizer.vocab_size)
            if token not in tokenizer.special_ids
            and (text := tokenizer.token_bytes(token))
            and any(each.startswith(before + text) for each in texts)
        }
        return found | (ends if before in texts else set())

    for prompt in prompts(3):
        wanted = searched(model, prompt, 4, 8, ends, 1.0, allowed)
        body = {"prompt": prompt, "n": 4, "max_tokens": 8, "structured_outputs": {"choice": CHOICES}}
        assert ask(http, **body) == wanted


def test_chats(client: openai.OpenAI, http: httpx.Client, model: Any, tokenizer: Tokenizer) -> None:
    messages: Any = [{"role": "user", "content": "the quick"}]
    prompt = list(tokenizer.encode("<|im_start|>user\nthe quick<|im_end|>\n<|im_start|>assistant\n", False))
    wanted = searched(model, prompt, 3, 5, set(tokenizer.eos_ids), 1.0)
    extra = {"use_beam_search": True, "return_token_ids": True}
    found = client.chat.completions.create(model="tiny", messages=messages, n=3, max_tokens=5, extra_body=extra)
    assert [each.model_extra["token_ids"] for each in found.choices if each.model_extra] == wanted
    texts = [tokenizer.join_bytes([t for t in each if t not in tokenizer.eos_ids], True) for each in wanted]
    assert [each.message.content for each in found.choices] == [text.decode(errors="replace") for text in texts]
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(prompt)
    assert found.usage.completion_tokens == sum(map(len, wanted))
    json_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    body = {"messages": messages, "n": 2, "max_tokens": 9, "use_beam_search": True, "response_format": json_format}
    reply = http.post("/v1/chat/completions", json=body).json()
    assert sorted(each["message"]["content"] for each in reply["choices"]) == ["1", "2"]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"n": 11}, "n"),
    ({"n": 0}, "n"),
    ({"stream": True}, "stream"),
    ({"logprobs": 1}, "logprobs"),
    ({"stop": ["x"]}, "stop"),
    ({"logit_bias": {"5": 1.0}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"repetition_penalty": 1.5}, "repetition_penalty"),
    ({"min_tokens": 1}, "min_tokens"),
    ({"length_penalty": 10.5}, "length_penalty"),
    ({"length_penalty": -10.5}, "length_penalty"),
    ({"length_penalty": "1"}, "length_penalty"),
    ({"use_beam_search": 1}, "use_beam_search"),
    ({"n": 3, "max_tokens": 5, "structured_outputs": {"choice": ["a", "b"]}}, "n"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_wrong_requests(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    body = {"prompt": [5, 6], "max_tokens": 2, "use_beam_search": True, **fields}
    reply = http.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_what_has_no_effect_is_taken(http: httpx.Client) -> None:
    plain = ask(http, prompt=[5, 6], n=2, max_tokens=2)
    for fields in ({"temperature": 0.7, "top_p": 0.5, "seed": 3}, {"stop": [], "logit_bias": {}, "min_tokens": 0}):
        assert ask(http, prompt=[5, 6], n=2, max_tokens=2, **fields) == plain
    for penalty in (10, -10):
        assert len(ask(http, prompt=[5, 6], n=10, max_tokens=2, length_penalty=penalty)) == 10
    body = {"prompt": "a", "max_tokens": 2, "length_penalty": 2.0}
    assert http.post("/v1/completions", json=body).status_code == 200
