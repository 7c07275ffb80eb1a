"""Where an answer begins behind a prompt, by templates in the manner of published ones."""

from __future__ import annotations

from typing import Any

import pytest
from support.api.tool_templates import PROBED, TemplateOnly, kimi_turns

from rootgraft.engine.errors import RequestError
from rootgraft.engine.text.answer_opening import NO_THOUGHT, AnswerOpening
from rootgraft.engine.text.reasoning_formats import FORMATS, reasoning_format_of

CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHANNELS = CHATML.replace("|>{{ message", "|>{{ '<|final|>' if message.role == 'assistant' }}{{ message")
RECIPIENTS = CHATML.replace("<|assistant|>", "<|assistant|>>>>").replace(
    "<|{{ message.role }}|>", "<|{{ message.role }}|>{{ '>>>all\n' if message.role == 'assistant' else '' }}"
)
ALWAYS = CHATML.replace("<|assistant|>", "<|assistant|><think>\n") + "{# a turn has its thought up to </think> #}"
AT_WILL = CHATML.replace(
    "<|assistant|>",
    "<|assistant|><think>\n{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}",
)
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Is it so?"}]


def completed(source: str, **variables: Any) -> tuple[str, str]:
    """The prompt as the template writes it, and up to the place at which the answer begins."""
    tokenizer: Any = TemplateOnly(source, "<|end|>")
    kwargs = {**NO_THOUGHT, **variables}
    prompt = tokenizer.render_chat(ASKED, add_generation_prompt=True, kwargs=kwargs)
    return prompt, AnswerOpening(tokenizer, reasoning_format_of(tokenizer, "auto"), kwargs).complete(prompt)


@pytest.mark.parametrize(
    ("source", "mark"),
    [
        (CHATML, ""),
        (CHANNELS, "<|final|>"),
        (RECIPIENTS, "all\n"),
        (AT_WILL, ""),
        (kimi_turns(), ""),
        (PROBED["number before the name"], "<|TEXT|>"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", ""),
        (CHATML.replace("{{ message.content }}", " {{ message.content }}"), ""),
        (CHATML + "{% if messages | length > 1 %}{{ raise_exception('one!') }}{% endif %}", ""),
    ],
    ids=[
        "none",
        "channel",
        "recipient",
        "closed thought",
        "opened answer",
        "text",
        "plain",
        "blank",
        "refuses answers",
    ],
)
def test_the_mark_before_an_answer_is_added(source: str, mark: str) -> None:
    prompt, text = completed(source)
    assert text == prompt + mark


@pytest.mark.parametrize(("source", "variables"), [(ALWAYS, {}), (AT_WILL, {"enable_thinking": True})])
def test_a_prompt_within_a_thought_is_refused(source: str, variables: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="begins every answer with a thought") as caught:
        completed(source, **variables)
    assert caught.value.param == "model"


def test_a_format_may_say_that_every_answer_begins_within_a_thought() -> None:
    opening = AnswerOpening(TemplateOnly(CHATML), FORMATS["deepseek_r1"], NO_THOUGHT)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="begins every answer with a thought"):
        opening.complete("<|user|>Is it so?<|end|><|assistant|>")
    assert opening.complete("<|assistant|><think></think>") == "<|assistant|><think></think>"
