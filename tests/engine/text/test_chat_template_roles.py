"""Roles that chat templates of the common kinds write, and those that they drop or refuse."""

from __future__ import annotations

import pytest

from rootgraft.engine.text.chat_template import ChatTemplates

CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
LLAMA3 = (
    "{% for message in messages %}{% if message.role == 'tool' or message.role == 'ipython' %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ message.content }}"
    "{% elif message.role in ['system', 'user', 'assistant'] %}<|start_header_id|>{{ message.role }}<|end_header_id|>"
    "\n\n{{ message.content }}{% endif %}{% endfor %}"
)
STRICT = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}"
    "{% for message in messages %}{% set role = message['role'] %}{% if 'developer' == role %}[DEV]"
    "{% elif role == 'user' %}[USER]{% elif role == 'assistant' %}[ANSWER]{% else %}"
    "{{ raise_exception('no such role') }}{% endif %}{{ message['content'] }}{% endfor %}"
)
LOOSE = "{% for m in messages %}{% if m.role == 'user' %}[U]{% else %}[A]{% endif %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "rendered", "dropped", "named"),
    [
        (CHATML, {"user", "function", "ipython", "anything"}, set(), set()),
        (LLAMA3, {"ipython", "tool"}, {"function", "developer"}, {"tool", "ipython", "system", "user", "assistant"}),
        (STRICT, {"developer"}, {"function", "tool", "ipython"}, {"developer", "user", "assistant"}),
        (LOOSE, {"user"}, {"function", "assistant"}, {"user"}),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", set(), {"message", "look", "A", "Hi", "user"}, set()),
        ("{{ 'nothing of the messages' }}", set(), {"user", "function"}, set()),
    ],
)
def test_roles_of_templates(source: str, rendered: set[str], dropped: set[str], named: set[str]) -> None:
    templates = ChatTemplates({"default": source}, {})
    assert {role for role in rendered | dropped if templates.renders_role(role)} == rendered
    assert templates.named_roles == named
