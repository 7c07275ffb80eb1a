"""The offline face over the real core with a fake device: the answer follows from the prompt."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rootgraft
from rootgraft import LLM, SamplingParams
from rootgraft.engine.checkpoint.locate import ModelFiles
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import ConfigError, ContextTooLong, RequestError
from rootgraft.engine.messages import Abort, Done, Failed, Message, Ready, Submit, TokenOut
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.types import FinishReason, Logprob, Usage


class FakeCore:
    """Repeats each prompt from its beginning, one token a step, shorter prompts earlier."""

    def __init__(self) -> None:
        self.ready = Ready(200, 420, 10, 16, ())
        self.running: dict[int, tuple[Submit, int]] = {}
        self.outbox: list[Message] = []
        self.refuse: Failed | None = None
        self.seen: list[Submit] = []

    def handle(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Submit):
                self.seen.append(message)
                self.running[message.id] = (replace(message, tokens=message.tokens[:]), 0)
            elif isinstance(message, Abort):
                for number in set(message.ids) & self.running.keys():
                    self.end(number, FinishReason.ABORT)

    def end(self, number: int, reason: FinishReason) -> None:
        submit, count = self.running.pop(number)
        self.outbox.append(Done(number, reason, Usage(len(submit.tokens) - count, 1, count)))

    def step(self) -> list[Message]:
        if self.refuse is not None:
            refusal, self.refuse = self.refuse, None
            return [refusal]
        for number, (submit, count) in list(self.running.items()):
            if count == submit.params.max_tokens:
                self.end(number, FinishReason.LENGTH)
                continue
            token = submit.tokens[count]
            submit.tokens.append(token)
            top = Logprob(token, -0.5, 1, ((token, -0.5), (3, -1.0))[: submit.params.logprobs])
            logprobs = (top,) if submit.params.logprobs is not None else ()
            prompt = () if submit.params.prompt_logprobs is None or count else (top,) * (len(submit.tokens) - 2)
            self.outbox.append(TokenOut(number, (token,), logprobs, prompt))
            self.running[number] = (submit, count + 1)
        messages, self.outbox = self.outbox, []
        return messages

    def take_observations(self) -> dict[str, list[float]]:
        return {}


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> FakeCore:
    core = FakeCore()
    monkeypatch.setattr(EngineCore, "load", lambda config, path: core)
    monkeypatch.setattr(
        "rootgraft.engine.offline.offline_model.resolve_served_model", lambda config: ModelFiles(tiny_folder, "tiny")
    )
    return core


@pytest.fixture
def llm(core: FakeCore) -> LLM:
    return LLM()


def test_answers_in_the_order_of_prompts(llm: LLM, tiny: Tokenizer) -> None:
    prompts = ["the dog sleeps", "fox", "and of to in is"]
    lengths = [len(tiny.encode(prompt, True)) for prompt in prompts]
    params = [SamplingParams(max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == prompts == [output.prompt for output in outputs]
    assert [output.outputs[0].token_ids for output in outputs] == [output.prompt_token_ids for output in outputs]
    assert [output.usage for output in outputs] == [[Usage(length, 1, length)] for length in lengths]
    first = outputs[0].outputs[0]
    assert (first.index, first.finish_reason, first.stop_reason) == (0, "length", None)
    assert (first.logprobs, first.cumulative_logprob, outputs[0].prompt_logprobs) == (None, None, None)


def test_shapes_of_prompts(llm: LLM, tiny: Tokenizer) -> None:
    ids = tiny.encode("the fox", True).tolist()
    for prompts, count in (("the fox", 1), (ids, 1), ([ids, "the fox", ids], 3)):
        outputs = llm.generate(prompts, use_tqdm=False)
        assert len(outputs) == count
        assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert outputs[0].prompt is None
    assert llm.generate([], use_tqdm=False) == []


def test_n_and_stop(llm: LLM, core: FakeCore) -> None:
    [output] = llm.generate("a.b.c", SamplingParams(max_tokens=9, seed=7), stop=".", n=3, use_tqdm=False)
    assert [(answer.index, answer.text) for answer in output.outputs] == [(0, "a"), (1, "a"), (2, "a")]
    assert {(answer.finish_reason, answer.stop_reason) for answer in output.outputs} == {("stop", ".")}
    assert [usage.completion for usage in output.usage] == [2, 2, 2]
    assert [submit.params.seed for submit in core.seen] == [7, 8, 9]
    assert not core.running


def test_logprobs(llm: LLM, tiny: Tokenizer) -> None:
    params = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=0)
    [output] = llm.generate("the fox", params, use_tqdm=False)
    answer = output.outputs[0]
    assert answer.logprobs is not None and answer.cumulative_logprob == -1.0
    token = answer.token_ids[0]
    assert {key: (score.logprob, score.rank) for key, score in answer.logprobs[0].items()} == {
        token: (-0.5, 1),
        3: (-1.0, 2),
    }
    assert answer.logprobs[0][token].decoded_token == tiny.decode([token])
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_chat(llm: LLM, tiny: Tokenizer) -> None:
    hello = [{"role": "user", "content": "Hi"}]
    [output] = llm.chat(hello, use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert output.prompt_token_ids == tiny.encode(output.prompt, False).tolist()
    bye = [{"role": "assistant", "content": "By"}]
    outputs = llm.chat([hello, bye], use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert [output.prompt for output in outputs] == ["<|im_start|>user\nHi", "<|im_start|>assistant\nBy"]


def test_every_request_is_checked_before_the_first_starts(llm: LLM, core: FakeCore) -> None:
    with pytest.raises(ContextTooLong):
        llm.generate(["a", "a " * 300], use_tqdm=False)
    with pytest.raises(RequestError, match="2 sampling_params for 1 prompts"):
        llm.generate("a", [SamplingParams(), SamplingParams()], use_tqdm=False)
    with pytest.raises(RequestError, match="temperature"):
        llm.generate("a", SamplingParams(temperature=9), use_tqdm=False)
    assert core.seen == []


def test_what_is_no_prompt_and_no_stop_string_is_a_clear_error(llm: LLM, core: FakeCore) -> None:
    wrong: tuple[Any, ...] = (None, 5, iter(["a"]), {1, 2}, b"four")
    for prompts in wrong:
        with pytest.raises(RequestError, match="prompts must be a text, a list of token ids, a dict"):
            llm.generate(prompts, use_tqdm=False)
    stops: Any = [5]
    with pytest.raises(RequestError, match="stop must be a string or a list of strings, not 5"):
        llm.generate("a", stop=stops, use_tqdm=False)
    assert core.seen == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": [b"four"]}, "A prompt of tokens must be a list of token ids"),
        ({"prompts": [[1, True]]}, "A prompt of tokens must be a list of token ids"),
        ({"prompts": [{"text": "a"}]}, "A prompt cannot have this form: .* 'text'"),
        ({"sampling_params": {"max_tokens": 3}}, "sampling_params must be SamplingParams, or a list with one for each"),
        ({"sampling_params": [None]}, "sampling_params must be SamplingParams"),
        ({"sampling_params": 5}, "sampling_params must be SamplingParams"),
        ({"grammar": {"type": "object"}}, "grammar must be of type GrammarSpec, not dict"),
        ({"adapter": 5}, "adapter must be a name, not int"),
        ({"lora_request": 5}, "lora_request must be a LoRARequest, not int"),
    ],
)
def test_an_argument_of_another_type_is_a_clear_error(
    llm: LLM, core: FakeCore, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(**{"prompts": "a", **options}, use_tqdm=False)
    assert core.seen == []


@pytest.mark.parametrize("name", ["session", "params", "adapter"])
def test_a_request_beside_others_has_its_types_checked_too(llm: LLM, core: FakeCore, name: str) -> None:
    options: Any = {name: {"a": 1}}
    with pytest.raises(RequestError, match=f"{name} must be"):
        llm.begin([1], **options)
    assert core.seen == []


def test_refusal_aborts_the_others_and_the_next_call_works(llm: LLM, core: FakeCore) -> None:
    core.refuse = Failed(1, "CapacityError", "Too much at once.")
    with pytest.raises(rootgraft.EngineError, match="Too much at once"):
        llm.generate(["the", "fox", "dog"], use_tqdm=False)
    assert set(core.running) == {1}  # which the fake has not ended, though it said so
    core.running.clear()
    [output] = llm.generate("fox", SamplingParams(max_tokens=1), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["the", "fox"])
    assert "2/2" in capsys.readouterr().err
    llm.generate(["the", "fox"], use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_unknown_option(core: FakeCore) -> None:
    with pytest.raises(ConfigError, match=r"no option 'max_model_length'\. Did you mean max_model_len"):
        LLM(max_model_length=5)


def test_names_of_the_package() -> None:
    assert rootgraft.LLM is LLM
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _: Any = rootgraft.nothing


def test_faces_need_no_torch() -> None:
    program = (
        "import sys; from rootgraft import LLM; from rootgraft.engine.serving import async_engine;"
        "print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
