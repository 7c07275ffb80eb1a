"""What templates cannot say is said in another way, over generated conversations and templates in families' manners."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.api.tool_templates import OTHERS, TEMPLATES, WITHOUT_CALLS, TemplateOnly

from rootgraft.api.protocol.chat import ChatRequest
from rootgraft.api.protocol.chat_messages import for_template
from rootgraft.api.structured.template_shape import ANY_SHAPE, TemplateShape, as_taken, shape_of
from rootgraft.api.structured.tool_dialects import Dialect, dialect_of, for_dialect

_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
)
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
_END = "{% if add_generation_prompt %}[assistant]{% endif %}"


def loop(body: str, head: str = "") -> str:
    return f"{_TOOLS}{head}{{% for m in messages %}}{body}{{% endfor %}}{_END}"


_PLAIN = f"[{{{{ m.role }}}}]{{{{ m.content }}}}{_CALLS}"
_ALTERNATES = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' or (m.role == 'assistant' and not "
    "m.tool_calls) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('Roles must alternate.') }}"
    "{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
)
_LATE = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('System must be first.') }}{% endif %}"
SHAPES = {
    "takes all": (loop(_PLAIN), ANY_SHAPE),
    "one system first (Qwen 3.5)": (
        loop(_LATE + _PLAIN),
        TemplateShape(several_systems=False, late_systems=False),
    ),
    "and a user (Qwen 3.5)": (
        loop(
            _LATE + _PLAIN,
            "{% if not messages | selectattr('role', 'eq', 'user') | list %}{{ raise_exception('No user.') }}"
            "{% endif %}",
        ),
        TemplateShape(several_systems=False, late_systems=False, without_user=False),
    ),
    "drops late systems (gpt-oss)": (
        loop("{% if m.role != 'system' or loop.first %}" + _PLAIN + "{% endif %}"),
        TemplateShape(several_systems=False, late_systems=False),
    ),
    "moves systems to the front": (
        loop(
            "{% if m.role != 'system' %}" + _PLAIN + "{% endif %}",
            "{% for m in messages if m.role == 'system' %}[system]{{ m.content }}{% endfor %}",
        ),
        TemplateShape(late_systems=False),
    ),
    "no system (Gemma)": (
        loop(
            "{% if m.role == 'system' %}{{ raise_exception('System role not supported.') }}{% endif %}" + _PLAIN,
            _ALTERNATES,
        ),
        TemplateShape(False, False, False, False, False, False, False, False),
    ),
    "alternates (Mistral)": (
        loop(_LATE + _PLAIN, _ALTERNATES),
        TemplateShape(True, False, False, False, False, False, False, False),
    ),
    "joins text (DeepSeek)": (
        loop("{{ '[' + m.role + ']' + m.content }}" + _CALLS),
        TemplateShape(calls_without_content=False),
    ),
    "prints None": (
        loop("[{{ m.role }}]{{ m.content if m.content is not none else 'None' }}" + _CALLS),
        ANY_SHAPE,
    ),
    "looks into the text (gpt-oss)": (
        loop("{% if '<|channel|>' in m.content %}x{% endif %}" + _PLAIN),
        ANY_SHAPE,
    ),
    "no tools": (
        loop("[{{ m.role }}]{{ m.content }}").replace(_TOOLS, ""),
        ANY_SHAPE,
    ),
    "alternates without tools (Llama 2)": (
        loop(_LATE + "[{{ m.role }}]{{ m.content }}", _ALTERNATES).replace(_TOOLS, ""),
        TemplateShape(True, False, False, False, False, False, False),
    ),
}


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
FOUND: dict[str, tuple[TemplateOnly, Dialect]] = {}


def found(name: str) -> tuple[TemplateOnly, Dialect]:
    if name not in FOUND:
        tokenizer = TemplateOnly(SHAPES[name][0])
        FOUND[name] = tokenizer, dialect_of(tokenizer, "auto")  # type: ignore[arg-type]
    return FOUND[name]


def rendered(name: str, messages: list[dict[str, Any]], *, with_tools: bool = False) -> str:
    tokenizer, dialect = found(name)
    chat = ChatRequest.model_validate({"messages": messages})
    tools = [TOOL] if with_tools else []
    shown = for_dialect(for_template(chat.messages), tools, dialect)
    return tokenizer.render_chat(shown, tools=tools if dialect.by_template and tools else None)


@pytest.mark.parametrize("name", SHAPES)
def test_each_shape_is_found(name: str) -> None:
    assert found(name)[1].shape == SHAPES[name][1]


@pytest.mark.parametrize("name", [*TEMPLATES, *OTHERS, *WITHOUT_CALLS])
def test_templates_that_take_all_are_given_all_as_it_is(name: str) -> None:
    source = (TEMPLATES | OTHERS | WITHOUT_CALLS)[name]
    shape = dialect_of(TemplateOnly(source), "auto").shape  # type: ignore[arg-type]
    assert shape == ANY_SHAPE or name == "refuses tools" or "ids" in name or not shape.calls_without_content, shape


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A conversation of any roles in any order, with texts that tell their places."""
    messages: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 8))):
        kind = draw(st.sampled_from(("system", "developer", "user", "user", "assistant", "calls", "nothing")))
        text = f"<text {number}>"
        if kind == "calls":
            count = draw(st.integers(1, 3))
            ids = [f"call{number}000{each}" for each in range(count)]
            calls = [{"id": each, "type": "function", "function": {"name": "f", "arguments": "{}"}} for each in ids]
            content = draw(st.sampled_from((None, "", [], text)))
            messages.append({"role": "assistant", "content": content, "tool_calls": calls})
            messages += [{"role": "tool", "tool_call_id": each, "content": f"<result {each}>"} for each in ids]
        elif kind == "nothing":
            messages.append({"role": "assistant", "content": None})
        else:
            messages.append({"role": kind, "content": text})
    return messages


