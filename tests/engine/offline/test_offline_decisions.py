"""Typed questions and scores of tokens offline: the probabilities of transformers, label by label."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.tiny_llm import CHAT_TEMPLATE, make_model, open_llm, write_adapter
from transformers import AutoModelForCausalLM

from rootgraft import LLM
from rootgraft.engine.errors import ContextTooLong, RequestError
from rootgraft.engine.serving.calibration_folder import CalibrationFile, CalibrationFolder, write_calibration
from rootgraft.engine.text.rerank_prompt import DEFAULT_INSTRUCTION, rerank_messages

TEXT = "the quick brown fox"
TEAMS = ["a dog", "a lazy dog", "jumps"]
QUESTIONS: list[Any] = [
    {"type": "predicate", "name": "quick", "instructions": "It is quick."},
    {
        "type": "choice",
        "instructions": "What?",
        "choices": [TEAMS[0], {"value": TEAMS[1], "description": "x"}, TEAMS[2]],
    },
    {"type": "score", "instructions": "How much?", "levels": ["low", {"label": "high"}]},
]


class Oracle:
    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def logprob(self, prompt: Sequence[int], label: Sequence[int]) -> float:
        logits = self._model(torch.tensor([[*prompt, *label]])).logits[0].log_softmax(-1)
        return sum(float(logits[len(prompt) + at - 1, token]) for at, token in enumerate(label))

    def shares(self, llm: LLM, user: str, labels: Sequence[str]) -> list[float]:
        return self.shares_behind(llm.get_tokenizer(), [{"role": "user", "content": user}], "", labels)

    def shares_behind(
        self, tokenizer: Any, messages: list[dict[str, Any]], mark: str, labels: Sequence[str], *, apart: bool = False
    ) -> list[float]:
        """The shares of labels behind a mark; they are encoded with the prompt, or ``apart`` from it."""
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + mark
        prompt = tokenizer.encode(text, add_special_tokens=False)
        endings = [
            tokenizer.encode(label, add_special_tokens=False)
            if apart
            else tokenizer.encode(text + label, add_special_tokens=False)[len(prompt) :]
            for label in labels
        ]
        found = [math.exp(self.logprob(prompt, ending)) for ending in endings]
        return [each / sum(found) for each in found]


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Oracle:
    return Oracle(tiny_model)


def test_decisions_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    predicate, choice, score = llm.decide(TEXT, QUESTIONS)
    asked = f"{TEXT}\n\nQuestion: It is quick.\nAnswer with Yes or No only."
    assert predicate.probability == pytest.approx(oracle.shares(llm, asked, ["Yes", "No"])[0], abs=1e-4)
    assert (predicate.name, predicate.type) == ("quick", "predicate")
    asked = (
        f"{TEXT}\n\nQuestion: What?\nA: a dog\nB: a lazy dog - x\nC: jumps\nAnswer with the letter of one option only."
    )
    shares = oracle.shares(llm, asked, "ABC")
    assert list(choice.probabilities) == TEAMS
    assert list(choice.probabilities.values()) == pytest.approx(shares, abs=1e-4)
    assert choice.choice == TEAMS[shares.index(max(shares))]
    assert score.score is not None and 0 <= score.score <= 1
    assert sum(score.probabilities.values()) == pytest.approx(1)


def test_labels_are_read_with_the_activation_of_their_prompt(tiny_model: Path, tmp_path: Path) -> None:
    """An activated LoRA begins at its last invocation in the prompt, also where a label has the invocation too."""
    llm = open_llm(tiny_model)
    try:
        tokenizer = llm.get_tokenizer()
        asked = (
            f"{TEXT}\n\nQuestion: What?\n- a dog\n- a lazy dog - x\n- jumps\nAnswer with the text of one option only."
        )
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer.encode(rendered, add_special_tokens=False)
        labels = [tokenizer.encode(rendered + each, add_special_tokens=False)[len(prompt) :] for each in TEAMS]
        token = next(each for each in labels[1] if each in prompt and each not in (*labels[0], *labels[2]))
        assert token in labels[1][:-1]
        folder = write_adapter(tmp_path / "activated", 1, alora_invocation_tokens=[token])
        llm.load_adapter("activated", str(folder))
        [choice] = llm.decide(TEXT, QUESTIONS[1:2], answer_with="values", adapter="activated")
    finally:
        llm.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from peft import PeftModel

        adapted: Any = PeftModel.from_pretrained(make_model(), folder).eval()
    begin = max(at for at, each in enumerate(prompt) if each == token)
    found = []
    for label in labels:
        tokens = [*prompt, *label]
        with torch.no_grad():
            logits = adapted(input_ids=torch.tensor([tokens]), alora_offsets=[len(tokens) - begin]).logits[0]
        scores = logits.log_softmax(-1)
        found.append(math.exp(sum(float(scores[len(prompt) + at - 1, each]) for at, each in enumerate(label))))
    # Labels of several tokens are much less likely than those of one, so that ratios are compared.
    assert list(choice.probabilities.values()) == pytest.approx([each / sum(found) for each in found], rel=1e-3, abs=0)


def test_values_are_labels(llm: LLM, oracle: Oracle) -> None:
    asked = f"{TEXT}\n\nQuestion: What?\n- a dog\n- a lazy dog - x\n- jumps\nAnswer with the text of one option only."
    [choice] = llm.decide([{"role": "user", "content": TEXT}], QUESTIONS[1:2], answer_with="values")
    assert list(choice.probabilities.values()) == pytest.approx(oracle.shares(llm, asked, TEAMS), abs=1e-4)


def test_a_calibration_is_applied_and_held_to_its_question(llm: LLM, tmp_path: Path) -> None:
    [plain] = llm.decide(TEXT, QUESTIONS[1:2])
    assert plain.calibration is None and plain.digest
    content = CalibrationFile(plain.digest, 2.0, [0.0, 0.5, 0.0])
    write_calibration(tmp_path, "team", content)
    asked = {**QUESTIONS[1], "calibration": "team"}
    [found] = llm.decide(TEXT, [asked], calibration_dir=tmp_path)
    weights = [
        share**0.5 * math.exp(bias) for share, bias in zip(plain.probabilities.values(), content.bias, strict=True)
    ]
    assert list(found.probabilities.values()) == pytest.approx([each / sum(weights) for each in weights])
    assert (found.calibration, found.digest, found.label_mass) == ("team", plain.digest, plain.label_mass)
    for question, folder, code in (
        (asked, None, None),
        ({**asked, "calibration": "other"}, tmp_path, "calibration_not_found"),
        ({**asked, "instructions": "Who?"}, tmp_path, "calibration_mismatch"),
        ({**asked, "calibration": "../team"}, tmp_path, None),
        ({**asked, "calibration": 5}, tmp_path, None),
    ):
        with pytest.raises(RequestError) as told:
            llm.decide(TEXT, [question], calibration_dir=folder)
        assert (told.value.param, told.value.code) == ("questions[0].calibration", code)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"digest": "x", "temperature": 1}',
        '{"digest": "%s", "temperature": 0}',
        '{"digest": "%s", "temperature": true}',
        '{"digest": "%s", "temperature": NaN}',
        '{"digest": "%s", "temperature": 1e999}',
        '{"digest": "%s", "temperature": 1, "bias": [1, "x"]}',
        '{"digest": "%s", "temperature": 1, "bias": 1}',
        "[" * 60_000,
    ],
)
def test_a_damaged_calibration_is_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "team.json").write_text(content.replace("%s", "0" * 64))
    with pytest.raises(RequestError) as told:
        CalibrationFolder(tmp_path).find("team", "field")
    assert told.value.code == "calibration_damaged"


@pytest.mark.parametrize(
    ("questions", "param"),
    [
        ([], "questions"),
        ([QUESTIONS[0]] * 401, "questions"),
        ("x", "questions"),
        ([5], "questions[0]"),
        ([{"type": "noul", "instructions": "x"}], "questions[0].type"),
        ([{"type": "predicate"}], "questions[0].instructions"),
        ([{**QUESTIONS[0], "levels": []}], "questions[0].levels"),
        ([{**QUESTIONS[1], "choices": ["a"]}], "questions[0].choices"),
        ([{**QUESTIONS[1], "choices": [str(each) for each in range(256)]}], "questions[0].choices"),
        ([{**QUESTIONS[1], "choices": ["a", "a"]}], "questions[0].choices[1]"),
        ([{**QUESTIONS[2], "levels": [str(each) for each in range(101)]}], "questions[0].levels"),
    ],
)
def test_wrong_questions_are_named(llm: LLM, questions: Any, param: str) -> None:
    with pytest.raises(RequestError) as told:
        llm.decide(TEXT, questions)
    assert told.value.param == param


def test_as_many_questions_as_there_may_be(llm: LLM) -> None:
    assert len(llm.decide("a", [QUESTIONS[0]] * 400)) == 400


def test_a_text_beyond_the_context_is_refused(llm: LLM) -> None:
    with pytest.raises(ContextTooLong):
        llm.decide(f"{TEXT} " * 2000, QUESTIONS)


@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_those_of_transformers(llm: LLM, oracle: Oracle, item_first: bool) -> None:
    labels, items = [4, 9, 4], [[6], [7, 8]]
    for apply_softmax in (False, True):
        found = llm.score([3, 5], items, labels, apply_softmax, item_first)
        for item, scores in zip(items, found, strict=True):
            prompt = [*item, 3, 5] if item_first else [3, 5, *item]
            wanted = [math.exp(oracle.logprob(prompt, [label])) for label in labels]
            whole = sum(wanted) if apply_softmax else 1
            assert scores == pytest.approx([each / whole for each in wanted], abs=1e-4)
    encode = llm.get_tokenizer().encode
    [by_text] = llm.score("the fox", " jumps", labels)
    [by_tokens] = llm.score([], [encode("the fox jumps")], labels)
    assert by_text == pytest.approx(by_tokens)
    for wrong in ([], [1 << 20], [-1], ["a"]):
        with pytest.raises(RequestError):
            llm.score("the fox", "a", wrong)
    with pytest.raises(RequestError, match=r"items\[1\]"):
        llm.score("the fox", ["a", [5]], labels)  # type: ignore[list-item]


def with_template(model: Path, folder: Path, template: str) -> Path:
    """Copy a model, with another chat template."""
    shutil.copytree(model, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder


def test_labels_stand_where_the_answer_begins(oracle: Oracle, tiny_model: Path, tmp_path: Path) -> None:
    """As over HTTP: behind the mark that the template writes before an answer."""
    mark = "<say>"
    said = f"{{{{ {mark!r} if message.role == 'assistant' }}}}{{{{ message.content }}}}"
    model = with_template(tiny_model, tmp_path / "model", CHAT_TEMPLATE.replace("{{ message.content }}", said))
    with contextlib.closing(open_llm(model)) as llm:
        [predicate] = llm.decide(TEXT, QUESTIONS[:1])
        [scored] = llm.score("fox", ["the quick fox"], use_tqdm=False)
        tokenizer = llm.get_tokenizer()
    asked = f"{TEXT}\n\nQuestion: It is quick.\nAnswer with Yes or No only."
    shares = oracle.shares_behind(tokenizer, [{"role": "user", "content": asked}], mark, ["Yes", "No"])
    assert predicate.probability == pytest.approx(shares[0], abs=1e-4)
    messages = rerank_messages("fox", "the quick fox", DEFAULT_INSTRUCTION)
    shares = oracle.shares_behind(tokenizer, messages, mark, ["yes", "no"], apart=True)
    assert scored.outputs.score == pytest.approx(shares[0], abs=1e-4)


def test_a_prompt_within_a_thought_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    template = CHAT_TEMPLATE.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n") + "{# </think> #}"
    with contextlib.closing(open_llm(with_template(tiny_model, tmp_path / "model", template))) as llm:
        for ask in (lambda: llm.decide(TEXT, QUESTIONS), lambda: llm.score("a", ["b"], use_tqdm=False)):
            with pytest.raises(RequestError, match="begins every answer with a thought"):
                ask()
