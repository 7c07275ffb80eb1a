"""Decisions over HTTP: OpenAI's own client, and the probabilities of transformers and peft on a tiny model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from openai.types.decision import Decision
from support.api.api_live import ask
from support.api.real_server import RealServer, tiny_server
from support.machine.waits import wait_until
from support.models.lora_models import LINEARS, PeftOracle, base, make_adapter
from support.models.tiny_fixtures import CHAT_TEMPLATE
from support.models.tiny_tokenizers import train_byte_level, write_folder

from rootgraft.engine.text.tokenizer import Tokenizer

TEXT = "The parcel arrived broken, and nobody answers."
TEAMS = ["refunds", "repairs", "returns to the sender"]


@pytest.fixture(scope="module")
def folder(bases: Path) -> Path:
    """A tiny model with a tokenizer, and two adapters of it."""
    base("wordy", bases)
    write_folder(bases / "wordy", train_byte_level().to_str(), eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)
    for seed, name in enumerate(("one", "two")):
        make_adapter("wordy", bases, bases / "adapters" / name, seed, r=2 + seed, target_modules=LINEARS)
    return bases


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RealServer]:
    options = (
        "--served-model-name base --num-gpu-blocks-override 400 --enable-lora "
        f"--lora-dir {folder / 'adapters'} --lora-modules one=one"
    )
    with tiny_server(folder / "wordy", *options.split()) as started:
        yield started


class Oracle:
    """Probabilities of labels behind a whole prompt, computed label by label without a tree or a cache."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peft = PeftOracle("wordy", folder)
        self._tokenizer = Tokenizer.load(folder / "wordy")

    def shares(
        self, user: str, labels: Sequence[str], adapter: str | None = None, *, ends: bool = False
    ) -> tuple[list[float], float]:
        """The share of each label among all, and their mass."""
        text = f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        prompt = list(self._tokenizer.encode(text, False))
        scores = []
        for label in labels:
            ending = list(self._tokenizer.encode(text + label, False))[len(prompt) :]
            ending += [*self._tokenizer.eos_ids] if ends else []
            path = adapter and self._folder / "adapters" / adapter
            logprobs = self._peft.logits(path, prompt + ending).log_softmax(-1)
            scores.append(sum(float(logprobs[len(prompt) + at - 1, each]) for at, each in enumerate(ending)))
        mass = sum(map(math.exp, scores))
        return [math.exp(score) / mass for score in scores], mass


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


PREDICATE = f"{TEXT}\n\nQuestion: Something is broken.\nAnswer with Yes or No only."
CHOICE = (
    f"{TEXT}\n\nQuestion: Which team?\nA: refunds\nB: repairs - mends things\nC: returns to the sender\n"
    "Answer with the letter of one option only."
)
SCORE = f"{TEXT}\n\nQuestion: How urgent?\n0: low\n1: high\nAnswer with the number of one level only."
QUESTIONS: list[Any] = [
    {"type": "predicate", "name": "broken", "instructions": "Something is broken."},
    {
        "type": "choice",
        "instructions": [{"type": "input_text", "text": "Which team?"}],
        "choices": [{"value": team} | ({"description": "mends things"} if team == "repairs" else {}) for team in TEAMS],
    },
    {"type": "score", "instructions": "How urgent?", "levels": [{"label": "low"}, {"label": "high"}]},
]


def check(found: Decision, oracle: Oracle, adapters: Sequence[str | None]) -> None:
    predicate, choice, score = found.answers
    yes, no = oracle.shares(PREDICATE, ["Yes", "No"], adapters[0])[0]
    assert predicate.type == "predicate"
    assert predicate.name == "broken"
    assert (predicate.probability, 1 - predicate.probability) == pytest.approx((yes, no), abs=1e-4)
    shares, mass = oracle.shares(CHOICE, "ABC", adapters[1])
    assert choice.type == "choice"
    assert [each.value for each in choice.probabilities] == TEAMS
    assert [each.probability for each in choice.probabilities] == pytest.approx(shares, abs=1e-4)
    assert choice.choice == TEAMS[shares.index(max(shares))]
    assert choice.confidence == pytest.approx(max(shares) * mass, abs=1e-4)
    levels, _ = oracle.shares(SCORE, "01", adapters[2])
    assert score.type == "score"
    assert [(each.value, each.label) for each in score.probabilities] == [(0, "low"), (1, "high")]
    assert score.score == pytest.approx(levels[1], abs=1e-4)


