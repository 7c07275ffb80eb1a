"""Tool call formats of model families, as data: marks, the place of the function's name, and the style of arguments.

A call is ``before_name NAME after_name ARGUMENTS after_arguments``. One or several calls are between ``opening`` and
``closing``. The names are those of vLLM's ``--tool-call-parser``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from ...grammar.argument_styles import XmlStyle
from .argument_syntax import write_arguments


class CallIds(Enum):
    """Form of the ids of calls, if the chat template or the model requires a form."""

    ANY = auto()
    SHORT = auto()
    """Nine letters and digits."""
    WRITTEN = auto()
    """Nine letters and digits, which the model writes between the function's name and the arguments."""
    NUMBERED = auto()
    """``functions.NAME:NUMBER``, of which the model writes the number."""
    COUNTED = auto()
    """Any form. The model writes the number of the call, counted from 0, before the function's name."""
    ORDINAL = auto()
    """Like COUNTED, but counted from 1."""
    FREE = auto()
    """Letters, digits, ``_`` and ``-``, which the model writes."""


# Regular expressions for the part of an id that the model writes.
WRITTEN_IDS = {
    CallIds.WRITTEN: "[a-zA-Z0-9]{9}",
    CallIds.NUMBERED: "[0-9]{1,4}",
    CallIds.COUNTED: "[0-9]{1,4}",
    CallIds.ORDINAL: "[1-9][0-9]{0,3}",
    CallIds.FREE: "[a-zA-Z0-9_-]{1,64}",
}
NAME = "{name}"
"""Placeholder for the function's name in the text after the name."""
_OBJECT_HEAD = re.compile(r'\{\s*"name"\s*:\s*"')
_ARGUMENTS_KEYS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Tool call format of a model family.

    Attributes:
        name: unique name of the format.
        trigger: text that opens calls in free text.
        opening: the trigger and all text up to the first call.
        parser: value of ``--tool-call-parser``, if it differs from the name. Several formats may have the same value;
            the template then determines which one is used.
        models: models that write the format, for the documentation.
        rendered: regular expression that finds the test call in a rendered template.
        mentions: texts that identify the format in the source of a template that does not render calls.
        style: style of the arguments: ``json``, a style of `grammar.argument_styles`, or a style derived by a probe.
        before_name: text before the function's name.
        after_name: text between the name (or the number) and the arguments; ``{name}`` in it stands for the name.
        after_arguments: text after the arguments.
        arguments_key: key of the arguments, if a call is a JSON object with the keys ``name`` and this one.
        separator: text between calls after one opening; None if each call has its own opening.
        between: text between two calls, if each call has its own opening.
        closing: text after the last call that belongs to an opening.
        only_at_start: whether calls can only begin the answer; a trigger later in the text then opens no call.
        single: whether an answer has at most one call.
        ids: the form of the ids of calls.
        id_begin: text between the name and the part of the id that the model writes.
        id_lead: text before an id that the model writes before the name. ``before_name`` then follows the id.
        content_opening: text before an answer without calls.
        content_closing: text after such an answer, which is not part of it. Without a ``content_opening``, calls begin
            with this text too, because the prompt or the end of the reasoning has opened the content.
        preamble: marks around text before a call; None for text without marks.
        recipient_mark: mark before each part of an answer; a part begins with its recipient, which is a function or the
            recipient in ``content_opening``. Prompts end with this mark.
    """

    name: str
    trigger: str
    opening: str
    parser: str = ""
    models: str = ""
    rendered: str = r"(?!)"
    mentions: tuple[str, ...] = ()
    style: str | XmlStyle = "json"
    before_name: str = '{"name": "'
    after_name: str = '", "arguments": '
    after_arguments: str = "}"
    arguments_key: str = "arguments"
    separator: str | None = None
    between: str = "\n"
    closing: str = ""
    only_at_start: bool = False
    single: bool = False
    ids: CallIds = CallIds.ANY
    id_begin: str = ""
    id_lead: str = ""
    content_opening: str = ""
    content_closing: str = ""
    preamble: tuple[str, str] | None = None
    recipient_mark: str = ""

    @property
    def option(self) -> str:
        """The value of ``--tool-call-parser`` that selects this format."""
        return self.parser or self.name

    def text_opening(self, prompt: str) -> str:
        """Return the text that must end a prompt if the answer is text for the user and not a call."""
        is_begun = self.recipient_mark and prompt.endswith(self.recipient_mark)
        return self.content_opening if is_begun else ""

    @property
    def closes_content(self) -> bool:
        """Whether calls begin with the end of the content.

        The content was opened by the prompt or the end of the reasoning.
        """
        return bool(self.content_closing) and not self.content_opening

    @property
    def is_object(self) -> bool:
        """Whether a call is a JSON object with a name and arguments, and several calls are a list of such objects."""
        is_listed = self.separator is None or self.opening.rstrip().endswith("[")
        return is_listed and bool(_OBJECT_HEAD.fullmatch(self.before_name)) and self.arguments_key in _ARGUMENTS_KEYS

    def head(self, function: str, number: int = 0) -> str:
        """Return the text of a call up to its arguments. ``number`` is only used by formats that write an id."""
        number += self.ids is CallIds.ORDINAL
        written = f"{number:09}" if self.ids is CallIds.WRITTEN else str(number) if self.ids in WRITTEN_IDS else ""
        after = self.after_name.replace(NAME, function)
        if self.id_lead:
            return f"{self.id_lead}{written}{self.before_name}{function}{after}"
        return f"{self.before_name}{function}{self.id_begin}{written}{after}"

    def call(self, function: str, arguments: str, number: int = 0) -> str:
        """Return the text of a call without opening and closing. ``arguments`` is JSON."""
        return self.head(function, number) + write_arguments(arguments, self.style) + self.after_arguments

    def calls(self, calls: list[tuple[str, str]]) -> str:
        """Return the text of several calls, each given as a function's name and its arguments as JSON."""
        texts = [self.call(name, arguments, number) for number, (name, arguments) in enumerate(calls)]
        if self.separator is not None:
            return self.opening + self.separator.join(texts) + self.closing
        return self.between.join(self.opening + text + self.closing for text in texts)