def texts_of(messages: list[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in messages if message["content"]]


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "takes all"])
@given(conversations(), st.booleans())
def test_every_text_is_in_the_prompt_in_its_place(name: str, messages: list[dict[str, Any]], with_tools: bool) -> None:
    for message in messages:
        if message["role"] == "developer":
            message["role"] = "system"
    text = rendered(name, messages, with_tools=with_tools)
    places = [text.find(each) for each in texts_of(messages)]
    assert -1 not in places, text
    assert all(first < second for first, second in pairwise(places)), text
    assert "None" not in text and all(text.count(each) == 1 for each in texts_of(messages)), text


@given(conversations())
def test_what_is_taken_is_left_alone(messages: list[dict[str, Any]]) -> None:
    chat = ChatRequest.model_validate({"messages": messages})
    shown = for_template(chat.messages)
    assert as_taken(shown, ANY_SHAPE) == shown


@pytest.mark.parametrize("name", SHAPES)
@given(conversations(), st.data())
def test_a_late_instruction_changes_nothing_in_front_of_its_turn(
    name: str, messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    """The prefix cache keeps all that is in front of the turn that it joins."""
    messages = [message for message in messages if message["role"] not in ("system", "developer")]
    messages = [{"role": "user", "content": "<first>"}, *messages, {"role": "user", "content": "<last>"}]
    late = {"role": "system", "content": "<late>"}
    number = data.draw(st.integers(1, len(messages)))
    # Results stay beside their calls.
    while number < len(messages) and messages[number]["role"] == "tool":
        number += 1
    before = rendered(name, messages)
    after = rendered(name, [*messages[:number], late, *messages[number:]])
    kept = texts_of(messages[:number])[:-1]
    shared = next((n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before))
    if name != "moves systems to the front":
        assert all(text in before[:shared] for text in kept), (before, after)
    assert "<late>" in after


def test_the_words_of_another_way() -> None:
    strict = TemplateShape(several_systems=False, late_systems=False)
    system, user, late = ({"role": role, "content": role} for role in ("system", "user", "system"))
    answer = {"role": "assistant", "content": "answer"}
    block = "<system>\nsystem\n</system>"
    assert as_taken([system, late, user], strict) == [{"role": "system", "content": "system\n\nsystem"}, user]
    assert as_taken([system, user, late], strict) == [system, {"role": "user", "content": f"user\n\n{block}"}]
    assert as_taken([user, answer, late, user], strict) == [
        user,
        answer,
        {"role": "user", "content": f"{block}\n\nuser"},
    ]
    assert as_taken([user, answer, late], strict) == [user, answer, {"role": "user", "content": block}]
    gemma = TemplateShape(system=False, several_systems=False, late_systems=False)
    assert as_taken([system, user], gemma) == [{"role": "user", "content": "system\n\nuser"}]


def test_long_runs_become_one_turn() -> None:
    shape = SHAPES["no system (Gemma)"][1]
    roles = ("system", "user", "user", "system", "user")
    messages = [{"role": roles[n % 5], "content": f"<{n}>"} for n in range(4096)]
    [turn] = as_taken(messages, shape)
    assert turn.keys() == {"role", "content"} and turn["role"] == "user"
    places = [turn["content"].find(f"<{n}>") for n in range(4096)]
    assert places[0] == 0 and places == sorted(places)


_CALL = "{% for c in m.tool_calls or [] %}<call>{{ c.function.arguments | tojson }}{% endfor %}"
BESIDE = {
    "leaves the text out (Hermes 3)": "[{{ m.role }}]{% if m.tool_calls %}"
    + _CALL
    + "{% else %}{{ m.content }}{% endif %}",
    "leaves the calls out (DeepSeek R1)": "[{{ m.role }}]{% if m.content %}{{ m.content }}{% else %}"
    + _CALL
    + "{% endif %}",
    "writes the text behind the results (Gemma 4)": (
        "[{{ m.role }}]" + _CALL + "{% if m.tool_calls %}{{ messages[loop.index].content }}{{ m.content }}"
        "{% elif m.role != 'tool' %}{{ m.content }}{% endif %}"
    ),
}
ONE = {
    "leaves the second call out (gpt-oss)": (
        "[{{ m.role }}]{{ m.content }}"
        "{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
    ),
    "refuses two calls (Llama 3)": (
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('One call at once!') }}{% endif %}" + "[{{ m.role }}]"
        "{{ m.content }}" + _CALL
    ),
}


