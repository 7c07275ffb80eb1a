"""Chat templates of our own that write tool calls as each model family's templates do, and as short as can be."""

from __future__ import annotations

from typing import Any

from rootgraft.engine.text.chat_template import ChatTemplates


class TemplateOnly:
    """As much of a tokenizer as formats of tools and thoughts are found out by."""

    bos_id: int | None = None
    eos_ids = (0,)

    def __init__(self, source: str, end: str = "</s>") -> None:
        self.templates = ChatTemplates({"default": source}, {})
        self.named_roles = self.templates.named_roles
        self._end = end

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert ids == [0] and not skip_special_tokens
        return self._end

    def render_chat(self, messages: Any, **options: Any) -> str:
        return self.templates.render(messages, **options)

    def renders_role(self, role: str) -> bool:
        return self.templates.renders_role(role)

    def template_mentions(self, text: str) -> bool:
        return self.templates.mention(text)


_TOOLS = "{% if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}"
_LOOP = _TOOLS + "{% for message in messages %}"
_CALLS = "{% for call in message.tool_calls or [] %}{% set f = call.function %}"
_REST = "{% endfor %}{{ message.content }}{% endfor %}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_KEYWORDS = (
    "{{ f.name }}({% for name, value in f.arguments | items %}{{ name }}={{ value | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
)
_TEXT = "{{ value if value is string else value | tojson }}"
_LITERAL = "'True' if value is true else 'False' if value is false else value | tojson"
_TYPE = (
    "{{ 'boolean' if value is boolean else 'number' if value is number else 'string' if value is string "
    "else 'object' if value is mapping else 'array' }}"
)


def _unless_last(text: str) -> str:
    return f"{{{{ {text!r} if not loop.last else '' }}}}"


def _each(call: str, between: str = "\n") -> str:
    """Return a template in which each call stands alone."""
    return f"{_LOOP}{_CALLS}{call}{_unless_last(between)}{_REST}"


def _together(opening: str, call: str, closing: str, separator: str = "") -> str:
    """Return a template in which all calls of a message stand between an opening and a closing."""
    between = _unless_last(separator)
    begin, end = (
        f"{{% if message.tool_calls %}}{opening}{{% endif %}}",
        f"{{% if message.tool_calls %}}{closing}{{% endif %}}",
    )
    return f"{_LOOP}{begin}{_CALLS}{call}{between}{{% endfor %}}{end}{{{{ message.content }}}}{{% endfor %}}"


def _dsml(calls: str, blank: str = "") -> str:
    """Return a template as `_together` does, with DeepSeek's marks: ``string`` says which values are no JSON."""
    mark = f"｜DSML｜{blank}"
    parameters = (
        "{% for name, value in f.arguments | items %}{{ '\n' if not loop.first else '' }}"
        f"<{mark}parameter name=\"{{{{ name }}}}\" string=\"{{{{ 'true' if value is string else 'false' }}}}\">"
        f"{_TEXT}</{mark}parameter>{{% endfor %}}"
    )
    call = f'<{mark}invoke name="{{{{ f.name }}}}">\n{parameters}{{{{ "\\n" }}}}</{mark}invoke>\n'
    return _together(f"<{mark}{calls}>\n", call, f"</{mark}{calls}>")


_COMMA = "{{ ',' if not loop.last else '' }}"
_GEMMA = "".join(
    (
        '{% macro value(each) %}{% if each is string %}<|"|>{{ each }}<|"|>',
        "{% elif each is boolean %}{{ 'true' if each else 'false' }}",
        "{% elif each is mapping %}{{ '{' }}{% for k, v in each | dictsort %}{{ k }}:{{ value(v) }}",
        _COMMA,
        "{% endfor %}{{ '}' }}{% elif each is sequence %}[{% for v in each %}{{ value(v) }}",
        _COMMA,
        "{% endfor %}]{% else %}{{ each }}{% endif %}{% endmacro %}",
    )
)


def _parameters(body: str) -> str:
    return "{% for name, value in f.arguments | items %}" + body + "{% endfor %}"