def test_answers_are_those_of_transformers(client: openai.OpenAI, oracle: Oracle) -> None:
    """Twice, the second time from the cache, whose tokens are counted."""
    usages = []
    for _ in range(2):
        found = client.decisions.create(model="base", input=TEXT, questions=QUESTIONS)
        assert found.model == "base"
        check(found, oracle, [None] * 3)
        usages.append(found.usage)
    first, second = usages
    assert first.input_tokens == second.input_tokens == second.total_tokens
    assert first.output_tokens == 0
    assert second.input_tokens_details.cached_tokens > first.input_tokens_details.cached_tokens
    for usage in usages:
        details = usage.input_tokens_details
        assert details.cached_tokens + details.cache_write_tokens == usage.input_tokens


def test_an_adapter_answers_all_or_one_of_the_questions(client: openai.OpenAI, oracle: Oracle) -> None:
    found = client.decisions.create(model="one", input=TEXT, questions=QUESTIONS)
    assert found.model == "one"
    check(found, oracle, ["one"] * 3)
    own = [QUESTIONS[0], {**QUESTIONS[1], "model": "two"}, {**QUESTIONS[2], "model": "base"}]
    check(client.decisions.create(model="one", input=TEXT, questions=own), oracle, ["one", "two", None])


async def test_the_asynchronous_client(url: str, oracle: Oracle) -> None:
    """Several at once, with the fields of the cache, as OpenAI's client sends them."""
    inner = httpx.AsyncClient(trust_env=False)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=inner) as made:
        every = await asyncio.gather(
            *(
                made.decisions.create(
                    model="base",
                    input=[{"role": "user", "content": [{"type": "input_text", "text": TEXT}]}],
                    questions=QUESTIONS,
                    prompt_cache_key="parcels",
                    prompt_cache_options={"mode": "implicit", "ttl": "30m"},
                    safety_identifier="somebody",
                )
                for _ in range(4)
            )
        )
    for found in every:
        check(found, oracle, [None] * 3)


