"""Which dialect a chat template speaks, by real Jinja templates in each family's manner."""

from __future__ import annotations

from typing import Any

import pytest

from rootgraft.api.structured.tool_formats import dialect_of
from rootgraft.engine.text.chat_template import ChatTemplates

_TOOLS = "{% if tools %}[{% for tool in tools %}{{ tool | tojson }}{% endfor %}]{% endif %}"
_CALLS = "{% for call in message.tool_calls or [] %}{% set f = call.function %}"
_REST = "{% endfor %}{{ message.content }}{% endfor %}"
_LOOP = _TOOLS + "{% for message in messages %}" + _CALLS

TEMPLATES = {
    "hermes": _LOOP
    + '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
    + _REST,
    "hermes with the name last": _LOOP
    + '<tool_call>\n{ "arguments": {{ f.arguments | tojson }}, "name": "{{ f.name }}"}\n</tool_call>'
    + _REST,
    "llama3_json": _LOOP + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}' + _REST,
    "mistral": _LOOP
    + '{% if call.id | length != 9 %}{{ raise_exception("ids!") }}{% endif %}'
    + '[TOOL_CALLS] [{{ (f | tojson)[:-1] }}, "id": "{{ call.id }}"}]'
    + _REST,
    "mistral's later form": _LOOP + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}" + _REST,
    "python": _LOOP + "[{{ f.name }}(probe=1)]" + _REST,
    "definitions alone": _TOOLS + "{% for message in messages %}{{ message.content }}{% endfor %}",
    "no tools": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "refuses tools": "{% if tools %}{{ raise_exception('none!') }}{% endif %}x",
    "refuses calls": _LOOP + "{{ raise_exception('none!') }}" + _REST,
}


class TemplateOnly:
    """As much of a tokenizer as a dialect is found out by."""

    def __init__(self, source: str) -> None:
        self._templates = ChatTemplates({"default": source}, {})

    def render_chat(self, messages: Any, **options: Any) -> str:
        return self._templates.render(messages, **options)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_dialect_of_a_template(name: str) -> None:
    dialect = dialect_of(TemplateOnly(TEMPLATES[name]), "auto")  # type: ignore[arg-type]
    family = name.partition(" ")[0]
    expected = family if family in ("hermes", "llama3_json", "mistral") else "generic"
    assert (dialect.format.name, dialect.by_template) == (expected, expected != "generic")


def test_an_option_chooses() -> None:
    for name, by_template in (("hermes", True), ("python", True), ("no tools", False)):
        for asked in ("hermes", "llama3_json", "mistral"):
            dialect = dialect_of(TemplateOnly(TEMPLATES[name]), asked)  # type: ignore[arg-type]
            assert (dialect.format.name, dialect.by_template) == (asked, by_template)
        dialect = dialect_of(TemplateOnly(TEMPLATES[name]), "generic")  # type: ignore[arg-type]
        assert (dialect.format.name, dialect.by_template) == ("generic", False)