TEMPLATES = {
    "mistral_nemo": _together("[TOOL_CALLS][", '{{ (f | tojson)[:-1] }}, "id": "{{ call.id }}"}', "]", ", "),
    "mistral": _together("[TOOL_CALLS] [", '{{ (f | tojson)[:-1] }}, "id": "{{ call.id }}"}', "]", ", "),
    "mistral_args": _each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}", ""),
    "mistral_call_id": _each("[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}", ""),
    "hermes": _each(f"<tool_call>\n{_OBJECT}\n</tool_call>"),
    "llama3_json": _each('{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'),
    "qwen3_coder": _each(
        "<tool_call>\n<function={{ f.name }}>\n"
        + _parameters(f"<parameter={{{{ name }}}}>\n{_TEXT}\n</parameter>\n")
        + "</function>\n</tool_call>"
    ),
    "seed_oss": _each(
        "<seed:tool_call>\n<function={{ f.name }}>\n"
        + _parameters(f"<parameter={{{{ name }}}}>{_TEXT}</parameter>\n")
        + "</function>\n</seed:tool_call>"
    ),
    "functionary": _each("<function={{ f.name }}>{{ f.arguments | tojson }}</function>", ""),
    "functionary_v32": _each("{{ '>>>' + f.name + '\n' + f.arguments }}", ""),
    "glm45": _each(
        "<tool_call>{{ f.name }}\n"
        + _parameters(f"<arg_key>{{{{ name }}}}</arg_key>\n<arg_value>{_TEXT}</arg_value>\n")
        + "</tool_call>"
    ),
    "glm47": _each(
        "<tool_call>{{ f.name }}"
        + _parameters(f"<arg_key>{{{{ name }}}}</arg_key><arg_value>{_TEXT}</arg_value>")
        + "</tool_call>",
        "",
    ),
    "minimax_m2": _together(
        "<minimax:tool_call>\n",
        '<invoke name="{{ f.name }}">\n'
        + _parameters(f'<parameter name="{{{{ name }}}}">{_TEXT}</parameter>\n')
        + "</invoke>\n",
        "</minimax:tool_call>",
    ),
    "deepseek_v3": _together(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>{{ call.type }}<｜tool▁sep｜>{{ f.name }}\n"
        "```json\n{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "\n",
    ),
    "deepseek_v31": _together(
        "<｜tool▁calls▁begin｜>",
        "{{ '<｜tool▁call▁begin｜>' + f.name + '<｜tool▁sep｜>' + f.arguments + '<｜tool▁call▁end｜>' }}",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "deepseek_v41": _dsml("calls", " "),
    "kimi_k2": _together(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    ),
    "kimi_k3": _together(
        "<|close|>response<|sep|><|open|>tools<|sep|>",
        '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
        + _parameters(f'<|open|>argument key="{{{{ name }}}}" type="{_TYPE}"<|sep|>{_TEXT}<|close|>argument<|sep|>')
        + "<|close|>call<|sep|>",
        "<|close|>tools<|sep|>",
    ),
    "muse_glimmer": _each(
        '<|start|>assistant to={{ f.name }}<|message|><atem:function_calls>\n<atem:invoke name="{{ f.name }}">\n'
        + _parameters(f'<atem:parameter name="{{{{ name }}}}">{_TEXT}</atem:parameter>\n')
        + "</atem:invoke>\n</atem:function_calls>",
        "<|eom|>",
    ),
    "command_r": _together(
        "Action:\n```json\n[\n",
        '    {\n        "tool_name": "{{ f.name }}",\n        '
        '"parameters": {{ f.arguments | tojson(indent=4) | indent(8) }}'
        "\n    }",
        "{{ '\n]```' }}",
        ",\n",
    ),
    "openai": _each(
        "<|start|>assistant<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>"
        "{{ f.arguments | tojson }}<|call|>"
    ),
    "gemma4": _GEMMA + _each("<|tool_call>call:{{ f.name }}{{ value(f.arguments) }}<tool_call|>", ""),
    "granite": _together("<|tool_call|>[", _OBJECT, "]", ", "),
    "granite_text": _together("<tool_call>[", _OBJECT, "]", ", "),
    "granite-20b-fc": _each(f"<function_call> {_OBJECT}"),
    "phi4_mini_json": _together("functools[", _OBJECT, "]", ", "),
    "lfm2": _together("<|tool_call_start|>[", _KEYWORDS, "]<|tool_call_end|>", ", "),
    "pythonic": _together("[", _KEYWORDS, "]", ", "),
}
# Templates that describe tools, and leave out calls of earlier turns.
WITHOUT_CALLS = {
    "granite": _LOOP + "{# write <|tool_call|> and a list #}{{ message.content }}{% endfor %}",
    "granite-20b-fc": _LOOP + "{# write <function_call> and an object #}{{ message.content }}{% endfor %}",
    "lfm2": _LOOP + "{# write <|tool_call_start|>[...] #}{{ message.content }}{% endfor %}",
    "phi4_mini_json": _LOOP + "{# write functools[...] #}{{ message.content }}{% endfor %}",
}
OTHERS = {
    "hermes with the name last": _each(
        '<tool_call>\n{ "arguments": {{ f.arguments | tojson }}, "name": "{{ f.name }}"}\n</tool_call>'
    ),
    "hermes beside an example": "{% if tools %}<tool_call>[{}]{% endif %}"
    + _each(f"<tool_call>\n{_OBJECT}\n</tool_call>"),
    "mistral that checks ids": _LOOP
    + _CALLS
    + '{% if call.id | length != 9 %}{{ raise_exception("ids!") }}{% endif %}'
    + '[TOOL_CALLS] [{{ (f | tojson)[:-1] }}, "id": "{{ call.id }}"}]'
    + _REST,
    "deepseek_v3 without definitions": TEMPLATES["deepseek_v3"].removeprefix(_TOOLS),
    "openai with the recipient first": _each(
        "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json"
        "<|message|>{{ f.arguments | tojson }}<|call|>"
    ),
    "python": _each("[{{ f.name }}(probe=1)]"),
    "definitions alone": _TOOLS + "{% for message in messages %}{{ message.content }}{% endfor %}",
    "no tools": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "refuses tools": "{% if tools %}{{ raise_exception('none!') }}{% endif %}x",
    "refuses calls": _LOOP + _CALLS + "{{ raise_exception('none!') }}" + _REST,
}


