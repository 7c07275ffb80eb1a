"""Formats of 70 published chat templates, by llama.cpp's tests of them and by what they render.

The templates lie in the folder ``models/templates`` of llama.cpp. Each row says in our own words how the model writes
two calls, ``get_weather(city="Paris", days=3)`` and ``get_news(city="Rome")``, what marks its thoughts, and where a
prompt stands that asks for an answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rootgraft.engine.text.chat_template import ChatTemplates
from support.api.tool_templates import TemplateOnly

BOS, EOS = "<BOS>", "<EOS>"
_WEATHER, _NEWS = '{"city": "Paris", "days": 3}', '{"city": "Rome"}'


def _both(form: str, between: str = "\n") -> str:
    """Fill in a form of calls with JSON: ``NAME`` and ``ARGS``."""
    texts = (form.replace("NAME", name).replace("ARGS", args) for name, args in CALLS)
    return between.join(texts)


def _marked(call: str, parameter: str, between: str = "\n") -> str:
    """Fill in a form of calls between marks: ``NAME``, and parameters with ``KEY`` and ``VALUE``."""
    written = []
    for name, values in (("get_weather", (("city", "Paris"), ("days", "3"))), ("get_news", (("city", "Rome"),))):
        parameters = "".join(parameter.replace("KEY", key).replace("VALUE", value) for key, value in values)
        written.append(call.replace("NAME", name).replace("PARAMETERS", parameters))
    return between.join(written)


CALLS = (("get_weather", _WEATHER), ("get_news", _NEWS))
_OBJECT = '{"name": "NAME", "arguments": ARGS}'
_DSML = _marked(
    '<｜DSML｜invoke name="NAME">\nPARAMETERS</｜DSML｜invoke>\n',
    '<｜DSML｜parameter name="KEY" string="TOLD">VALUE</｜DSML｜parameter>\n',
    "",
).replace('"TOLD">3', '"false">3').replace("TOLD", "true")  # fmt: skip
_KIMI3 = (
    '<|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="get_news" index="2"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|><|close|>call<|sep|>'
)
_COHERE = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
    f'{_WEATHER}}},\n    {{"tool_call_id": "1", "tool_name": "get_news", "parameters": {_NEWS}}}\n]<|END_ACTION|>'
)
# How calls are written, by the value of ``--tool-call-parser``, or by a word of ours for a form that has no such value.
WRITTEN = {
    "hermes": _both(f"<tool_call>\n{_OBJECT}\n</tool_call>"),
    "llama3_json": '{"name": "get_weather", "parameters": ' + _WEATHER + "}",
    "qwen3_coder": _marked(
        "<tool_call>\n<function=NAME>\nPARAMETERS</function>\n</tool_call>", "<parameter=KEY>\nVALUE\n</parameter>\n"
    ),
    "seed_oss": _marked(
        "<seed:tool_call>\n<function=NAME>\nPARAMETERS</function>\n</seed:tool_call>",
        "<parameter=KEY>VALUE</parameter>\n",
    ),
    "glm45": _marked(
        "<tool_call>NAME\nPARAMETERS</tool_call>", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
    ),
    "glm47": _marked(
        "<tool_call>NAMEPARAMETERS</tool_call>", "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>", ""
    ),
    "minimax_m2": "<minimax:tool_call>\n"
    + _marked('<invoke name="NAME">\nPARAMETERS</invoke>\n', '<parameter name="KEY">VALUE</parameter>\n', "")
    + "</minimax:tool_call>",
    "mistral_nemo": f"[TOOL_CALLS][{_both(_OBJECT, ', ')}]",
    "deepseek_v3": "<｜tool▁calls▁begin｜>"
    + _both("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>")
    + "<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + _both("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>", "")
    + "<｜tool▁calls▁end｜>",
    "deepseek_v32": f"<｜DSML｜function_calls>\n{_DSML}</｜DSML｜function_calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>\n{_DSML}</｜DSML｜tool_calls>",
    "kimi_k2": (
        "<|tool_calls_section_begin|>"
        f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{_WEATHER}<|tool_call_end|>"
        f"<|tool_call_begin|>functions.get_news:1<|tool_call_argument_begin|>{_NEWS}<|tool_call_end|>"
        "<|tool_calls_section_end|>"
    ),
    "kimi_k3": f"<|close|>response<|sep|><|open|>tools<|sep|>{_KIMI3}<|close|>tools<|sep|>",
    "muse_glimmer": _marked(
        ' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\nPARAMETERS</atem:invoke>\n'
        "</atem:function_calls>",
        '<atem:parameter name="KEY">VALUE</atem:parameter>\n',
        "<|eom|><|start|>assistant",
    ),
    "command_r": "Action:\n```json\n[\n"
    + _both('    {\n        "tool_name": "NAME",\n        "parameters": ARGS\n    }', ",\n")
    + "\n]```",
    "openai": f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{_WEATHER}",
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'
    '<|tool_call>call:get_news{city:<|"|>Rome<|"|>}<tool_call|>',
    "granite": f"<|tool_call|>[{_both(_OBJECT, ', ')}]",
    "phi4_mini_json": f"functools[{_both(_OBJECT, ', ')}]",
    "lfm2": '<|tool_call_start|>[get_weather(city="Paris", days=3), get_news(city="Rome")]<|tool_call_end|>',
    "functionary": _both("<function=NAME>ARGS</function>", ""),
    "functionary_v32": _both("NAME\nARGS", ">>>"),
    "apertus": f"<|tools_prefix|>[{_both(chr(123) + chr(34) + 'NAME' + chr(34) + ': ARGS}', ', ')}]<|tools_suffix|>",
    "apriel": f"<tool_calls>[{_both(_OBJECT, ', ')}]</tool_calls>",
    "cohere": _COHERE,
    "gigachat 3": f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "get_weather", "arguments": {_WEATHER}}}',
    "gigachat 3.1": f'<|function_call|>{{"name": "get_weather", "arguments": {_WEATHER}}}',
    "hy3": "<tool_calls:opensource>\n"
    + _marked(
        "<tool_call:opensource>NAME<tool_sep:opensource>\nPARAMETERS</tool_call:opensource>\n",
        "<arg_key:opensource>KEY</arg_key:opensource>\n<arg_value:opensource>VALUE</arg_value:opensource>\n",
        "",
    )
    + "</tool_calls:opensource>",
    "minicpm5": _marked('<function name="NAME">PARAMETERS</function>', '<param name="KEY">VALUE</param>'),
    "minimax m1": f"<tool_calls>\n{_both(_OBJECT)}\n</tool_calls>",
    "nemotron 2": f"<TOOLCALL>[{_both(_OBJECT, ', ')}]</TOOLCALL>",
    "solar": (
        f"<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>get_weather<|tool_call:args|>{_WEATHER}<|tool_call:end|>"
        f"<|tool_call:begin|>1<|tool_call:name|>get_news<|tool_call:args|>{_NEWS}<|tool_call:end|><|calls|>"
    ),
}  # fmt: skip
WRITTEN["mistral_args"] = f"[TOOL_CALLS]get_weather[ARGS]{_WEATHER}[TOOL_CALLS]get_news[ARGS]{_NEWS}"
WRITTEN["mistral_call_id"] = (
    f"[TOOL_CALLS]get_weather[CALL_ID]000000000[ARGS]{_WEATHER}[TOOL_CALLS]get_news[CALL_ID]000000001[ARGS]{_NEWS}"
)
WRITTEN["generic"] = WRITTEN["hermes"]
# Formats in which an answer has one call at most.
SINGLE = ("llama3_json", "openai", "gigachat 3", "gigachat 3.1")
# Text for the user before calls, where it is not plain text; None where no text may be in front of calls.
BEFORE = {
    "llama3_json": None,
    "cohere": None,
    "solar": None,
    "muse_glimmer": " to=user<|message|>Said.<|eom|><|start|>assistant",
    "functionary_v32": "all\nSaid.>>>",
    "openai": "<|channel|>commentary<|message|>Said.<|end|><|start|>assistant",
}
THINK = ("<think>", "</think>")
_MARKS = {
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "apriel": ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "kimi_k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "minimax m3": ("<mm:think>", "</mm:think>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "muse_glimmer": (" to=self<|message|>", "<|eom|><|start|>assistant"),
    "openai": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
    "hy3": ("<think:opensource>", "</think:opensource>"),
    "solar": ("<|think|>", "<|end|><|begin|>assistant"),
}


@dataclass(frozen=True)
class Published:
    """What is known of one published template.

    Attributes:
        calls: key of ``WRITTEN``.
        thought: start and end mark of thoughts; None for a model without.
        stands: where a prompt stands, without a switch, with thoughts switched on, and off: ``i`` in a thought, ``d``
            after one, ``b`` where one may begin.
        reason: why it has no format of its own; "" if it has one.
        shown: whether the template renders calls as the model writes them.
    """

    calls: str
    thought: tuple[str, str] | None = None
    stands: str = "bbb"
    reason: str = ""
    shown: bool = True


def _row(calls: str, marks: str | None = None, stands: str = "bbb", *, shown: bool = True) -> Published:
    thought = None if marks is None else THINK if marks == "think" else _MARKS[marks]
    return Published(calls, thought, stands, shown=shown)


def _generic(reason: str, marks: str | None = None, stands: str = "bbb") -> Published:
    thought = None if marks is None else THINK if marks == "think" else _MARKS[marks]
    return Published("generic", thought, stands, reason, shown=False)


_NO_TOOLS = "it renders neither tools nor calls"
PUBLISHED = {
    "Apertus-8B-Instruct": _row("apertus", "apertus"),
    "Apriel-1.6-15b-Thinker-fixed": _row("apriel", "apriel", "iii"),
    "Bielik-11B-v3.0-Instruct": _row("hermes", "think", "bib"),
    "ByteDance-Seed-OSS": _row("seed_oss", "seed_oss"),
    "Cohere2MoE": _row("cohere", "cohere", "iii"),
    # It writes the object over several lines, and models write it on one line too.
    "CohereForAI-c4ai-command-r-plus-tool_use": _row("command_r", shown=False),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": _row("cohere", "cohere", "dbd"),
    "GLM-4.6": _row("glm45", "think", "bbd"),
    "GLM-4.7-Flash": _row("glm47", "think", "iid"),
    "GigaChat3-10B-A1.8B": _row("gigachat 3"),
    "GigaChat3.1-10B-A1.8B": _row("gigachat 3.1"),
    "HuggingFaceTB-SmolLM3-3B": _generic(_NO_TOOLS, "think", "bbd"),
    "Kimi-K2-Instruct": _row("kimi_k2"),
    "Kimi-K2-Thinking": _row("kimi_k2", "think"),
    "Kimi-K3": _row("kimi_k3", "kimi_k3", "iid"),
    "LFM2-8B-A1B": _row("lfm2", shown=False),
    # It renders strings between single quotes; the model's own examples have double ones.
    "LFM2.5-8B-A1B": _row("lfm2", "think", shown=False),
    "LFM2.5-Instruct": _row("lfm2", "think", shown=False),
    "MiMo-VL": _row("hermes"),
    "MiniMax-M1": _row("minimax m1"),
    "MiniMax-M2": _row("minimax_m2", "think", "iii"),
    "MiniMax-M3": _generic("its values are nested elements named by the parameters", "minimax m3"),
    "Mistral-Small-3.2-24B-Instruct-2506": _row("mistral_call_id", shown=False),  # with other ids
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _row("qwen3_coder", "think", "iid"),
    "NVIDIA-Nemotron-Nano-v2": _row("nemotron 2", "think", "iii"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": _row("hermes"),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": _row("hermes"),
    "Qwen-QwQ-32B": _row("hermes", "think", "did"),
    "Qwen-Qwen2.5-7B-Instruct": _row("hermes"),
    "Qwen-Qwen3-0.6B": _row("hermes", "think", "bbd"),
    "Qwen3-Coder": _row("qwen3_coder"),
    "Qwen3.5-4B": _row("qwen3_coder", "think", "iid"),
    "Reka-Edge": _row("hermes", "think", "bib", shown=False),  # without the line end between calls
    "Spark2.5": _row("glm47", "think", "iid"),
    "StepFun3.5-Flash": _row("qwen3_coder", "think", "iii", shown=False),  # without the line end between calls
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": _generic(
        "it renders no definitions, and calls without their last mark, if at all", "think", "iii"
    ),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": _row("deepseek_v3", "think", "did"),
    "deepseek-ai-DeepSeek-V3.1": _row("deepseek_v31", "think", "did"),
    "deepseek-ai-DeepSeek-V3.2": _row("deepseek_v32", "think", "did"),
    "deepseek-ai-DeepSeek-V4-Flash-0731": _row("deepseek_v4", "think", "did"),
    "deepseek-ai-DeepSeek-V4": _row("deepseek_v4", "think", "did"),
    "fireworks-ai-llama-3-firefunction-v2": _row("phi4_mini_json"),
    "google-gemma-2-2b-it": _generic(_NO_TOOLS),
    "google-gemma-4-31B-it-interleaved": _row("gemma4", "gemma4", "dbd"),
    "google-gemma-4-31B-it": _row("gemma4", "gemma4", "dbd"),
    "ibm-granite-granite-3.3-2B-Instruct": _row("granite", "think", shown=False),
    "ibm-granite-granite-4.0": _row("hermes"),
    "ibm-granite-granite-4.1": _row("hermes"),
    # It renders no line end between parameters, and asks the model for one.
    "inclusionai-ling-3.0-flash": _row("glm45", "think", "iid", shown=False),
    "llama-cpp-deepseek-r1": _row("deepseek_v3", "think", "iii"),
    "llama-cpp-rwkv-world": _generic(_NO_TOOLS, "think", "bid"),
    "meetkai-functionary-medium-v3.1": _row("functionary"),
    "meetkai-functionary-medium-v3.2": _row("functionary_v32"),
    "meta-llama-Llama-3.1-8B-Instruct": _row("llama3_json"),
    "meta-llama-Llama-3.2-3B-Instruct": _row("llama3_json"),
    "meta-llama-Llama-3.3-70B-Instruct": _row("llama3_json"),
    "microsoft-Phi-3.5-mini-instruct": _generic(_NO_TOOLS),
    "mistralai-Ministral-3-14B-Reasoning-2512": _row("mistral_args", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": _row("mistral_nemo"),
    "moonshotai-Kimi-K2": _row("kimi_k2"),
    "muse-glimmer": _row("muse_glimmer", "muse_glimmer"),
    # It renders the function in the header of the message; models write it in the channel too.
    "openai-gpt-oss-120b": _row("openai", "openai", shown=False),
    "openbmb-MiniCPM5-1B": _row("minicpm5", "think", "bid"),
    "poolside-Laguna-S-2.1": _row("glm47", "think", "iid"),
    "poolside-Laguna-XS-2.1": _row("glm45", "think", "did"),
    "poolside-Laguna-XS.2": _row("glm45", "think", "did"),
    "tencent-Hy3": _row("hy3", "hy3", "ddd"),
    "unsloth-Apriel-1.5": _row("apriel", "apriel"),
    "unsloth-mistral-Devstral-Small-2507": _row("mistral_args"),
    "upstage-Solar-Open-100B": _row("solar", "solar"),
}
_ENDS = {"tencent-Hy3": "<｜hy_eos:opensource｜>"}
_PLAIN = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class PublishedTemplate(TemplateOnly):
    """As much of a tokenizer as formats are found by, with a published template and its special tokens.

    Attributes:
        source: the template for conversations with tools.
        needs_tools: whether it is only for conversations with tools.
    """

    bos_id = 1

    def __init__(self, models: Path, name: str) -> None:
        self.source = (models / "templates" / f"{name}.jinja").read_text()
        super().__init__(self.source, _ENDS.get(name, EOS))
        self.needs_tools = name.endswith("tool_use")
        sources = {"default": _PLAIN, "tool_use": self.source} if self.needs_tools else {"default": self.source}
        self.templates = ChatTemplates(sources, {"bos_token": BOS, "eos_token": EOS})
        self.named_roles = self.templates.named_roles

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return BOS if ids == [1] else super().decode(ids, skip_special_tokens)

    def render_chat(self, messages: Any, **options: Any) -> str:
        return self.templates.render(messages, **options)
