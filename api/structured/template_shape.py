"""Template shape: the conversation shapes that a chat template accepts, and the conversion of other conversations.

Templates refuse, drop or move messages that their authors did not expect: a second system message, a system message
after a user message, or roles that do not alternate. Each case is tested once with a short conversation. A conversation
that the template accepts is never changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from ...engine.errors import RequestError
from ...engine.text.chat_template import TemplateStopped

if TYPE_CHECKING:
    from ...engine.text.tokenizer import Tokenizer

Message = dict[str, Any]

_INSTRUCTIONS = ("system", "developer")
_TEXTS = {
    "S": "Probe of instructions.",
    "T": "Probe of more instructions.",
    "U": "Probe of a question.",
    "V": "Probe of another question.",
    "W": "Probe of a last question.",
    "A": "Probe of an answer.",
    "B": "Probe of another answer.",
    "R": "Probe of a result.",
    "Q": "Probe of another result.",
    "D": "Probe of words before a call.",
}
_ROLES = {"U": "user", "V": "user", "W": "user", "A": "assistant", "B": "assistant"}
_CALLS = "CcDP"
_CALL_IDS = {"R": "probe0000", "Q": "probe0001"}
PROBE_VALUES = (1918273, 1918274)
"""Arguments of the calls in short conversations. They occur nowhere else, so they show that a call is rendered."""
_EMPTY_PARTS = [{"type": "text", "text": ""}]
_BETWEEN = "\n\n"
# Key that no template reads. It marks a message that was made from instructions.
_SAID = "said"


@dataclass(frozen=True, slots=True)
class TemplateShape:
    """The conversation shapes that a chat template accepts unchanged. An attribute is true if its case is accepted.

    Attributes:
        system: instructions before the conversation.
        several_systems: more than one message of instructions before the conversation.
        late_systems: instructions after the first user message, at their place.
        without_user: a conversation without a user message.
        repeated_users: two user messages in a row.
        repeated_assistants: two messages of the assistant in a row.
        assistant_first: a conversation that begins with the assistant.
        user_after_results: a user message directly after results of calls.
        calls_without_content: calls in a message without the key ``content``. If not accepted, the message gets an
            empty text.
        calls_beside_text: calls and a text in one message. If not accepted, because the template leaves out one of the
            two, the text becomes a message of its own before the calls.
        parallel_calls: several calls in one message. If not accepted, each call becomes a message of its own, with its
            results behind it.
        texts: texts as strings. If not accepted, texts are lists of parts, as templates of models with images require.
        empty_texts: an empty string as the content of an answer. If not accepted, an empty answer is a list with an
            empty part.
    """

    system: bool = True
    several_systems: bool = True
    late_systems: bool = True
    without_user: bool = True
    repeated_users: bool = True
    repeated_assistants: bool = True
    assistant_first: bool = True
    user_after_results: bool = True
    calls_without_content: bool = True
    calls_beside_text: bool = True
    parallel_calls: bool = True
    texts: bool = True
    empty_texts: bool = True


ANY_SHAPE = TemplateShape()


class _Probe:
    """Renders short conversations that are written as letters of ``_TEXTS``.

    ``C`` is a call, ``c`` is a call without content, ``D`` is a call beside a text, and ``P`` are two calls. ``e`` and
    ``E`` are empty answers, as a string and as a part.

    Args:
        arguments_as_text: whether the arguments of calls are JSON text.
        in_parts: whether texts are lists of parts.
        needs_tools: whether conversations are rendered with tools only, because the template refuses those without.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]],
        *,
        arguments_as_text: bool,
        in_parts: bool = False,
        needs_tools: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self.in_parts = in_parts
        self._needs_tools = needs_tools
        self._tools = tools
        self._arguments_as_text = arguments_as_text
        self._bos = "" if tokenizer.bos_id is None else tokenizer.decode([tokenizer.bos_id], False)

    def takes(self, *conversations: str, roles: Mapping[str, str] | None = None) -> bool:
        """Return whether the template renders the texts of each conversation in their order, and its calls.

        Args:
            roles: roles of the instructions ``S`` and ``T``; by default ``system``.
        """
        return all(self._takes(letters, roles or {}) for letters in conversations)

    def num_begun(self, letters: str) -> int:
        """Return how often the token that begins a text is in the prompt of a conversation."""
        text = self._rendered([self._message(letter, {}) for letter in letters], self._tools or None)
        return text.count(self._bos) if self._bos else 0

    def _takes(self, letters: str, roles: Mapping[str, str]) -> bool:
        messages = [self._message(letter, roles) for letter in letters]
        needs_tools = self._needs_tools or any(letter in _CALLS for letter in letters)
        shown: list[Sequence[Mapping[str, Any]] | None] = [] if needs_tools else [None]
        if self._tools or needs_tools:
            shown.append(self._tools or None)
        return all(self._shows(messages, tools) for tools in shown)

    def _rendered(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        """Render a conversation. Returns "" if the template refuses it."""
        try:
            shown = _in_parts(messages) if self.in_parts else messages
            return self._tokenizer.render_chat(shown, add_generation_prompt=True, tools=tools)
        except TemplateStopped:
            raise
        except RequestError:
            return ""

    def _shows(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> bool:
        text = self._rendered(messages, tools)
        at = 0
        for message in messages:
            content = message.get("content")
            content = content if isinstance(content, str) else ""
            at = text.find(content, at)
            if at < 0:
                return False
            at += len(content)
        return all(
            str(value) in text
            for message in messages
            for value, _ in zip(PROBE_VALUES, message.get("tool_calls", ()), strict=False)
        )

    def _call(self, number: int) -> Message:
        arguments = {"probe": PROBE_VALUES[number]}
        function = {"name": "probe_tool", "arguments": json.dumps(arguments) if self._arguments_as_text else arguments}
        return {"id": _CALL_IDS["RQ"[number]], "type": "function", "function": function}

    def _message(self, letter: str, roles: Mapping[str, str]) -> Message:
        if letter in _CALLS:
            calls = [self._call(number) for number in range(2 if letter == "P" else 1)]
            content = {} if letter == "c" else {"content": _TEXTS.get(letter, "")}
            return {"role": "assistant", **content, "tool_calls": calls}
        if letter in _CALL_IDS:
            call_id = _CALL_IDS[letter]
            return {"role": "tool", "tool_call_id": call_id, "name": "probe_tool", "content": _TEXTS[letter]}
        if letter in "eE":
            return {"role": "assistant", "content": _EMPTY_PARTS if letter == "E" else ""}
        return {"role": _ROLES.get(letter) or roles.get(letter, "system"), "content": _TEXTS[letter]}


def shape_of(
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    *,
    shows_calls: bool = False,
    arguments_as_text: bool = False,
) -> TemplateShape:
    """Detect the shapes that a chat template accepts, by rendering some twenty short conversations.

    Args:
        tools: tool definitions to render with the conversations; empty for a template that renders no tools.
        shows_calls: whether the template renders calls.
        arguments_as_text: whether the template requires the arguments of calls as JSON text.
    """
    forms = ((in_parts, needs_tools) for needs_tools in (False, bool(tools)) for in_parts in (False, True))
    probes = (
        _Probe(tokenizer, tools, arguments_as_text=arguments_as_text, in_parts=in_parts, needs_tools=needs_tools)
        for in_parts, needs_tools in forms
    )
    probe = next((each for each in probes if each.takes("U")), None)
    if probe is None:
        return ANY_SHAPE
    known = ["system"]
    if "developer" in tokenizer.named_roles and tokenizer.renders_role("developer"):
        known.append("developer")
    one = [{"S": role, "T": role} for role in known]
    two = [{"S": first, "T": second} for first, second in product(known, repeat=2)]
    has_calls = shows_calls and probe.takes("UCR")
    system = all(probe.takes("SU", roles=roles) for roles in one)
    user_after_results = not has_calls or probe.takes("UCRV") or not probe.takes("UCRAV")
    # Some templates write all their own instructions again before each message of instructions.
    begins_again = probe.num_begun("STU") - probe.num_begun("SU") > probe.num_begun("UAV") - probe.num_begun("UA")
    return TemplateShape(
        system=system,
        several_systems=system and not begins_again and all(probe.takes("STU", roles=roles) for roles in two),
        late_systems=system
        and not begins_again
        and all(probe.takes("UT", "UATV", "SUATV", roles=roles) for roles in two),
        without_user=probe.takes("A") and (not system or all(probe.takes("S", roles=roles) for roles in one)),
        repeated_users=probe.takes("UV", "UAVW"),
        repeated_assistants=probe.takes("UABV"),
        assistant_first=probe.takes("AU"),
        user_after_results=user_after_results,
        calls_without_content=not has_calls or probe.takes("UcR"),
        calls_beside_text=not has_calls or probe.takes("UDRBV") or not probe.takes("UACRBV"),
        parallel_calls=not has_calls or probe.takes("UPRQBV") or not probe.takes("UCRCRBV"),
        texts=not probe.in_parts,
        empty_texts=user_after_results or probe.takes("UCReV") or not probe.takes("UCREV"),
    )


def takes_results(tokenizer: Tokenizer, *, arguments_as_text: bool) -> bool:
    """Return whether a chat template renders a call and its result without definitions of tools."""
    return _Probe(tokenizer, [], arguments_as_text=arguments_as_text).takes("UCR")


def as_taken(messages: Sequence[Message], shape: TemplateShape) -> list[Message]:
    """Convert the messages to a shape that the template accepts.

    Instructions before the conversation are joined. Later instructions become marked text in the adjacent user turn, so
    that the KV of the messages before them stays valid. Consecutive turns of one role are joined, and missing turns are
    added as empty ones.
    """
    if shape == ANY_SHAPE:
        return list(messages)
    taken = _alternating(_instructed(_with_content(messages, shape), shape), shape)
    taken = [part for message in taken for part in _beside_text(message, shape)]
    taken = taken if shape.parallel_calls else _one_call_each(taken)
    return taken if shape.texts else _in_parts(taken)


def _end_of_results(messages: Sequence[Message], begin: int) -> int:
    return next((n for n in range(begin, len(messages)) if messages[n]["role"] != "tool"), len(messages))


def _beside_text(message: Message, shape: TemplateShape) -> list[Message]:
    """Return a message with calls and a text as two messages, if the template requires it."""
    if shape.calls_beside_text or not message.get("tool_calls") or not message.get("content"):
        return [message]
    said = {key: value for key, value in message.items() if key != "tool_calls"}
    return [said, {"role": message["role"], "content": "", "tool_calls": message["tool_calls"]}]


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with one call each. The results of a call follow it; others follow the last call."""
    single: list[Message] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            single.append(message)
            continue
        end = _end_of_results(messages, at)
        results = list(messages[at:end])
        at = end
        for number, call in enumerate(calls):
            single.append(
                {**(message if number == 0 else {"role": message["role"], "content": ""}), "tool_calls": [call]}
            )
            is_last = number == len(calls) - 1
            own = [each for each in results if is_last or each.get("tool_call_id") == call.get("id")]
            results = [each for each in results if each not in own]
            single += own
    return single


def _in_parts(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with each text as a list of one part."""
    return [
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content := message.get("content"), str) and content
        else message
        for message in messages
    ]


def _with_content(messages: Sequence[Message], shape: TemplateShape) -> Sequence[Message]:
    if shape.calls_without_content:
        return messages
    return [message if "content" in message else {**message, "content": ""} for message in messages]


def _instructed(messages: Sequence[Message], shape: TemplateShape) -> list[Message]:
    """Convert instructions that the template does not accept to user turns, which are marked with ``_SAID``."""
    number = _num_leading(messages)
    leading = list(messages[:number])
    if leading and not shape.system:
        leading = [{"role": "user", "content": _joined(each["content"] for each in leading), _SAID: True}]
    elif len(leading) > 1 and not shape.several_systems:
        leading = [{**leading[0], "content": _joined(each["content"] for each in leading)}]
    rest = messages[number:]
    if not shape.late_systems:
        rest = [_said(message) if message["role"] in _INSTRUCTIONS else message for message in rest]
    return [*leading, *rest]


def _said(message: Message) -> Message:
    return {"role": "user", "content": f"<system>\n{message['content']}\n</system>", _SAID: True}


def _alternating(messages: Sequence[Message], shape: TemplateShape) -> list[Message]:
    """Convert the messages to alternating turns, as far as the template requires it.

    A message that was made from instructions (marked with ``_SAID``) is joined to the user turn before it, or else to
    the turn after it.
    """
    joined = {
        role for role, may in (("user", shape.repeated_users), ("assistant", shape.repeated_assistants)) if not may
    }
    turns: list[list[Message]] = []
    for message in _begun(messages, shape):
        last, role = turns[-1] if turns else [], message["role"]
        before = last[-1]["role"] if last else None
        if before == role and (role in joined or _SAID in message or all(_SAID in each for each in last)):
            last.append(message)
            continue
        if role == "user" and before == "tool" and not shape.user_after_results:
            turns.append([{"role": "assistant", "content": "" if shape.empty_texts else _EMPTY_PARTS}])
        turns.append([message])
    return list(map(_one_turn, turns))


def _begun(messages: Sequence[Message], shape: TemplateShape) -> list[Message]:
    """Insert an empty user turn after the instructions, if the template requires one."""
    number = _num_leading(messages)
    is_begun_by_assistant = number < len(messages) and messages[number]["role"] == "assistant"
    has_user = any(message["role"] == "user" for message in messages)
    if (has_user or shape.without_user) and (shape.assistant_first or not is_begun_by_assistant):
        return list(messages)
    return [*messages[:number], {"role": "user", "content": ""}, *messages[number:]]


def _num_leading(messages: Sequence[Message]) -> int:
    """Return the number of messages with instructions before the conversation."""
    return next((n for n, each in enumerate(messages) if each["role"] not in _INSTRUCTIONS), len(messages))


def _one_turn(messages: Sequence[Message]) -> Message:
    """Join messages of one role to a single message, with their texts, their reasoning and all their calls."""
    turn = {key: value for message in messages for key, value in message.items() if key != _SAID}
    if len(messages) == 1:
        return turn
    for key in ("content", "reasoning_content", "reasoning", "thinking"):
        if key in turn:
            turn[key] = _joined(message.get(key) for message in messages)
    if "tool_calls" in turn:
        turn["tool_calls"] = [call for message in messages for call in message.get("tool_calls", ())]
    return turn


def _joined(texts: Iterable[str | None]) -> str:
    return _BETWEEN.join(text for text in texts if text)
