"""Marks of thoughts that no row has, derived from templates of our own."""

from __future__ import annotations

import pytest
from support.api.tool_templates import PROBED, THOUGHTS, TemplateOnly, kimi_turns

from rootgraft.api.structured.output_format import OutputFormat
from rootgraft.api.structured.reasoning_parser import _TextSplit
from rootgraft.api.structured.thought_plan import plan_thought
from rootgraft.engine.text.reasoning_formats import reasoning_format_of
from rootgraft.grammar.spec import GrammarSpec

JSON = OutputFormat(GrammarSpec.json_schema({"type": "object"}), "response_format", "response_format", None, None)


@pytest.mark.parametrize(("source", "marks"), THOUGHTS.items(), ids=[marks[0] for marks in THOUGHTS.values()])
def test_marks_are_what_the_template_renders(source: str, marks: tuple[str, str, str]) -> None:
    tokenizer = TemplateOnly(source)
    form = reasoning_format_of(tokenizer, "auto")  # type: ignore[arg-type]
    assert form is not None and (form.start, form.end, form.lead) == marks
    assert form.in_messages is ("<|assistant|>" in form.end)
    prompt = tokenizer.render_chat([{"role": "user", "content": "Hi."}], add_generation_prompt=True)
    plan = plan_thought(form, prompt, continued=None, output_format=JSON, shown=True)
    assert plan is not None and not plan.is_open
    # A schema binds after the thought and what stands before the answer, never inside the thought.
    rules = plan.rules(None)
    assert (rules.start, rules.end, rules.lead) == marks
    split = _TextSplit(plan)
    assert split.push(f"{form.start}Why {{}}?{form.end}{form.lead}{{}}") == ("Why {}?", "{}")
    assert plan_thought(form, prompt + form.start, continued=None, output_format=JSON, shown=True).is_open  # type: ignore[union-attr]


def test_a_template_without_thoughts_has_none() -> None:
    for source in (*PROBED.values(), "{% for m in messages %}{{ m.content }}{{ m.reasoning }}{% endfor %}"):
        assert reasoning_format_of(TemplateOnly(source), "auto") is None  # type: ignore[arg-type]


def test_a_prompt_that_has_closed_the_thought_and_opened_the_answer() -> None:
    """Kimi K3's without thoughts: the mark before the answer is there already, and must not be written again."""
    tokenizer = TemplateOnly(kimi_turns(), "<|close|>message<|sep|>")
    form = reasoning_format_of(tokenizer, "auto")  # type: ignore[arg-type]
    assert form is not None and form.lead == "<|open|>response<|sep|>"
    for thinks in (True, False):
        kwargs = {"enable_thinking": thinks}
        prompt = tokenizer.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=True, kwargs=kwargs)
        plan = plan_thought(form, prompt, continued=None, output_format=JSON, shown=True)
        assert (plan is not None and plan.is_open) == thinks
        assert thinks or plan is None