def _turns(calls: str, *, text: str = "{{ message.content }}", end: str = "<|end|>", thought: str = "") -> str:
    """Return a template of turns in which ``calls`` writes those of a message, beside its text and a thought."""
    return (
        f"{_TOOLS}{{% for message in messages %}}<|{{{{ message.role }}}}|>"
        f"{{% if message.reasoning %}}{thought}{{% endif %}}"
        f"{{% if message.tool_calls %}}{calls}{{% elif message.content %}}{text}{{% endif %}}{end}{{% endfor %}}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def _listed(opening: str, call: str, closing: str, separator: str = "") -> str:
    """Return the part of a template that writes calls between an opening and a closing."""
    loop = "{% for call in message.tool_calls %}{% set f = call.function %}"
    return f"{opening}{loop}{call}{_unless_last(separator)}{{% endfor %}}{closing}"


def kimi_turns(calls: str = "") -> str:
    """Return a template with turns like Kimi K3's: a thought and a text that is closed before ``calls``."""
    said = (
        "<|open|>think<|sep|>{{ message.reasoning or '' }}<|close|>think<|sep|>"
        f"<|open|>response<|sep|>{{{{ message.content or '' }}}}<|close|>response<|sep|>{calls}"
    )
    return (
        f'{_TOOLS}{{% for message in messages %}}<|open|>message role="{{{{ message.role }}}}"<|sep|>'
        f"{{% if message.role == 'assistant' %}}{said}{{% else %}}{{{{ message.content }}}}{{% endif %}}"
        "<|close|>message<|sep|>{% endfor %}"
        '{% if add_generation_prompt %}<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
        "{% if enable_thinking is defined and not enable_thinking %}"
        "<|close|>think<|sep|><|open|>response<|sep|>{% endif %}{% endif %}"
    )


KIMI_CALLS = (
    "{% if message.tool_calls %}"
    + _listed(
        "<|open|>tools<|sep|>",
        '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
        + _parameters(f'<|open|>argument key="{{{{ name }}}}" type="{_TYPE}"<|sep|>{_TEXT}<|close|>argument<|sep|>')
        + "<|close|>call<|sep|>",
        "<|close|>tools<|sep|>",
    )
    + "{% endif %}"
)
# In the manner of models whose formats have no row: Jamba, Nemotron Nano 2, Apertus, MiniMax M1, Command A, Solar Open,
# GigaChat 3, MiniCPM 5, Hunyuan 3.
PROBED = {
    "list over lines": _turns(_listed("<calls>[\n    ", _OBJECT, "\n]</calls>", ",\n    ")),
    "list": _turns(_listed("<TOOLS>[", _OBJECT, "]</TOOLS>", ", ")),
    "name as key": _turns(_listed("<|tools|>[", '{"{{ f.name }}": {{ f.arguments | tojson }}}', "]<|ends|>", ", ")),
    "objects over lines": _turns(_listed("<calls>\n", _OBJECT, "\n</calls>", "\n")),
    "number before the name": _turns(
        _listed(
            "<|ACTION|>[\n",
            '{"call": "{{ loop.index0 }}", "tool": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
            "\n]<|END_ACTION|>",
            ",\n",
        ),
        text="<|TEXT|>{{ message.content }}<|END_TEXT|>",
    ),
    "id before the name": _turns(
        _listed(
            "<|calls|>", "<|call|>{{ call.id }}<|name|>{{ f.name }}<|args|>{{ f.arguments | tojson }}<|call:end|>", ""
        ),
        text="<|content|>{{ message.content }}",
    ),
    "id behind the name": _turns(
        _listed("", "<|call|>{{ f.name }}<|id|>{{ call.id }}<|args|>{{ f.arguments | tojson }}<|call:end|>", "")
    ),
    "id behind the arguments": _turns(
        _listed("<calls>[", _OBJECT[:-1] + ', "id": "{{ call.id }}"}', "]</calls>", ", ")
    ),
    "single": _turns(
        "{% set f = message.tool_calls[0].function %}<|function_call|>" + _OBJECT,
    ),
    "arguments as text": _turns(_listed("", "{{ '<call>' + f.name + ':' + f.arguments + '</call>' }}", "", "\n")),
    "parameters": _turns(
        _listed(
            "",
            '<function name="{{ f.name }}">'
            + _parameters(f'<param name="{{{{ name }}}}">{_TEXT}</param>')
            + "</function>",
            "",
            "\n",
        )
    ),
    "keys and values": _turns(
        _listed(
            "<calls:x>\n",
            "<call:x>{{ f.name }}<sep:x>\n"
            + _parameters(f"<key:x>{{{{ name }}}}</key:x>\n<value:x>{_TEXT}</value:x>\n")
            + "</call:x>\n",
            "</calls:x>",
        )
    ),
}
PROBED |= {
    "keywords over lines": _turns(
        _listed("", f"<|code|>\n{_KEYWORDS.replace('value | tojson', _LITERAL)}\n<|code:end|>", "", "\n")
    ),
    "object between marks": _turns(
        _listed("", '<|act|><|tool|>{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}<|act:end|>', "")
    ),
    "numbers, and no header of an answer": (
        f"{_TOOLS}{{% for message in messages %}}[{{{{ message.role }}}}]{{% if message.tool_calls %}}"
        + _listed(
            "<|ACT|>[",
            '{"id": "{{ loop.index0 }}", "tool": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
            "]<|END_ACT|>",
            ", ",
        )
        + "{% else %}{{ message.content }}{% endif %}{% endfor %}"
    ),
}
# Templates that render tools or calls and have no format of their own, each with the reason.
WITHOUT_FORMAT = {
    "definitions alone": "it renders no call",
    "no tools": "it renders neither tools nor calls",
    "refuses tools": "it refuses a conversation with tools",
    "refuses calls": "it refuses a conversation with calls",
    "arguments before the name": "the grammar of arguments depends on the name",
    "arguments as lines": "values have no mark that ends them",
    "values in elements of their names": "an element of a value is not told from one of a parameter",
    "calls in plain words": "text for the user may begin with the same words",
    "calls in blocks of code": "text for the user may have such a block",
}
OTHERS |= {
    "arguments before the name": _turns(
        _listed("", '<call>{"arguments": {{ f.arguments | tojson }}, "name": "{{ f.name }}"}</call>', "", "\n")
    ),
    "arguments as lines": _turns(
        _listed("", "<call>\nname: {{ f.name }}\n" + _parameters(f"{{{{ name }}}}: {_TEXT}\n") + "</call>", "", "\n")
    ),
    "values in elements of their names": _turns(
        '{% set f = message.tool_calls[0].function %}<tool name="{{ f.name }}">'
        + _parameters(f"<{{{{ name }}}}>{_TEXT}</{{{{ name }}}}>")
        + "</tool>"
    ),
    "calls in blocks of code": _turns(_listed("", f"```json\n{_OBJECT}\n```", "", "\n")),
    "calls in plain words": _turns(_listed("", "Action: {{ f.name }}\nInput: {{ f.arguments | tojson }}\n", "")),
}
# Templates with thoughts, and their start mark, end mark and what is before an answer.
THOUGHTS = {
    _turns("", thought="<mm:think>{{ message.reasoning }}</mm:think>"): ("<mm:think>", "</mm:think>", ""),
    _turns("", thought="<mull>\n{{ message.reasoning }}\n</mull>\n\n"): ("<mull>", "</mull>", ""),
    _turns(
        "",
        text="<|TEXT|>{{ message.content }}<|END_TEXT|>",
        thought="<|THOUGHT|>{{ message.reasoning }}<|END_THOUGHT|>",
    ): ("<|THOUGHT|>", "<|END_THOUGHT|>", "<|TEXT|>"),
    _turns(
        "", text="<|content|>{{ message.content }}", thought="<|think|>{{ message.reasoning }}<|end|><|assistant|>"
    ): ("<|think|>", "<|end|><|assistant|>", "<|content|>"),
    # A turn without a thought has an empty one.
    _turns(
        "", text="{% if not message.reasoning and message.role == 'assistant' %}<think:x></think:x>{% endif %}"
        "{{ message.content }}", thought="<think:x>{{ message.reasoning }}</think:x>"
    ): ("<think:x>", "</think:x>", ""),
}  # fmt: skip
