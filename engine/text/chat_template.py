"""Chat templates: renders messages to the model's prompt text with Jinja in a sandbox.

Templates have the environment of Hugging Face's: ``messages``, ``tools``, ``documents``, ``add_generation_prompt``, the
special tokens by name, ``raise_exception``, ``strftime_now``, ``tojson`` without escapes, ``break`` and ``continue``,
and the ``generation`` tag, which matters in training alone.
"""

from __future__ import annotations

import copy
import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import ModelError, RequestError

MAX_TEXT = 1 << 24  # characters; more than any model's context
_MARK = "<<CONTINUE-HERE>> "  # its space tells whether the template trims the message

Message = Mapping[str, Any]

_PROBE = "A message to look for."
_ASKED: Message = {"role": "user", "content": "Hi."}
_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": {}}}],
}


class ChatTemplates:
    """A model's chat templates.

    Args:
        sources: Jinja templates by name: ``default`` and, optionally, ``tool_use`` for requests with tools.
        special: special tokens by role, variables of the templates.

    Attributes:
        named_roles: roles that the templates compare a message's role with.

    Raises:
        ModelError: a template is not valid Jinja.
    """

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str]) -> None:
        environment = _environment()
        self._special = dict(special)
        self._default = sources.get("default")
        self._sources = tuple(sources.values())
        self._renders_role = lru_cache(maxsize=64)(self._probe_role)
        try:
            self.named_roles = frozenset(
                role for source in self._sources for role in _roles_in(environment.parse(source))
            )
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateSyntaxError as error:
            raise ModelError(f"The chat template is not valid Jinja: {error.message}, line {error.lineno}.") from error

    def __bool__(self) -> bool:
        return bool(self._templates)

    @property
    def source(self) -> str | None:
        """The source of the template for requests without tools."""
        return self._default

    def mention(self, text: str) -> bool:
        """Whether a template's source holds a text."""
        return any(text in source for source in self._sources)

    def renders_role(self, role: str) -> bool:
        """Whether messages of this role are in the text, under its name or in a form of their own."""
        return self._renders_role(role)

    def _probe_role(self, role: str) -> bool:
        probe = {"role": role, "content": _PROBE, "name": "probe", "tool_call_id": "probe0000"}
        for messages in ([probe, _ASKED], [_ASKED, probe], [_ASKED, _CALLED, probe]):
            try:
                text = self.render(messages, add_generation_prompt=False)
            except RequestError:
                continue
            others = text.replace(_PROBE, "").replace(_ASKED["content"], "").replace("probe", "")
            if _PROBE in text and (role in self.named_roles or role in others):
                return True
        return False

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: in Hugging Face's form: ``role``, ``content`` and further fields of the template; the arguments of
                tool calls as objects.
            add_generation_prompt: end with the header of the answer.
            continue_final_message: end inside the last message, so that the model continues it. As in transformers,
                white space at its end is dropped where the template trims messages.
            tools: functions in OpenAI's form.
            kwargs: further variables of the template, before special tokens of the same name.

        Raises:
            RequestError: no template, or the template refuses these messages or fails on them.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other: set one of them to false.",
                param="continue_final_message",
            )
        template = self._choose(with_tools=bool(tools))
        shown = _marked(messages) if continue_final_message else messages
        variables = {
            **self._special,
            "tools": list(tools) if tools else None,
            "documents": None,
            **(kwargs or {}),
            "messages": [_without_nulls(message) for message in shown],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _bounded(template.generate(variables))
        except RequestError:
            raise
        except TemplateError as error:
            raise _refusal(f"The chat template refuses the messages: {error.message}") from error
        except Exception as error:  # a template is a program and may raise anything
            raise _refusal(f"The chat template fails on the messages: {error}") from error
        return _cut_at_mark(text, messages[-1]) if continue_final_message else text

    def _choose(self, *, with_tools: bool) -> Any:
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                "The model has no chat template: send a prompt to /v1/completions, or start with --chat-template.",
                param="messages",
            )
        return self._templates[name]


def _roles_in(template: nodes.Template) -> Iterator[str]:
    """Yield the texts that a template compares a role with."""
    for compare in template.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(_is_role(side) for side in sides):
            for side in sides:
                constants = [side] if isinstance(side, nodes.Const) else side.find_all(nodes.Const)
                yield from (each.value for each in constants if isinstance(each.value, str) and each.value != "role")


def _is_role(side: nodes.Node) -> bool:
    match side:
        case nodes.Name(name="role") | nodes.Getattr(attr="role") | nodes.Getitem(arg=nodes.Const(value="role")):
            return True
    return False


def _without_nulls(message: Message) -> dict[str, Any]:
    """Return the message without null values, as transformers does: templates print None or fail on it."""
    return {key: value for key, value in message.items() if value is not None}


def _refusal(text: str) -> RequestError:
    return RequestError(text[:500].rstrip(".") + ".", param="messages")


def _bounded(pieces: Any) -> str:
    """Join the pieces. Raises RequestError as soon as they exceed ``MAX_TEXT``."""
    collected, size = [], 0
    for piece in pieces:
        collected.append(piece)
        size += len(piece)
        if size > MAX_TEXT:
            raise RequestError(f"The chat template makes more than {MAX_TEXT} characters of the messages.")
    return "".join(collected)


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Return a copy of the messages with a mark at the end of the last one's text."""
    if not messages:
        raise RequestError("continue_final_message needs a message to continue.", param="messages")
    last = dict(messages[-1])
    content = last["content"] = copy.deepcopy(last.get("content"))
    if isinstance(content, str):
        last["content"] = content + _MARK
    elif texts := _text_parts(content):
        texts[-1]["text"] += _MARK
    else:
        raise RequestError("continue_final_message needs a last message with text.", param="messages")
    return [*messages[:-1], last]


def _text_parts(content: Any) -> list[Any]:
    return [part for part in content if "text" in part] if isinstance(content, list) else []


def _cut_at_mark(text: str, last: Message) -> str:
    """Return the text before the mark. Raises RequestError if not all of the last message's text is in it."""
    content = last["content"]
    continued = content if isinstance(content, str) else _text_parts(content)[-1]["text"]
    at = text.rfind(_MARK.rstrip())
    if at < 0 or continued.strip() not in text:
        raise RequestError(
            "The chat template drops the last message's text or changes it, so it cannot be continued.",
            param="messages",
        )
    before = text[:at]
    return before if text.startswith(_MARK, at) else before.rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Parse to the body, in a scope of its own as in transformers."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)