_HARMONY_CALL = "<|channel|>commentary to=functions."
_DEEPSEEK_CALL, _DEEPSEEK_NAME = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_DEEPSEEK_CALLS, _DEEPSEEK_CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_KIMI_CLOSING = "<|close|>response<|sep|>"
_KIMI_CALLS = f"{_KIMI_CLOSING}<|open|>tools<|sep|>"


def _dsml(name: str, style: str, models: str, calls: str, blank: str = "") -> ToolFormat:
    """Return one of DeepSeek's formats with DSML marks. ``blank`` is the text after the mark in each tag."""
    mark = f"｜DSML｜{blank}"
    return ToolFormat(
        name, f"<{mark}{calls}>", f"<{mark}{calls}>\n", separator="", closing=f"</{mark}{calls}>", style=style,
        before_name=f'<{mark}invoke name="', after_name='">\n', after_arguments=f"</{mark}invoke>\n",
        models=models,
        rendered=rf'<{mark}{calls}>\s*<{mark}invoke name="probe_tool">',
    )  # fmt: skip


# Detection tries the formats in this order.
FORMATS = {
    form.name: form
    for form in (
        ToolFormat(
            "mistral_nemo", "[TOOL_CALLS]", "[TOOL_CALLS][", parser="mistral", separator=", ", closing="]",
            ids=CallIds.SHORT,
            models="Mistral Nemo",
            rendered=r"\[TOOL_CALLS\]\[\{",
        ),
        ToolFormat(
            "mistral", "[TOOL_CALLS]", "[TOOL_CALLS] [", separator=", ", closing="]", ids=CallIds.SHORT,
            models="Mistral 7B v0.3, Mixtral",
            rendered=r"\[TOOL_CALLS\](?!\s*probe_tool)",
        ),
        ToolFormat(
            "mistral_args", "[TOOL_CALLS]", "[TOOL_CALLS]", parser="mistral", ids=CallIds.SHORT,
            before_name="", after_name="[ARGS]", after_arguments="", between="",
            models="Magistral, Devstral, Ministral 3",
            rendered=r"\[TOOL_CALLS\]probe_tool\[ARGS\]\{",
        ),
        ToolFormat(
            "mistral_call_id", "[TOOL_CALLS]", "[TOOL_CALLS]", parser="mistral", ids=CallIds.WRITTEN,
            before_name="", id_begin="[CALL_ID]", after_name="[ARGS]", after_arguments="", between="",
            models="Mistral Small 3.2",
            rendered=r"\[TOOL_CALLS\]probe_tool\[CALL_ID\]\w+\[ARGS\]\{",
        ),
        ToolFormat(
            "hermes", "<tool_call>", "<tool_call>\n", closing="\n</tool_call>",
            models="Qwen 2.5, Qwen 3, Hermes 2 and 3, Granite 4, SmolLM 3, MiMo-VL, Reka Edge",
            rendered=r"<tool_call>\s*\{[^<]*probe_tool",
            mentions=("within <tool_call> </tool_call> tags", "within <tool_call></tool_call> XML tags"),
        ),
        ToolFormat(
            "llama3_json", '{"name": "', "", only_at_start=True, single=True,
            after_name='", "parameters": ', arguments_key="parameters",
            models="Llama 3.1, 3.2, 3.3",
            rendered=r'\{"name": ?"probe_tool", ?"parameters": ?\{',
        ),
        ToolFormat(
            "qwen3_coder", "<tool_call>", "<tool_call>\n", closing="\n</tool_call>", style="qwen_xml",
            before_name="<function=", after_name=">\n", after_arguments="</function>",
            models="Qwen3-Coder, Qwen 3.5, Nemotron 3 Nano, Step 3.5",
            rendered=r"<tool_call>\s*<function=probe_tool>\s*<parameter=probe>\s*1\s*</parameter>",
        ),
        ToolFormat(
            "seed_oss", "<seed:tool_call>", "<seed:tool_call>\n", closing="\n</seed:tool_call>", style="seed_xml",
            before_name="<function=", after_name=">\n", after_arguments="</function>",
            models="Seed-OSS",
            rendered=r"<seed:tool_call>\s*<function=probe_tool>\s*<parameter=probe>1</parameter>",
        ),
        ToolFormat(
            "functionary", "<function=", "", style="json",
            before_name="<function=", after_name=">", after_arguments="</function>", between="",
            models="Functionary 3.1, Llama 3.1 with its own tag form",
            rendered=r"<function=probe_tool>\s*\{",
        ),
        ToolFormat(
            "functionary_v32", "", "", parser="functionary", separator=">>>", recipient_mark=">>>",
            content_opening="all\n", before_name="", after_name="\n", after_arguments="",
            models="Functionary 3.2",
            rendered=r">>>probe_tool\n\s*\{",
        ),
        ToolFormat(
            "glm45", "<tool_call>", "<tool_call>", closing="</tool_call>", style="glm_xml",
            before_name="", after_name="\n", after_arguments="",
            models="GLM-4.5, GLM-4.6, Ling 3.0, Laguna XS",
            rendered=r"<tool_call>probe_tool\s*<arg_key>probe</arg_key>\s+<arg_value>",
        ),
        ToolFormat(
            "glm47", "<tool_call>", "<tool_call>", closing="</tool_call>", style="glm47_xml",
            before_name="", after_name="", after_arguments="", between="",
            models="GLM-4.7, Spark 2.5, Laguna S",
            rendered=r"<tool_call>probe_tool\s*<arg_key>probe</arg_key><arg_value>",
        ),
        ToolFormat(
            "minimax_m2", "<minimax:tool_call>", "<minimax:tool_call>\n", closing="</minimax:tool_call>",
            style="minimax_xml", separator="",
            before_name='<invoke name="', after_name='">\n', after_arguments="</invoke>\n",
            models="MiniMax M2",
            rendered=r'<invoke name="probe_tool">\s*<parameter name="probe">1</parameter>',
        ),
        ToolFormat(
            "deepseek_v3", _DEEPSEEK_CALLS, _DEEPSEEK_CALLS, separator="\n", closing=_DEEPSEEK_CLOSING,
            before_name=f"{_DEEPSEEK_CALL}function{_DEEPSEEK_NAME}", after_name="\n```json\n",
            after_arguments=f"\n```{_DEEPSEEK_END}",
            models="DeepSeek V3, V3-0324, R1-0528",
            rendered=f"{_DEEPSEEK_CALL}function{_DEEPSEEK_NAME}probe_tool\\s*```json",
        ),
        ToolFormat(
            "deepseek_v31", _DEEPSEEK_CALLS, _DEEPSEEK_CALLS, separator="", closing=_DEEPSEEK_CLOSING,
            before_name=_DEEPSEEK_CALL, after_name=_DEEPSEEK_NAME, after_arguments=_DEEPSEEK_END,
            models="DeepSeek V3.1",
            rendered=f"{_DEEPSEEK_CALL}probe_tool{_DEEPSEEK_NAME}\\s*\\{{",
        ),
        _dsml("deepseek_v32", "deepseek_xml", "DeepSeek V3.2", "function_calls"),
        _dsml("deepseek_v4", "deepseek_xml", "DeepSeek V4", "tool_calls"),
        _dsml("deepseek_v41", "deepseek_v4_1_xml", "DeepSeek V4.1", "calls", blank=" "),
        ToolFormat(
            "kimi_k2", "<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>", separator="",
            closing="<|tool_calls_section_end|>", ids=CallIds.NUMBERED, id_begin=":",
            before_name="<|tool_call_begin|>functions.", after_name="<|tool_call_argument_begin|>",
            after_arguments="<|tool_call_end|>",
            models="Kimi K2",
            rendered=r"<\|tool_call_begin\|>[^<]*<\|tool_call_argument_begin\|>\s*\{",
            mentions=("<|tool_calls_section_begin|>",),
        ),
        ToolFormat(
            "kimi_k3", _KIMI_CALLS, _KIMI_CALLS, separator="", closing="<|close|>tools<|sep|>", style="kimi_k3_xml",
            ids=CallIds.ORDINAL, id_begin='" index="', content_closing=_KIMI_CLOSING,
            before_name='<|open|>call tool="', after_name='"<|sep|>', after_arguments="<|close|>call<|sep|>",
            models="Kimi K3",
            rendered=r'<\|open\|>call tool="probe_tool" index="1"<\|sep\|>',
        ),
        ToolFormat(
            "muse_glimmer", "", "", separator="<|eom|><|start|>assistant", recipient_mark="<|start|>assistant",
            style="atem_xml", content_opening=" to=user<|message|>", before_name=" to=",
            after_name=f'<|message|><atem:function_calls>\n<atem:invoke name="{NAME}">\n',
            after_arguments="</atem:invoke>\n</atem:function_calls>",
            models="Muse Glimmer",
            rendered=r'<atem:invoke name="probe_tool">\s*<atem:parameter name="probe">1</atem:parameter>',
        ),
        ToolFormat(
            "command_r", "Action:\n```json\n[", "Action:\n```json\n[\n", separator=",\n", closing="\n]```",
            before_name='    {\n        "tool_name": "', after_name='",\n        "parameters": ',
            after_arguments="\n    }", arguments_key="parameters",
            models="Command R, Command R+",
            rendered=r'Action:\s*```json\s*\[\s*\{\s*"tool_name": "probe_tool"',
        ),
        ToolFormat(
            "openai", _HARMONY_CALL, "", single=True,
            before_name=_HARMONY_CALL, after_name=" <|constrain|>json<|message|>", after_arguments="",
            content_opening="<|channel|>final<|message|>",
            preamble=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
            models="gpt-oss",
            rendered=r"to=functions\.probe_tool[^{]*<\|message\|>\s*\{",
        ),
        ToolFormat(
            "gemma4", "<|tool_call>", "<|tool_call>", closing="<tool_call|>", style="gemma", between="",
            before_name="call:", after_name="", after_arguments="",
            models="Gemma 4",
            rendered=r"<\|tool_call>call:probe_tool\{probe:1\}",
        ),
        ToolFormat(
            "granite", "<|tool_call|>", "<|tool_call|>[", separator=", ", closing="]",
            models="Granite 3.0, 3.2, 3.3",
            rendered=r"<\|tool_call\|>\s*\[[^<]*probe_tool", mentions=("<|tool_call|>",),
        ),
        ToolFormat(
            "granite_text", "<tool_call>", "<tool_call>[", parser="granite", separator=", ", closing="]",
            models="Granite 3.1",
            rendered=r"<tool_call>\s*\[[^<]*probe_tool",
        ),
        ToolFormat(
            "granite-20b-fc", "<function_call>", "<function_call> ",
            models="Granite 20B function calling",
            rendered=r"<function_call>\s*\{[^<]*probe_tool", mentions=("<function_call>",),
        ),
        ToolFormat(
            "phi4_mini_json", "functools[", "functools[", separator=", ", closing="]",
            models="Phi-4-mini, FireFunction 2",
            rendered=r"functools\s*\[[^<]*probe_tool", mentions=("functools[",),
        ),
        ToolFormat(
            "lfm2", "<|tool_call_start|>", "<|tool_call_start|>[", style="python", separator=", ",
            closing="]<|tool_call_end|>", before_name="", after_name="(", after_arguments=")",
            models="LFM2, LFM2.5",
            rendered=r"<\|tool_call_start\|>\[probe_tool\(probe=",
            mentions=("<|tool_call_start|>", "<|tool_list_start|>", "List of tools: "),
        ),
        ToolFormat(
            "pythonic", "[", "[", style="python", separator=", ", closing="]", only_at_start=True,
            before_name="", after_name="(", after_arguments=")",
            models="Llama 3.2, Llama 4, ToolACE",
            rendered=r"\[probe_tool\(probe=",
        ),
        ToolFormat(
            "generic", "<tool_call>", "<tool_call>\n", closing="\n</tool_call>",
            models="any model whose chat template has no tools",
        ),
    )
}  # fmt: skip

# Further names in vLLM for formats that are equal to one of these.
ALIASES = {
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "qwen3_json": "hermes",
    "qwen3_xml": "qwen3_coder",
    "granite4": "hermes",
}


def formats_of(parser: str) -> list[ToolFormat]:
    """Return the formats that a value of ``--tool-call-parser`` may select; for ``auto`` all except generic."""
    if parser == "auto":
        return [form for form in FORMATS.values() if form.name != "generic"]
    return [form for form in FORMATS.values() if form.option == ALIASES.get(parser, parser)]
