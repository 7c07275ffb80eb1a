"""Chat templates, against transformers, on short templates with the idioms of the families."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from rootgraft.engine.errors import ModelError, RequestError
from rootgraft.engine.text.chat_template import MAX_TEXT, ChatTemplates

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

LLAMA3 = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " + date_string|default("26 Jul 2024") + "\\n\\n" }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("Only single tool-calls!") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

QWEN = """{%- macro render(content) %}
    {%- if content is string %}{{- content }}{%- else %}
        {%- for item in content %}{%- if item.type == 'text' %}{{- item.text }}{%- endif %}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + render(message.content) + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + (render(message.content) if message.content else '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful AI assistant<|im_end|>\\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)

MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}{{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}{{- "}}" }}
            {%- endfor %}{{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" and message["content"] is not none %}
        {% generation %}{{- " " + message["content"]|trim + eos_token }}{% endgeneration %}
    {%- elif message["role"] == "tool" %}{% continue %}
    {%- endif %}
{%- endfor %}
"""

TEMPLATES = {"llama3": LLAMA3, "qwen": QWEN, "smollm2": SMOLLM2, "gemma": GEMMA, "mistral": MISTRAL}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": "Wie wird's <morgen> & 'so'?",
            "parameters": {"type": "object", "properties": {"Größe": {"type": "string"}}, "required": ["Größe"]},
        },
    }
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "wetter", "arguments": {"Größe": "<ü>"}}}],
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi 'there' & <you> 🎉"}],
    [
        {"role": "user", "content": "  Hi \n"},
        {"role": "assistant", "content": " Yes? "},
        {"role": "user", "content": ""},
    ],
    [{"role": "system", "content": " Be short. "}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "Hi"}, CALL, {"role": "tool", "content": "sunny"}, {"role": "tool", "content": "wet"}],
    [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}],
]


def theirs(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    [text], _ = render_jinja_template([messages], chat_template=source, **SPECIAL, **options)
    return str(text)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [False, True])
def test_equals_transformers(
    name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool
) -> None:
    ours = ChatTemplates({"default": TEMPLATES[name]}, SPECIAL)
    kwargs = {"enable_thinking": False, "date_string": "1 Jan"}
    try:
        expected = theirs(TEMPLATES[name], messages, tools=tools, add_generation_prompt=prompt, **kwargs)
    except Exception:  # the template does not take these messages: then we must say so in our own way
        with pytest.raises(RequestError, match="chat template"):
            ours.render(messages, add_generation_prompt=prompt, tools=tools, kwargs=kwargs)
    else:
        assert ours.render(messages, add_generation_prompt=prompt, tools=tools, kwargs=kwargs) == expected


THINK = (  # drops what an earlier answer thought, as Qwen 3 and DeepSeek R1 do
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + content }}{% endfor %}"
)
CONTINUED = ["The answer is", "The answer is\n", "  lead and trail  ", "\n", "", "a</s>b", "x\u3000", "5 < 6 & ü"]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", CONTINUED)
def test_continued_message(name: str, content: str) -> None:
    ours = ChatTemplates({"default": TEMPLATES[name]}, SPECIAL)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    expected = theirs(TEMPLATES[name], messages, continue_final_message=True)
    assert ours.render(messages, add_generation_prompt=False, continue_final_message=True) == expected
    assert messages[1]["content"] == content


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_white_space_that_the_template_trims_is_not_continued(name: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The sum is \n"}]
    text = ChatTemplates({"default": TEMPLATES[name]}, SPECIAL).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text.endswith("\nThe sum is")


@pytest.mark.parametrize(
    "template", [THINK, "{{ messages[0]['content'] | upper }}", "{{ messages[0].content | tojson }}"]
)
@pytest.mark.parametrize("content", ["so it is", "<think>\nhm\n</think>\n\nso it is ", 'he said "x', "IT IS"])
def test_what_transformers_refuses_to_continue(template: str, content: str) -> None:
    """The template drops or changes a part of the message: whatever follows would not continue what was sent."""
    messages = [{"role": "assistant", "content": content}]
    try:
        expected = theirs(template, messages, continue_final_message=True)
    except ValueError:
        expected = None
    ours = ChatTemplates({"default": template}, SPECIAL)
    try:
        text = ours.render(messages, add_generation_prompt=False, continue_final_message=True)
    except RequestError as error:
        assert error.param == "messages" and "cannot be continued" in str(error)
        text = None
    assert text == expected


def test_continued_message_of_parts() -> None:
    ours = ChatTemplates({"default": QWEN}, SPECIAL)
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    text = ours.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<|im_start|>assistant\nab" == theirs(QWEN, messages, continue_final_message=True)


def test_a_continued_message_beside_deep_arguments() -> None:
    deep: list[Any] = []
    for _ in range(900):
        deep = [deep]
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": deep}}}
    messages = [{"role": "assistant", "content": "so it is", "tool_calls": [call]}]
    ours = ChatTemplates({"default": "{{ messages[0].content }}"}, SPECIAL)
    assert ours.render(messages, add_generation_prompt=False, continue_final_message=True) == "so it is"


@pytest.mark.parametrize(
    ("messages", "template", "message"),
    [
        ([], QWEN, "needs a message to continue"),
        ([{"role": "assistant", "content": None}], QWEN, "last message with text"),
        ([{"role": "assistant", "content": "x"}], "{{ messages[0].role }}", "cannot be continued"),
    ],
)
def test_messages_that_cannot_be_continued(messages: list[Any], template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplates({"default": template}, {}).render(
            messages, add_generation_prompt=False, continue_final_message=True
        )


def test_contradiction() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        ChatTemplates({"default": "x"}, {}).render([], add_generation_prompt=True, continue_final_message=True)


def test_no_template() -> None:
    templates = ChatTemplates({}, {})
    assert not templates
    with pytest.raises(RequestError, match="has no chat template"):
        templates.render([{"role": "user", "content": "x"}])


def render(source: str, **kwargs: Any) -> str:
    return ChatTemplates({"default": source}, SPECIAL).render([{"role": "user", "content": "x"}], kwargs=kwargs)


def test_what_templates_can_use() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{{ v | tojson }}", v={"ü": "<&>", "n": None}) == json.dumps(
        {"ü": "<&>", "n": None}, ensure_ascii=False
    )
    assert render("{{ documents is none }} {{ tools is none }} {{ undefined_name is defined }}") == "True True False"
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"
    assert render("{% generation %}{% set x = 1 %}a{% endgeneration %}{{ x is defined }}") == "aFalse"
    assert render("{{ bos_token }}", bos_token="<other>") == "<other>"
    assert render("{{ messages | length }}", messages=[]) == "1"  # the request's own cannot be replaced


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ nothing.attribute }}",
        "{{ messages.clear() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ namespace() | tojson }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_failing_templates_become_request_errors(source: str) -> None:
    with pytest.raises(RequestError, match=r"The chat template (refuses|fails on) the messages") as caught:
        render(source)
    assert len(str(caught.value)) <= 501
    assert caught.value.param == "messages"


def test_size_is_bounded() -> None:
    with pytest.raises(RequestError, match=f"more than {MAX_TEXT} characters"):
        render("{% for i in range(1000) %}{% for j in range(1000) %}{{ 'a' * 100000 }}{% endfor %}{% endfor %}")


def test_invalid_template_stops_the_start() -> None:
    with pytest.raises(ModelError, match=r"not valid Jinja: .*line 2"):
        ChatTemplates({"default": "x\n{% if %}"}, {})


def test_tools_as_text_for_templates_that_name_functions() -> None:
    """FireFunction 2's: tools and the day are texts, which the template adds to others."""
    source = "{{ 'Functions: ' + functions + ' on ' + datetime }}{% for m in messages %}{{ m.content }}{% endfor %}"
    templates = ChatTemplates({"default": source}, SPECIAL)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = [{"role": "user", "content": "Hi."}]
    text = templates.render(asked, tools=[tool])
    written, _, rest = text.removeprefix("Functions: ").partition(" on ")
    assert json.loads(written) == [tool["function"]] and rest.endswith("Hi.")
    assert templates.render(asked).startswith("Functions: [] on ")
    assert templates.render(asked, kwargs={"functions": "none", "datetime": "Monday"}) == (
        "Functions: none on MondayHi."
    )


def test_what_filters_yield_is_a_list_in_json() -> None:
    source = "{{ tools | map(attribute='function') | tojson }}"
    tool = {"type": "function", "function": {"name": "f"}}
    text = ChatTemplates({"default": source}, SPECIAL).render([{"role": "user", "content": "Hi."}], tools=[tool])
    assert json.loads(text) == [{"name": "f"}]
