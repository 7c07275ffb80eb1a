"""Reasoning formats of model families as data: the marks around a thought; and whether a prompt ends in a thought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...engine.errors import RequestError
from ...engine.text.chat_template import TemplateStopped
from ...grammar.thought_rules import ThoughtRules
from .output_format import OutputFormat
from .thought_probe import probed_thought

if TYPE_CHECKING:
    from ...engine.text.tokenizer import Tokenizer

_LONGEST_PROBE = 1 << 16  # Number of characters.
# Largest number of newlines that models write between the end mark and the answer.
MAX_NEWLINES = 2


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model family writes thoughts.

    Attributes:
        name: value of ``--reasoning-parser``, with vLLM's names.
        start: mark before the thought, written by the model or at the end of the prompt.
        end: mark after the thought.
        implicit: whether an answer begins within the thought, with or without the start mark.
        lead: text before the content of an answer; it belongs neither to the thought nor to the content.
        in_messages: whether thoughts are separate messages. Then the end mark ends with the header of the next message,
            as every prompt does.
    """

    name: str
    start: str = "<think>"
    end: str = "</think>"
    implicit: bool = False
    lead: str = ""
    in_messages: bool = False

    @property
    def mention(self) -> str:
        """Text in the source of the chat templates that use these thoughts."""
        return self.start if self.in_messages else self.end


FORMATS = {
    form.name: form
    for form in (
        ReasoningFormat("qwen3"),
        ReasoningFormat("deepseek_r1", implicit=True),
        ReasoningFormat("deepseek_v3"),
        ReasoningFormat("glm45"),
        ReasoningFormat("kimi_k2"),
        ReasoningFormat("minimax_m2", implicit=True),
        ReasoningFormat("nemotron_v3"),
        ReasoningFormat("olmo3", implicit=True),
        ReasoningFormat("step3", implicit=True),
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("cohere_command3", "<|START_THINKING|>", "<|END_THINKING|>"),
        ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
        ReasoningFormat("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningFormat(
            "openai_gptoss", "<|channel|>analysis<|message|>", "<|end|><|start|>assistant",
            lead="<|channel|>final<|message|>", in_messages=True,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ThoughtPlan:
    """How to separate the thoughts from the answers of one request.

    Attributes:
        is_open: whether the prompt ends within the thought.
        lead: text between the thought and the answer; it belongs to neither.
        strips: whether newlines between the two are dropped.
        shown: whether the client wants to see thoughts.
    """

    format: ReasoningFormat
    is_open: bool
    lead: str
    strips: bool
    shown: bool

    def rules(self, budget: int | None) -> ThoughtRules:
        """Return the engine's rules for the thought."""
        newlines = MAX_NEWLINES if self.strips else 0
        return ThoughtRules(self.format.start, self.format.end, self.is_open, budget, self.lead, newlines)


def reasoning_format_of(tokenizer: Tokenizer, parser: str) -> ReasoningFormat | None:
    """Return the model's reasoning format; None for a model without thoughts.

    Args:
        parser: name of a format; ``none``; or ``auto``, which takes the first format whose mark the chat template
            mentions, or else derives one from the text that the template renders around a thought.

    Raises:
        TemplateStopped: the template takes too long.
        TemplateDeferred: see ``ChatTemplates.render``.
    """
    if parser != "auto":
        return FORMATS.get(parser)
    named = next((form for form in FORMATS.values() if tokenizer.template_mentions(form.mention)), None)
    return named or _probed(tokenizer)


def _probed(tokenizer: Tokenizer) -> ReasoningFormat | None:
    def render(messages: Sequence[dict[str, Any]], has_header: bool) -> str:
        try:
            return tokenizer.render_chat(messages, add_generation_prompt=has_header)[:_LONGEST_PROBE]
        except TemplateStopped:
            raise
        except RequestError:
            return ""

    found = probed_thought(render)
    if found is None:
        return None
    return ReasoningFormat("probed", found.start, found.end, lead=found.lead, in_messages=found.in_messages)


def plan_thought(
    form: ReasoningFormat | None,
    prompt: str,
    *,
    continued: str | None,
    output_format: OutputFormat | None,
    shown: bool,
) -> ThoughtPlan | None:
    """Return how to separate thoughts from answers; None if the prompt leaves no room for a thought.

    Args:
        prompt: the conversation as the chat template renders it.
        continued: text of the message that the answer continues.
    """
    if form is None:
        return None
    if continued is None:
        tail = prompt.rstrip()
        # A prompt without a thought may also have opened the answer.
        before_answer = tail.removesuffix(form.lead.strip()).rstrip()
        is_closed = before_answer.endswith(form.end) and not form.in_messages
        is_open = form.implicit or tail.endswith(form.start)
    else:
        is_open = continued.rfind(form.start) > continued.rfind(form.end)
        is_closed = not is_open
    if is_closed:
        return None
    tools = None if output_format is None else output_format.tools
    # If the answer must equal a text of the client's exactly, a newline before it may be part of it.
    strips = output_format is None or tools is not None or output_format.spec.kind.is_json
    # Calls that begin with the text that ends the content follow the content's opening.
    begins_in_content = tools is None or tools.format.closes_content
    lead = (form.lead if begins_in_content else "") + ("" if tools is None else tools.prefill)
    return ThoughtPlan(form, is_open, lead, strips and not form.in_messages, shown)
