"""Weighted combinations of adapters over HTTP: the routes that take them, access of keys, and wrong requests."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from support.api.key_files import entry, write
from support.api.real_server import RealServer, tiny_server
from support.models.lora_models import LINEARS, base, copy_of, make_adapter
from support.models.tiny_fixtures import CHAT_TEMPLATE
from support.models.tiny_tokenizers import train_byte_level, write_folder

from rootgraft.engine.text.tokenizer import Tokenizer

PARTS = [{"name": "two", "weight": 0.5}, {"name": "one", "weight": -0.25}]
NAME = "one:-0.25+two:0.5"
TEXT = "The parcel arrived broken."


@pytest.fixture(scope="module")
def folder(bases: Path) -> Path:
    """A tiny model with a tokenizer, three adapters of it, and keys: one may use two of them."""
    base("wordy", bases)
    write_folder(bases / "wordy", train_byte_level().to_str(), eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)
    for seed, name in enumerate(("one", "two", "three")):
        make_adapter("wordy", bases, bases / "weighted" / name, seed, r=2 + seed, target_modules=LINEARS)
    write(bases / "keys.json", entry("all", scopes=["inference", "admin"]), entry("some", adapters=["one", "two"]))
    return bases


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealServer]:
    options = (
        "--served-model-name base --num-gpu-blocks-override 400 --enable-lora "
        f"--lora-dir {folder / 'weighted'} --lora-modules one=one --api-key-file {folder / 'keys.json'}"
    )
    with tiny_server(folder / "wordy", *options.split()) as started:
        started.client.api_key = "some"
        started.http.headers["authorization"] = "Bearer some"
        yield started


class Oracle:
    """PEFT with a combination of adapters."""

    def __init__(self, folder: Path, weights: Mapping[str, float]) -> None:
        self.tokenizer = Tokenizer.load(folder / "wordy")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from peft import PeftModel

            first, *rest = weights
            path = folder / "weighted"
            model: Any = PeftModel.from_pretrained(copy_of("wordy", folder), path / first, adapter_name=first)
            for name in rest:
                model.load_adapter(path / name, adapter_name=name)
            model.add_weighted_adapter(list(weights), list(weights.values()), "sum", combination_type="cat")
            model.set_adapter("sum")
        self._model = model.eval()

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        return self._model(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)

    @torch.no_grad()
    def embedding(self, text: str) -> list[float]:
        tokens = torch.tensor([list(self.tokenizer.encode(text, True))])
        hidden = self._model.base_model.model.model(tokens).last_hidden_state[0, -1]
        return torch.nn.functional.normalize(hidden, dim=0).tolist()

    def greedy(self, tokens: list[int], count: int) -> tuple[list[int], list[float]]:
        drawn, found = [], []
        for _ in range(count):
            last = self.logprobs([*tokens, *drawn])[-1]
            drawn.append(int(last.argmax()))
            found.append(float(last.max()))
        return drawn, found


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder, {"two": 0.5, "one": -0.25})


GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def asked(**fields: Any) -> list[dict[str, Any]]:
    """The ways of naming the combination."""
    ways = [{"model": NAME}, {"model": f"base:{NAME}"}, {"model": "base", "adapters": PARTS}, {"adapters": PARTS}]
    return [fields | way for way in ways]


def test_completions(http: httpx.Client, oracle: Oracle) -> None:
    tokens = list(oracle.tokenizer.encode(TEXT, True))
    wanted, logprobs = oracle.greedy(tokens, 6)
    for body in asked(prompt=tokens, max_tokens=6, temperature=0, ignore_eos=True, logprobs=0, return_token_ids=True):
        reply = http.post("/v1/completions", json=body).json()
        assert reply["model"] == NAME
        [choice] = reply["choices"]
        assert choice["token_ids"] == wanted
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)


def test_chats_responses_and_messages(client: openai.OpenAI, http: httpx.Client, oracle: Oracle) -> None:
    text = f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"
    wanted = oracle.tokenizer.decode(oracle.greedy(list(oracle.tokenizer.encode(text, False)), 5)[0])
    messages: Any = [{"role": "user", "content": TEXT}]
    for body in asked(messages=messages, max_tokens=5, temperature=0):
        reply = http.post("/v1/chat/completions", json=body).json()
        assert (reply["model"], reply["choices"][0]["message"]["content"]) == (NAME, wanted)
    chat = client.chat.completions.create(model=NAME, messages=messages, max_tokens=5, temperature=0)
    assert (chat.model, chat.choices[0].message.content) == (NAME, wanted)
    for body in asked(input=TEXT, max_output_tokens=5, temperature=0):
        reply = http.post("/v1/responses", json=body).json()
        assert (reply["model"], reply["output"][0]["content"][0]["text"]) == (NAME, wanted)
        count = http.post("/v1/responses/input_tokens", json={k: v for k, v in body.items() if k in COUNTED}).json()
        assert count["input_tokens"] == reply["usage"]["input_tokens"]


COUNTED = ("model", "adapters", "input")


def test_decisions(http: httpx.Client, oracle: Oracle) -> None:
    """For all questions, and named by one alone."""
    prompt = f"{TEXT}\n\nQuestion: Broken?\nAnswer with Yes or No only."
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    before = list(oracle.tokenizer.encode(text, False))
    scores = []
    for label in ("Yes", "No"):
        tokens = list(oracle.tokenizer.encode(text + label, False))
        logprobs = oracle.logprobs(tokens)
        scores.append(sum(float(logprobs[at - 1, tokens[at]]) for at in range(len(before), len(tokens))))
    wanted = float(torch.tensor(scores).softmax(0)[0])
    question = {"type": "predicate", "instructions": "Broken?"}
    for body in [*asked(input=TEXT, questions=[question]), {"input": TEXT, "questions": [question | {"model": NAME}]}]:
        reply = http.post("/v1/decisions", json=body).json()
        assert reply["answers"][0]["probability"] == pytest.approx(wanted, abs=1e-4)


def test_embeddings(http: httpx.Client, oracle: Oracle) -> None:
    wanted = oracle.embedding(TEXT)
    for body in asked(input=TEXT):
        reply = http.post("/v1/embeddings", json=body).json()
        assert (reply["model"], reply["data"][0]["embedding"]) == (NAME, pytest.approx(wanted, abs=1e-4))


def test_a_key_needs_every_part(http: httpx.Client) -> None:
    """What it may not use cannot be told from what there is not."""
    errors = []
    for other in ("three", "none"):
        bodies = {"model": f"one:0.5+{other}:0.5"}, {"adapters": [PARTS[1], {"name": other, "weight": 1}]}
        for body in bodies:
            reply = http.post("/v1/completions", json={"prompt": "x", **body})
            assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
            errors.append(reply.json()["error"]["message"].replace(other, "..."))
    assert len(set(errors)) == 1
    body = {"prompt": "x", "max_tokens": 1, "model": "one:0.5+three:0.5"}
    assert http.post("/v1/completions", json=body, headers={"authorization": "Bearer all"}).status_code == 200


def test_a_combination_is_in_no_list_of_models(http: httpx.Client) -> None:
    """But adapters that are in use are told to operators, as the engine calls them."""
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "model": NAME}).status_code == 200
    listed = [each["id"] for each in http.get("/v1/models").json()["data"]]
    assert not any("+" in name or "*" in name for name in listed)
    assert {"base", "one", "two"} <= set(listed)
    shown = http.get("/v1/adapters", headers={"authorization": "Bearer all"}).json()["data"]
    [found] = [each for each in shown if each["name"] == "-0.25*one + 0.5*two"]
    assert (found["state"], found["rank"]) == ("ready", 5)
    assert found["requests"] >= 1


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"adapters": []}, 400, "adapters"),
    ({"adapters": "one"}, 400, "adapters"),
    ({"adapters": [{"name": "one"}]}, 400, "adapters[0].weight"),
    ({"adapters": [{"weight": 1}]}, 400, "adapters[0].name"),
    ({"adapters": [{"name": "", "weight": 1}]}, 400, "adapters[0].name"),
    ({"adapters": [{"name": "one", "weight": "1"}]}, 400, "adapters[0].weight"),
    ({"adapters": [{"name": "one", "weight": True}]}, 400, "adapters[0].weight"),
    ({"adapters": [{"name": "one", "weight": 100.5}]}, 400, "adapters[0].weight"),
    ({"adapters": [{"name": "one", "weight": -100.5}]}, 400, "adapters[0].weight"),
    ({"adapters": [PARTS[0], PARTS[0]]}, 400, "adapters[1].name"),
    ({"adapters": [{"name": "1*one", "weight": 1}]}, 400, "adapters[0].name"),
    ({"adapters": [{"name": f"x{number}", "weight": 1} for number in range(9)]}, 400, "adapters"),
    ({"adapters": PARTS, "model": "one"}, 400, "model"),
    ({"adapters": PARTS, "lora_path": "one"}, 400, "lora_path"),
    ({"adapters": [{"name": "base", "weight": 1}]}, 400, "model"),
    ({"model": "one:0.5+one:0.5"}, 400, "model"),
    ({"model": "one:100.5"}, 400, "model"),
    ({"model": "+".join(f"x{number}:1" for number in range(9))}, 400, "model"),
    ({"model": "one:0.5+two:x"}, 404, "model"),
]


@pytest.mark.parametrize(("fields", "status", "param"), WRONG)
def test_wrong_combinations(http: httpx.Client, fields: dict[str, Any], status: int, param: str) -> None:
    reply = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text


def test_bounds_hold_on_both_sides(http: httpx.Client) -> None:
    for weight in (100, -100):
        body = {"prompt": "x", "max_tokens": 1, "adapters": [{"name": "one", "weight": weight}]}
        assert http.post("/v1/completions", json=body).status_code == 200