def test_values_are_labels_of_many_tokens(client: openai.OpenAI, oracle: Oracle) -> None:
    """Their probabilities are products; ends count where a value begins another one."""
    lines = "\n".join(f"- {team}" for team in TEAMS)
    for teams, ends in ((TEAMS, False), (["returns", *TEAMS], True)):
        lines = "\n".join(f"- {team}" for team in teams)
        user = f"{TEXT}\n\nQuestion: Which team?\n{lines}\nAnswer with the text of one option only."
        question: Any = {"type": "choice", "instructions": "Which team?", "choices": [{"value": t} for t in teams]}
        found = client.decisions.create(
            model="base", input=TEXT, questions=[question], extra_body={"answer_with": "values"}
        )
        [answer] = found.answers
        assert answer.type == "choice"
        shares, _ = oracle.shares(user, teams, ends=ends)
        assert [each.probability for each in answer.probabilities] == pytest.approx(shares, abs=1e-4)


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.heavy)])
def test_many_questions_of_up_to_255_choices(client: openai.OpenAI, oracle: Oracle, count: int) -> None:
    """The labels are two letters each; a few of the questions are compared."""
    choices = [{"value": f"v{number}"} for number in range(255)]
    questions: Any = [
        {"type": "choice", "instructions": f"Number {number}?", "choices": choices[: 2 + (number * 17) % most]}
        for number, most in enumerate([254] * 12 + [40] * (count - 12))
    ]
    questions[7]["choices"] = choices
    found = client.decisions.create(model="base", input=TEXT, questions=questions)
    assert [len(each.probabilities) for each in found.answers] == [len(each["choices"]) for each in questions]  # type: ignore[union-attr]
    alphabet = [chr(ord("A") + number) for number in range(26)]
    for number in (3, 7):
        most = len(questions[number]["choices"])
        codes = alphabet[:most] if most <= 26 else [a + b for a in alphabet for b in alphabet][:most]
        lines = "\n".join(f"{code}: v{index}" for index, code in enumerate(codes))
        what = "letter" if most <= 26 else "letters"
        user = f"{TEXT}\n\nQuestion: Number {number}?\n{lines}\nAnswer with the {what} of one option only."
        answer: Any = found.answers[number]
        got = [each.probability for each in answer.probabilities]
        few = sorted({0, 1, most // 2, most - 1})
        shares, _ = oracle.shares(user, [codes[index] for index in few])
        total = sum(got[index] for index in few)
        assert [got[index] / total for index in few] == pytest.approx(shares, abs=1e-4)
        assert sum(got) == pytest.approx(1)


def test_a_conversation_with_calls_and_json(client: openai.OpenAI) -> None:
    """It is read as a chat: the question is the user's next turn."""
    items: Any = [
        {"role": "developer", "content": "Judge."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": {"b": [1]}}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"x": 1}'},
        {"type": "custom_tool_call", "call_id": "c2", "name": "run", "input": "ls"},
        {"type": "function_call_output", "call_id": "c1", "output": "found"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ran"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    found = client.decisions.create(model="base", input=items, questions=QUESTIONS[:1])
    assert found.answers[0].type == "predicate"


def test_system_one(http: httpx.Client, oracle: Oracle) -> None:
    body = {
        "model": "two",
        "state": TEXT,
        "questions": {
            "broken": {"type": "noul", "instructions": "Something is broken."},
            "team": {
                "type": "choice",
                "instructions": "Which team?",
                "criteria": {"refunds": None, "repairs": "mends things", "returns to the sender": None},
            },
            "urgency": {"type": "score", "instructions": "How urgent?", "criteria": ["low", "high"]},
        },
    }
    reply = http.post("/v1/systemone", json=body)
    found = reply.json()
    assert reply.status_code == 200, found
    assert (found["model"], found["object"]) == ("two", "structured_decision")
    broken, team, urgency = (found["answers"][name] for name in body["questions"])  # type: ignore[attr-defined]
    assert broken["noul"] == pytest.approx(oracle.shares(PREDICATE, ["Yes", "No"], "two")[0][0], abs=1e-4)
    shares, mass = oracle.shares(CHOICE, "ABC", "two")
    assert list(team["probabilities"].values()) == pytest.approx(shares, abs=1e-4)
    assert team["choice"] == TEAMS[shares.index(max(shares))]
    assert found["diagnostics"]["team"]["label_mass"] == team["x_label_mass"] == pytest.approx(mass, abs=1e-4)
    assert urgency["legend"] == {"0": "low", "1": "high"}
    assert urgency["score"] == pytest.approx(oracle.shares(SCORE, "01", "two")[0][1], abs=1e-4)
    told = http.post("/v1/systemone", json={**body, "state": {"a": [1]}, "instructions": "Judge."})
    assert told.status_code == 200


def test_the_client_leaves_and_the_reads_end(url: str, http: httpx.Client) -> None:
    choices = [{"value": f"{number} of many"} for number in range(255)]
    question = {"type": "choice", "instructions": "Which?", "choices": choices}
    body = {"input": TEXT * 8, "questions": [question] * 40, "answer_with": "values"}
    before = _metric(http, "request_success_total")
    with ask(SimpleNamespace(url=url), "/v1/decisions", body):  # type: ignore[arg-type]
        wait_until(lambda: _metric(http, "num_requests_running") > 0)
    # One that was aborted counts here too. The engine tells its counts a few times a second.
    wait_until(lambda: _metric(http, "request_success_total") > before)
    wait_until(lambda: not _metric(http, "num_requests_running") and not _metric(http, "num_requests_waiting"))
    assert http.post("/v1/decisions", json={"input": TEXT, "questions": QUESTIONS}).status_code == 200


def _metric(http: httpx.Client, name: str) -> float:
    lines = [line for line in http.get("/metrics").text.splitlines() if line.partition("{")[0].endswith(f":{name}")]
    assert lines
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"questions": []}, 400, "questions"),
        ({"questions": QUESTIONS * 134}, 400, "questions"),
        ({"model": "nobody"}, 404, "model"),
        ({"questions": [QUESTIONS[0], {**QUESTIONS[0], "model": "nobody"}]}, 404, "questions[1].model"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            400,
            "input[0].content[0].type",
        ),
        ({"input": TEXT * 200}, 400, "input"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, changes: dict[str, Any], status: int, param: str) -> None:
    reply = http.post("/v1/decisions", json={"input": TEXT, "questions": QUESTIONS, **changes})
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text


def test_choices_of_the_same_tokens_are_refused(http: httpx.Client) -> None:
    question = {"type": "choice", "instructions": "x", "choices": [{"value": "true"}, {"value": True}]}
    body = {"input": TEXT, "questions": [question]}
    assert http.post("/v1/decisions", json=body).status_code == 200
    reply = http.post("/v1/decisions", json={**body, "answer_with": "values"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "questions[0].choices"


def _wanted(oracle: Oracle, prompt: list[int], label: list[int], adapter: str | None = None) -> float:
    """The logprob of a label behind a prompt."""
    path = adapter and oracle._folder / "adapters" / adapter
    logprobs = oracle._peft.logits(path, prompt + label).log_softmax(-1)
    return sum(float(logprobs[len(prompt) + at - 1, token]) for at, token in enumerate(label))


@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("model", ["base", "one"])
def test_scores_of_tokens(http: httpx.Client, oracle: Oracle, folder: Path, model: str, item_first: bool) -> None:
    """SGLang's fields, in texts and in token ids."""
    tokenizer = Tokenizer.load(folder / "wordy")
    labels = [5, 77, 31, 5]
    items = [" It is broken", " It is whole", ""]
    texts = [item + TEXT if item_first else TEXT + item for item in items]
    adapter = None if model == "base" else model
    wanted = [
        [_wanted(oracle, list(tokenizer.encode(text, True)), [label], adapter) for label in labels] for text in texts
    ]
    body = {"model": model, "query": TEXT, "items": items, "label_token_ids": labels, "item_first": item_first}
    for apply_softmax in (False, True):
        found = http.post("/v1/score", json={**body, "apply_softmax": apply_softmax}).json()
        assert (found["object"], found["model"]) == ("scoring", model)
        for scores, logprobs in zip(found["scores"], wanted, strict=True):
            whole = sum(map(math.exp, logprobs)) if apply_softmax else 1
            assert scores == pytest.approx([math.exp(each) / whole for each in logprobs], abs=1e-4)
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    ids = {"query": [3, 4, 5], "items": [[6], [7, 8]]}
    found = http.post("/v1/score", json={**body, **ids}).json()
    for scores, item in zip(found["scores"], ids["items"], strict=True):
        prompt = [*item, 3, 4, 5] if item_first else [3, 4, 5, *item]  # type: ignore[misc]
        logprobs = [_wanted(oracle, prompt, [label], adapter) for label in labels]
        assert scores == pytest.approx(list(map(math.exp, logprobs)), abs=1e-4)


def test_scores_of_labels_of_many_tokens(http: httpx.Client, oracle: Oracle) -> None:
    labels = [[9, 8, 7], [9, 8], [4], [9, 8, 7]]
    body = {"query": [3, 4, 5], "items": [[6]], "labels": labels, "logprobs": True}
    found = http.post("/v1/score", json=body).json()
    logprobs = [_wanted(oracle, [3, 4, 5, 6], label) for label in labels]
    assert [sum(each) for each in found["logprobs"][0]] == pytest.approx(logprobs, abs=1e-4)
    assert [len(each) for each in found["logprobs"][0]] == [3, 2, 1, 3]
    assert found["scores"][0] == pytest.approx(list(map(math.exp, logprobs)), abs=1e-4)
    # Prompt, and the two inner nodes of the tree.
    assert found["usage"]["prompt_tokens"] == 4 + 2


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"label_token_ids": [1 << 20]}, "label_token_ids"),
        ({"label_token_ids": None}, "label_token_ids"),
        ({"label_token_ids": []}, "label_token_ids"),
        ({"labels": ["a"]}, "labels"),
        ({"label_token_ids": None, "labels": ["a", ""]}, "labels[1]"),
        ({"items": ["a", [5]]}, "items[1]"),
        ({"items": ["a", TEXT * 200]}, "items[1]"),
        ({"query": "", "items": ["a", ""]}, "items[1]"),
        ({"query": [], "items": [[5], []]}, "items[1]"),
        ({"query": [], "items": [[5], [1 << 20]]}, "items[1]"),
        ({"items": ["a"] * 1000, "label_token_ids": [5] * 263}, "label_token_ids"),
    ],
)
def test_what_cannot_be_scored_is_named(http: httpx.Client, changes: dict[str, Any], param: str) -> None:
    reply = http.post("/v1/score", json={"query": TEXT, "items": ["a"], "label_token_ids": [5], **changes})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_ids_and_named_logprobs_of_a_real_answer(client: openai.OpenAI, oracle: Oracle, folder: Path) -> None:
    """Of allowed tokens one is drawn each time; the end token is among the ids, which have its place in no text."""
    tokenizer = Tokenizer.load(folder / "wordy")
    [end] = tokenizer.eos_ids
    extra = {"allowed_token_ids": [70, 71, end], "return_token_ids": True, "logprob_token_ids": [70, end, 3]}
    answer: Any = client.completions.create(
        model="one", prompt="the fox", max_tokens=60, temperature=1.0, seed=3, logprobs=0, extra_body=extra
    )
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert choice.token_ids[-1] == end
    assert set(choice.token_ids[:-1]) <= {70, 71}
    prompt = choice.prompt_token_ids
    assert prompt == list(tokenizer.encode("the fox", True))
    right = (
        PeftOracle("wordy", folder).logits(folder / "adapters" / "one", [*prompt, *choice.token_ids]).log_softmax(-1)
    )
    shown = {tokenizer.token_bytes(token).decode(): token for token in (70, end, 3)}
    for at, top in enumerate(choice.logprobs.top_logprobs):
        for name, token in shown.items():
            assert top[name] == pytest.approx(float(right[len(prompt) + at - 1, token]), abs=1e-4)