def shape_and_text(body: str, messages: list[dict[str, Any]]) -> tuple[TemplateShape, str]:
    tokenizer = TemplateOnly(loop(body))
    shape = shape_of(tokenizer, [TOOL], shows_calls=True)  # type: ignore[arg-type]
    return shape, tokenizer.render_chat(as_taken(messages, shape), tools=[TOOL], add_generation_prompt=False)


def called(*numbers: int, **fields: Any) -> dict[str, Any]:
    calls = [
        {"id": f"id{n}", "type": "function", "function": {"name": "f", "arguments": {"n": f"<argument {n}>"}}}
        for n in numbers
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls, **fields}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"id{number}", "content": f"<result {number}>"}


@pytest.mark.parametrize("name", BESIDE)
def test_a_text_beside_calls_is_a_message_in_front_of_them(name: str) -> None:
    asked = {"role": "user", "content": "<question>"}
    message = called(1, 2, content="<words>", reasoning_content="<thought>")
    shape, text = shape_and_text(BESIDE[name], [asked, message, result(1), result(2)])
    assert not shape.calls_beside_text
    places = [text.find(each) for each in ("<question>", "<words>", "<argument 1>", "<argument 2>")]
    assert -1 not in places and places == sorted(places) and text.count("<words>") == 1
    said, call = as_taken([called(1, content="<words>", reasoning_content="<thought>")], shape)
    assert said == {"role": "assistant", "content": "<words>", "reasoning_content": "<thought>"}
    assert call == called(1)


