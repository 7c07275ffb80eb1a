"""Reasoning formats with real tokenizers and templates in Qwen3's and DeepSeek's form: marks, earlier turns."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_tokenizers import train_byte_level, write_folder
from tokenizers import AddedToken

from rootgraft.api.structured.reasoning_parser import ReasoningParser
from rootgraft.api.structured.thought_plan import plan_thought
from rootgraft.engine.messages import Done, TokenOut
from rootgraft.engine.serving.output_processor import OutputProcessor
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.text.reasoning_formats import FORMATS, ReasoningFormat, reasoning_format_of
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.types import FinishReason, SamplingParams, Usage

# Keeps thoughts since the last question, may close the thought of the answer at once.
QWEN_FORM = """\
{%- set last = namespace(at=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- set content = message.content or '' %}{% set thought = message.reasoning_content or '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}{% set content = content.split('</think>')[-1] %}
{%- endif %}
{%- if loop.index0 > last.at and thought %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
{{- content.lstrip('\\n') }}
{%- else %}{{- message.content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
# Drops all earlier thoughts, begins the thought of the answer.
DEEPSEEK_FORM = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '[A]' + message.content.split('</think>')[-1] + '<|im_end|>' }}
{%- else %}{{- '[U]' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[A]<think>\\n' }}{% endif %}"""
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def tokenizer(folder: Path, template: str, *, special: bool) -> Tokenizer:
    """A tokenizer in which the marks are tokens, special ones or not."""
    trained = train_byte_level()
    trained.add_tokens([AddedToken("<think>", special=special), AddedToken("</think>", special=special)])
    write_folder(folder, trained.to_str(), eos_token="<|im_end|>", chat_template=template)
    return Tokenizer.load(folder)


@pytest.mark.parametrize(("template", "found"), [(QWEN_FORM, "qwen3"), (DEEPSEEK_FORM, "qwen3"), (PLAIN, None)])
def test_auto_reads_the_marks_off_the_template(tmp_path: Path, template: str, found: str | None) -> None:
    form = reasoning_format_of(tokenizer(tmp_path, template, special=False), "auto")
    assert form == (None if found is None else FORMATS[found])


def test_each_format_is_found_by_its_end_mark(tmp_path: Path) -> None:
    for name, form in FORMATS.items():
        made = tokenizer(tmp_path / name, f"{PLAIN}{{# {form.mention} #}}", special=False)
        found = reasoning_format_of(made, "auto")
        assert found is not None and (found.start, found.end) == (form.start, form.end)
        assert reasoning_format_of(made, name) is form and reasoning_format_of(made, "none") is None


@pytest.mark.parametrize(
    ("template", "kwargs", "is_open"),
    [
        (QWEN_FORM, {}, False),
        (QWEN_FORM, {"enable_thinking": True}, False),
        (QWEN_FORM, {"enable_thinking": False}, None),
        (DEEPSEEK_FORM, {}, True),
    ],
)
def test_the_prompt_says_where_the_thought_stands(
    tmp_path: Path, template: str, kwargs: dict[str, Any], is_open: bool | None
) -> None:
    made = tokenizer(tmp_path, template, special=False)
    user = {"role": "user", "content": "What does <think> mean?"}
    text = made.render_chat([user], kwargs=kwargs)
    plan = plan_thought(FORMATS["qwen3"], text, continued=None, output_format=None, shown=True)
    assert (None if plan is None else plan.is_open) == is_open
    old = plan_thought(FORMATS["deepseek_r1"], "a prompt", continued=None, output_format=None, shown=True)
    assert old is not None and old.is_open


def test_earlier_thoughts_are_kept_or_dropped_as_the_template_says(tmp_path: Path) -> None:
    """Since the last question, as in calls of tools, Qwen3's form keeps them; DeepSeek's keeps none."""
    said = {"role": "assistant", "content": "b", "reasoning_content": "why", "reasoning": "why"}
    user = {"role": "user", "content": "a"}
    qwen = tokenizer(tmp_path / "q", QWEN_FORM, special=False)
    assert "why" not in qwen.render_chat([user, said, user])
    assert "<think>\nwhy\n</think>\n\nb" in qwen.render_chat([user, said, {"role": "tool", "content": "c"}])
    inline = {"role": "assistant", "content": "<think>why</think>\n\nb"}
    assert "why" not in qwen.render_chat([user, inline, user])
    deepseek = tokenizer(tmp_path / "d", DEEPSEEK_FORM, special=False)
    assert deepseek.render_chat([user, inline, user]) == "[U]a[A]\n\nb<|im_end|>[U]a[A]<think>\n"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("cut", [1, 3, 100])
def test_marks_that_are_special_tokens_are_seen(tmp_path: Path, special: bool, cut: int) -> None:
    """Special tokens have no text for the client; those of the marks have, and are taken out by the parser."""
    made = tokenizer(tmp_path, QWEN_FORM, special=special)
    plan = plan_thought(FORMATS["qwen3"], "", continued=None, output_format=None, shown=True)
    assert plan is not None
    thought = "Größe <|im_start|>naïve 😀"
    tokens = made.encode(f"<think>\n{thought}\n</think>\n\nYes <|im_start|> 日本", False)
    shown = frozenset(made.encode(mark, False)[0] for mark in ("<think>", "</think>")) & made.special_ids
    assert bool(shown) is special
    request = TextRequest(array("i", [1]), SamplingParams(), shown_tokens=shown)
    processor = OutputProcessor(made, request, None)
    parser = ReasoningParser(plan, made.token_bytes)
    messages: list[Any] = [TokenOut(1, tuple(tokens[at : at + cut])) for at in range(0, len(tokens), cut)]
    messages.append(Done(1, FinishReason.STOP, Usage(1, 0, len(tokens))))
    deltas = [parser.parse(delta) for message in messages if (delta := processor.push(message)) is not None]
    assert "".join(delta.reasoning for delta in deltas) == thought.replace("<|im_start|>", "")
    assert "".join(delta.text for delta in deltas) == "Yes  日本"
    end = tokens.index(made.encode("</think>", False)[0])
    finish = deltas[-1].finish
    assert finish is not None and finish.usage.reasoning == end - 1


def test_a_prompt_that_ends_with_the_opening_of_the_text_has_ended_the_thought() -> None:
    """Kimi K3's prompt without a thought ends so, and has no mark of a thought at all."""
    kimi = ReasoningFormat("probed", "<|open|>think<|sep|>", "<|close|>think<|sep|>", lead="<|open|>response<|sep|>")
    turn = '<|open|>message role="assistant"<|sep|>'
    assert kimi.is_open_at(turn) is False
    assert kimi.is_open_at(turn + kimi.start) is True
    for end in (kimi.lead, f"{kimi.start}{kimi.end}", f"{kimi.start}{kimi.end}{kimi.lead}\n"):
        assert kimi.is_open_at(turn + end) is None
    harmony = FORMATS["openai_gptoss"]
    assert harmony.is_open_at("<|end|><|start|>assistant") is False
    assert harmony.is_open_at("<|start|>assistant" + harmony.lead) is None
