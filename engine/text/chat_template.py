"""Chat templates: renders messages to the model's prompt text with Jinja in a sandbox.

Templates get the same variables and functions as in transformers: ``messages``, ``tools``, ``documents``,
``add_generation_prompt``, the special tokens by name, ``raise_exception``, ``strftime_now``, ``tojson`` without
escapes, ``break`` and ``continue``, and the ``generation`` tag, which only matters in training. A template that uses
the variable ``functions``, such as FireFunction 2's template, gets the tools as text in ``functions`` and the date in
``datetime``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import lru_cache
from threading import local
from typing import Any, TypeVar

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes

from ...grammar.sized_cache import sized_cache
from ..errors import ModelError, RequestError
from ..sandbox.program_pool import POOL, TEMPLATE_SECONDS, ProgramFailed, ProgramRefused, ProgramStopped
from .template_environment import UNITS, ChatEnvironment, TemplateDeferred, changes_lists, counted_work

MAX_TEXT = 1 << 24  # Limit on the characters of a rendered prompt. It exceeds every model's context length.
MOST_SOURCE = 1 << 20
"""Limit on the characters of a template's source."""
_JOB = "engine.text.chat_template:render_job"
_FUNCTIONS = "functions"
_MARK = "<<CONTINUE-HERE>> "  # The trailing space shows whether the template strips white space from the message.

Message = Mapping[str, Any]

_PROBE = "A message to look for."
_ASKED: Message = {"role": "user", "content": "Hi."}
_CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "probe0000", "type": "function", "function": {"name": "probe", "arguments": {}}}],
}


T = TypeVar("T")


class TemplateStopped(RequestError):
    """Raised if the rendering of a chat template was stopped, because it exceeded a limit on time or memory."""


class _Thread(local):
    """Thread-local flag: whether renders in this thread may wait for another process."""

    may_wait = True


_thread = _Thread()


@contextmanager
def no_waiting() -> Iterator[None]:
    """Context manager: renders in this thread raise TemplateDeferred instead of waiting for a process.

    For event loops.
    """
    _thread.may_wait = False
    try:
        yield
    finally:
        _thread.may_wait = True


async def rendered(call: Callable[[], T], *, at_once: bool) -> T:
    """Await the result of a call that renders.

    With ``at_once``, try the event loop's thread first, within the work budget.
    """
    if at_once:
        try:
            with no_waiting():
                return call()
        except TemplateDeferred:
            pass
    return await POOL.off_loop(call)


