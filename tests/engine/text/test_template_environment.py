"""Work of chat templates: counted in the calling thread, and ended in another process."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from benchmarks.hostile_programs import LOOPS
from rootgraft.engine.errors import ModelError, RequestError
from rootgraft.engine.sandbox.program_pool import POOL
from rootgraft.engine.text import chat_template
from rootgraft.engine.text.chat_template import ChatTemplates, TemplateStopped, no_waiting
from rootgraft.engine.text.template_environment import UNITS, TemplateDeferred

MESSAGES = [{"role": "user", "content": "Hello, who are you?"}]


def templates(source: str) -> ChatTemplates:
    return ChatTemplates({"default": source}, {})


def here(source: str, messages: list[dict[str, Any]] = MESSAGES) -> str:
    with no_waiting():
        return templates(source).render(messages)


def repeated(step: str, levels: int) -> str:
    return "".join(step for _ in range(levels))


DOUBLING = {
    "joined": lambda n: "{% set x = 'ab' %}" + repeated("{% set x = x ~ x %}", n) + "{{ x }}",
    "added": lambda n: "{% set x = 'ab' %}" + repeated("{% set x = x + x %}", n) + "{{ x }}",
    "in a namespace": lambda n: (
        f"{{% set ns = namespace(x='a') %}}{{% for i in range({n}) %}}{{% set ns.x = ns.x + ns.x %}}{{% endfor %}}"
        "{{ ns.x }}"
    ),
    "blocks": lambda n: "{% set x = 'ab' %}" + repeated("{% set x %}{{ x }}{{ x }}{% endset %}", n) + "{{ x }}",
    "lists": lambda n: "{% set x = ['ab'] %}" + repeated("{% set x = [x, x] %}", n) + "{{ x }}",
    "appended lists": lambda n: (
        "{% set x = ['ab'] %}"
        + repeated("{% set y = [] %}{% set _ = y.append(x) %}{% set _ = y.append(x) %}{% set x = y %}", n)
        + "{{ x }}"
    ),
    "compared lists": lambda n: (
        "{% set x = ['ab'] %}{% set y = ['ab'] %}"
        + repeated("{% set x = [x, x] %}{% set y = [y, y] %}", n)
        + "{{ x == y }}"
    ),
    "JSON": lambda n: "{% set x = ['ab'] %}" + repeated("{% set x = [x, x] %}", n) + "{{ x|tojson }}",
    "JSON in JSON": lambda n: "{% set x = '\"' %}" + repeated("{% set x = x|tojson %}", n) + "{{ x }}",
    "hashes": lambda n: "{% set x = ('ab',) %}" + repeated("{% set x = (x, x) %}", n) + "{{ {x: 1}|length }}",
    "macros": lambda n: (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}" + f"{{{{ m({n}) }}}}"
    ),
    "replaced": lambda n: "{% set x = 'a' %}" + repeated("{% set x = x.replace('a', 'aa') %}", n) + "{{ x }}",
    "filtered": lambda n: "{% set x = 'a' %}" + repeated("{% set x = x|replace('a', 'aa') %}", n) + "{{ x }}",
    "loops": lambda n: (
        repeated("{% for a in [1, 2] %}", min(n, 15))
        + "x"
        + repeated("{% endfor %}", min(n, 15))
        + "{{ 2 ** (9 * n) }}"
    ),
}


@pytest.mark.parametrize("make", DOUBLING.values(), ids=DOUBLING)
def test_what_doubles_is_rendered_here_only_while_it_is_small(make: Any) -> None:
    with pytest.raises(TemplateDeferred):
        here(make(32))


@pytest.mark.parametrize("name", [name for name in DOUBLING if name != "loops"])
def test_few_levels_are_rendered_here(name: str) -> None:
    assert here(DOUBLING[name](4)) is not None


ENDLESS = {
    "a list that grows while it is read": "{% set x = [1] %}{% for i in x %}{% set _ = x.append(i) %}{% endfor %}",
    "loops": f"{LOOPS}hi",
    "a long text": "{{ ('a' * (4000000000 + messages|length))|length }}",
    "a large number": "{{ 7 ** (9999999 + messages|length) }}",
    "lipsum": "{{ lipsum(n=100000) }}",
    "replace": "{{ ('a' * 1000).replace('a', 'b' * 1000000) }}",
    "format": "{{ '%0999999999d' % 3 }}",
    "zfill": "{{ 'a'.zfill(4000000000) }}",
    "center": "{{ 'a'|center(4000000000) }}",
    "lists": DOUBLING["lists"](40),
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_what_does_not_end_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "TEMPLATE_SECONDS", 0.3)
    with pytest.raises(TemplateDeferred):
        here(source)
    with pytest.raises(
        RequestError, match=r"The chat template (takes longer than 0.3 s|needs more than 512 MiB)"
    ) as stopped:
        templates(source).render(MESSAGES)
    assert stopped.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ 'a' * 4000000000 }}", "{{ 7 ** 9999999 }}", "{{ ('a' * 4000000000)|length }}"])
def test_constants_are_not_computed_when_a_template_is_read(source: str) -> None:
    assert templates(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
        "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
        "{% for a in b %}" * 30 + "{% endfor %}" * 30,
        "a" * ((1 << 20) + 1),
    ],
    ids=["parentheses", "ifs", "loops", "long"],
)
def test_a_template_that_cannot_be_compiled_is_refused(source: str) -> None:
    with pytest.raises(ModelError, match="The chat template"):
        templates(source)


def test_a_heavy_template_goes_on_in_another_process() -> None:
    source = "{% for i in range(60000) %}{% if loop.last %}{{ messages[0].content }}{{ i }}{% endif %}{% endfor %}"
    heavy = templates(source)
    for _ in range(2):
        assert heavy.render(MESSAGES) == "Hello, who are you?59999"
        with no_waiting(), pytest.raises(TemplateDeferred):
            heavy.render(MESSAGES)


def test_a_long_text_makes_no_template_heavy() -> None:
    light = templates("{% for m in messages %}{{ m.content + m.content }}{% endfor %}")
    long = "a" * UNITS
    assert light.render([{"role": "user", "content": long}]) == 2 * long
    with no_waiting():
        assert light.render(MESSAGES) == 2 * MESSAGES[0]["content"]


def test_what_a_template_refuses_is_said_in_its_words_from_another_process_too() -> None:
    source = "{% for i in range(90000) %}{% endfor %}{{ raise_exception('no, ' + messages[0].role) }}"
    with pytest.raises(RequestError, match=r"^The chat template refuses the messages: no, user\.$"):
        templates(source).render(MESSAGES)


@pytest.mark.parametrize("content", ["\ud800", "é€😀\x00", 10**30, 1.5, [{"type": "text", "text": "x"}]])
def test_another_process_gets_the_values_that_were_given(content: Any) -> None:
    source = "{{ messages[0].content|tojson }}{{ messages[0].content is string }}"
    messages = [{"role": "user", "content": content}]
    assert templates("{{ lipsum is string }}" * 0 + source).render(messages) == templates(
        "{% if lipsum(n=1) %}{% endif %}" + source
    ).render(messages)


async def test_others_go_on_while_a_template_is_being_ended() -> None:
    """Not by the time it takes: the event loop runs a thousand passes before the render is over."""
    source = templates(ENDLESS["loops"])
    started, passes = threading.Event(), 0

    def render() -> None:
        started.set()
        with pytest.raises(TemplateStopped):
            source.render(MESSAGES)

    rendering = asyncio.ensure_future(POOL.off_loop(render))
    while not started.is_set() or passes < 1_000:
        await asyncio.sleep(0)
        passes += 1
    assert not rendering.done()
    await rendering


QUEUE = (
    "{% set queue = namespace(ids=[]) %}{% for m in messages %}{% for id in m.ids or [] %}"
    "{% set _ = queue.ids.append(id) %}{% endfor %}{% if queue.ids %}<{{ queue.ids.pop(0) }}>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("length", [1, UNITS])
def test_a_list_may_be_a_queue(length: int) -> None:
    """Kimi K2's template keeps the ids of calls in one; here, and in the other process of long conversations."""
    messages = [{"role": "user", "content": "a" * length, "ids": ["a", "b", "c"]}, *MESSAGES, *MESSAGES, *MESSAGES]
    source = QUEUE if length == 1 else QUEUE + "{{ messages[0].content | length }}{{ messages | tojson | length }}"
    assert templates(source).render(messages).startswith("<a><b><c>")


def test_a_template_changes_only_its_own_lists() -> None:
    given = [{"role": "user", "content": "a", "calls": [1, 2]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"required": ["a"]}}}]
    source = (
        "{% set _ = messages[0].calls.append(3) %}{% set _ = tools[0].function.parameters.required.pop() %}"
        "{% set _ = messages.append(1) %}{{ messages | length }}{{ messages[0].calls }}"
        "{{ tools[0].function.parameters }}"
    )
    for _ in range(2):
        assert templates(source).render(given, tools=tools) == "2[1, 2, 3]{'required': []}"
    assert given[0]["calls"] == [1, 2] and tools[0]["function"]["parameters"] == {"required": ["a"]}  # type: ignore[index]


@pytest.mark.parametrize(
    "change", ["messages[0]['app' ~ 'end']", "(messages|attr('append'))", "messages.clear", "messages[0].update"]
)
def test_other_changes_are_refused(change: str) -> None:
    with pytest.raises(RequestError, match=r"refuses|fails"):
        templates(f"{{% set _ = {change}(1) %}}").render(MESSAGES)