@pytest.mark.parametrize("name", ONE)
def test_several_calls_are_messages_of_one_call_each(name: str) -> None:
    asked = {"role": "user", "content": "<question>"}
    lost = {"role": "tool", "tool_call_id": "unknown", "content": "<result of nothing>"}
    messages = [asked, called(1, 2, 3, content="<words>"), result(3), lost, result(1), result(2)]
    shape, text = shape_and_text(ONE[name], messages)
    assert shape == replace(ANY_SHAPE, parallel_calls=False)
    expected = [f"<{kind} {n}>" for n in (1, 2, 3) for kind in ("argument", "result")]
    places = [text.find(each) for each in ("<words>", *expected)]
    assert -1 not in places and places == sorted(places)
    assert text.count("<result of nothing>") == text.count("<words>") == 1


def test_a_template_that_refuses_conversations_without_tools_has_a_shape() -> None:
    body = "[{{ m.role }}]{% if m.tool_calls %}" + _CALL + "{% else %}{{ m.content }}{% endif %}"
    tokenizer = TemplateOnly("{% for tool in tools %}{{ tool | tojson }}{% endfor %}" + loop(body).removeprefix(_TOOLS))
    assert shape_of(tokenizer, [TOOL], shows_calls=True) == replace(ANY_SHAPE, calls_beside_text=False)  # type: ignore[arg-type]


class Beginning(TemplateOnly):
    bos_id = 1

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "<s>" if ids == [1] else super().decode(ids, skip_special_tokens)


def test_instructions_are_joined_where_each_would_begin_the_prompt_again() -> None:
    """Apriel 1.6's template writes its own instructions, and the token before them, before each instruction."""
    again = "{% if m.role == 'system' %}<s>Be kind. {% endif %}"
    for body, accepted in ((again + _PLAIN, False), ("<s>" + _PLAIN, True), (_PLAIN, True)):
        shape = shape_of(Beginning(loop(body)), [])  # type: ignore[arg-type]
        assert shape == replace(ANY_SHAPE, several_systems=accepted, late_systems=accepted)


def test_an_empty_answer_is_a_part_where_a_template_refuses_an_empty_text() -> None:
    """Ministral 3's takes no user message after results, and no assistant's message without content."""
    refuses = (
        "{% if m.role == 'assistant' and m.content | length == 0 and not m.tool_calls %}"
        "{{ raise_exception('Assistant message must have content.') }}{% endif %}"
    )
    said = "{{ m.content if m.content is string else m.content[0].text }}"
    tokenizer = TemplateOnly(loop(f"{_LATE}{refuses}[{{{{ m.role }}}}]{said}{_CALL}", _ALTERNATES))
    shape = shape_of(tokenizer, [TOOL], shows_calls=True)  # type: ignore[arg-type]
    assert (shape.user_after_results, shape.empty_texts) == (False, False)
    question, other = ({"role": "user", "content": f"<{n}>"} for n in (1, 2))
    shown = as_taken([question, called(1), result(1), other], shape)
    text = tokenizer.render_chat(shown, tools=[TOOL], add_generation_prompt=False)
    assert "<result 1>[assistant][user]<2>" in text


IN_PARTS = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
)


def test_a_template_of_parts_gets_texts_as_parts() -> None:
    """It renders nothing of a text that is a string, without an error."""
    tokenizer = TemplateOnly(IN_PARTS)
    shape = shape_of(tokenizer, [])  # type: ignore[arg-type]
    assert shape == replace(ANY_SHAPE, texts=False)
    said = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi."}]
    assert "Hi." not in tokenizer.render_chat(said, add_generation_prompt=False)
    text = tokenizer.render_chat(as_taken(said, shape), add_generation_prompt=False)
    assert text == "<|system|>Be.<|end|><|user|>Hi.<|end|>"
    both = "{{ message.content if message.content is string else message.content[0].text }}"
    for source in (both, "{{ message.content }}"):
        loop = f"{{% for message in messages %}}{source}{{% endfor %}}"
        assert shape_of(TemplateOnly(loop), []).texts  # type: ignore[arg-type]