class ChatTemplates:
    """A model's chat templates.

    A template is a program, so its work is counted (``template_environment``). A render that exceeds the budget of work
    is repeated in a process that can be killed. If a template exceeded the budget on a short conversation, all later
    renders of the template run in such a process.

    Args:
        sources: Jinja templates by name: ``default`` and, optionally, ``tool_use`` for requests with tools.
        special: special tokens by role, which are variables of the templates.

    Attributes:
        named_roles: roles with which a template compares a message's role, for example "system".

    Raises:
        ModelError: a template is not valid Jinja.
    """

    def __init__(self, sources: Mapping[str, str], special: Mapping[str, str]) -> None:
        environment = ChatEnvironment()
        self._special = dict(special)
        self._default = sources.get("default")
        self._sources = tuple(sources.values())
        self._by_name = dict(sources)
        self._heavy: set[str] = set()
        self._renders_role = lru_cache(maxsize=64)(self._probe_role)
        if (size := max(map(len, self._sources), default=0)) > MOST_SOURCE:
            raise ModelError(f"The chat template has {size:,} characters; the limit is {MOST_SOURCE:,}.")
        try:
            parsed = {name: environment.parse(source) for name, source in sources.items()}
            self.named_roles = frozenset(role for each in parsed.values() for role in _roles_in(each))
            self._functions = frozenset(name for name, each in parsed.items() if _FUNCTIONS in _variables_in(each))
            environment.may_change_lists = self._copies_lists = any(map(changes_lists, parsed.values()))
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except TemplateSyntaxError as error:
            raise ModelError(f"The chat template is not valid Jinja: {error.message}, line {error.lineno}.") from error
        except (SyntaxError, RecursionError, MemoryError, OverflowError, ValueError) as error:
            raise ModelError("The chat template is not valid Jinja: it is nested too deeply, or too large.") from error

    def __bool__(self) -> bool:
        return bool(self._templates)

    @property
    def source(self) -> str | None:
        """The source of the template for requests without tools."""
        return self._default

    def mention(self, text: str) -> bool:
        """Return whether the source of a template contains ``text``."""
        return any(text in source for source in self._sources)

    def renders_role(self, role: str) -> bool:
        """Return whether the template renders messages of this role, under the role's name or in another form."""
        return self._renders_role(role)

    def _probe_role(self, role: str) -> bool:
        probe = {"role": role, "content": _PROBE, "name": "probe", "tool_call_id": "probe0000"}
        for messages in ([probe, _ASKED], [_ASKED, probe], [_ASKED, _CALLED, probe]):
            try:
                text = self.render(messages, add_generation_prompt=False)
            except TemplateStopped:
                raise
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
        """Render the prompt text of a conversation.

        Args:
            messages: messages in Hugging Face's form: ``role``, ``content`` and further fields of the template; the
                arguments of tool calls as objects.
            add_generation_prompt: whether to append the header of the assistant's answer.
            continue_final_message: whether the text ends within the last message, so that the model continues it. As in
                transformers, white space at the end of the message is dropped if the template strips messages.
            tools: functions in OpenAI's form.
            kwargs: further variables of the template; they take precedence over special tokens of the same name.

        Raises:
            RequestError: the model has no template, or the template refuses these messages or fails on them.
            TemplateStopped: rendering takes too long.
            TemplateDeferred: another process has to render, and this thread must not wait for that process
                (``no_waiting``).
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other: set one of them to false.",
                param="continue_final_message",
            )
        name = self._choose(with_tools=bool(tools))
        shown = _marked(messages) if continue_final_message else messages
        variables = {
            **self._special,
            **(_as_functions(tools or ()) if name in self._functions else {}),
            "tools": list(tools) if tools else None,
            "documents": None,
            **(kwargs or {}),
            "messages": [_without_nulls(message) for message in shown],
            "add_generation_prompt": add_generation_prompt,
        }
        if self._copies_lists:
            variables = copy.deepcopy(variables)
        text = self._render(name, variables)
        return _cut_at_mark(text, messages[-1]) if continue_final_message else text

    def _render(self, name: str, variables: dict[str, Any]) -> str:
        if name not in self._heavy:
            try:
                with counted_work():
                    return _rendered(self._templates[name], variables)
            except TemplateDeferred:
                if not _is_longer(variables, UNITS // 16):
                    self._heavy.add(name)
        if not _thread.may_wait:
            raise TemplateDeferred
        try:
            arguments = {"source": self._by_name[name], "variables": variables}
            return POOL.run(_JOB, TEMPLATE_SECONDS, arguments).decode("utf-8", "surrogatepass")
        except ProgramFailed as error:
            raise _refusal(str(error)) from None
        except ProgramStopped as error:
            raise TemplateStopped(f"The chat template {error} on the messages.", param="messages") from None
        except ProgramRefused as error:
            raise _refusal(f"The chat template {error}") from None
        except (TypeError, ValueError) as error:
            raise _refusal(f"The chat template is given values that are not JSON: {error}") from error

    def _choose(self, *, with_tools: bool) -> str:
        name = "tool_use" if with_tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise RequestError(
                "The model has no chat template: send a prompt to /v1/completions, or start with --chat-template.",
                param="messages",
            )
        return name


def render_job(arguments: Any, _data: bytes) -> bytes:
    """Render the template ``source`` with ``variables`` in a worker process. Returns UTF-8."""
    return _rendered(_compiled(arguments["source"]), arguments["variables"]).encode("utf-8", "surrogatepass")


# A compiled template takes about twenty times the memory of its source.
@sized_cache(64 << 20, lambda _, source: 20 * len(source))
def _compiled(source: str) -> Template:
    environment = ChatEnvironment()
    environment.may_change_lists = changes_lists(environment.parse(source))
    return environment.from_string(source)


def _rendered(template: Template, variables: dict[str, Any]) -> str:
    """Render a template. Raises RequestError, and within ``counted_work`` also TemplateDeferred."""
    try:
        return _bounded(template.generate(variables))
    except (RequestError, TemplateDeferred, MemoryError):
        raise
    except TemplateError as error:
        raise _refusal(f"The chat template refuses the messages: {error.message}") from error
    except Exception as error:  # A template is a program and may raise any exception.
        raise _refusal(f"The chat template fails on the messages: {error}") from error


def _is_longer(value: Any, size: int) -> bool:
    """Return whether the strings of a JSON value have more than ``size`` characters in total."""
    todo, left = [value], size
    while todo and left >= 0:
        each = todo.pop()
        left -= len(each) if isinstance(each, str) else 1
        todo += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
    return left < 0


def _roles_in(template: nodes.Template) -> Iterator[str]:
    """Yield the strings with which a template compares a message's role."""
    for compare in template.find_all(nodes.Compare):
        sides = [compare.expr, *(operand.expr for operand in compare.ops)]
        if any(_is_role(side) for side in sides):
            for side in sides:
                constants = [side] if isinstance(side, nodes.Const) else side.find_all(nodes.Const)
                yield from (each.value for each in constants if isinstance(each.value, str) and each.value != "role")


def _variables_in(template: nodes.Template) -> set[str]:
    return {each.name for each in template.find_all(nodes.Name)}


def _as_functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the variables of templates from before ``tools`` existed: ``functions`` as text, and the date."""
    functions = [tool.get("function", tool) for tool in tools]
    return {_FUNCTIONS: json.dumps(functions, indent=4, ensure_ascii=False), "datetime": f"{date.today()}"}


def _is_role(side: nodes.Node) -> bool:
    match side:
        case nodes.Name(name="role") | nodes.Getattr(attr="role") | nodes.Getitem(arg=nodes.Const(value="role")):
            return True
    return False


def _without_nulls(message: Message) -> dict[str, Any]:
    """Return the message without null values, as in transformers. Templates would print "None" for them or fail."""
    return {key: value for key, value in message.items() if value is not None}


def _refusal(text: str) -> RequestError:
    return RequestError(text[:500].rstrip(".") + ".", param="messages")


def _bounded(pieces: Any) -> str:
    """Join the pieces of a text. Raises RequestError as soon as the text exceeds ``MAX_TEXT`` characters."""
    collected, size = [], 0
    for piece in pieces:
        collected.append(piece)
        size += len(piece)
        if size > MAX_TEXT:
            raise RequestError(f"The chat template makes more than {MAX_TEXT} characters of the messages.")
    return "".join(collected)


def _marked(messages: Sequence[Message]) -> list[Message]:
    """Return a copy of the messages with ``_MARK`` after the text of the last message."""
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
    """Return the rendered text before ``_MARK``.

    Raises RequestError if the last message's text is not complete in it.
    """
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
