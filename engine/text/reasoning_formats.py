"""Reasoning formats of model families, as data: the marks around the reasoning.

Also detects whether a prompt ends within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from .chat_template import TemplateStopped
from .thought_probe import probed_thought

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_LONGEST_PROBE = 1 << 16  # Largest number of characters that are searched in a probe's rendered text.


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks with which a model family delimits its reasoning.

    Attributes:
        name: value of ``--reasoning-parser``; the names are vLLM's.
        start: mark before the reasoning, written by the model or at the end of the prompt.
        end: mark after the reasoning.
        implicit: whether an answer begins within the reasoning even without the start mark.
        lead: text before the content of an answer, which belongs neither to the reasoning nor to the content.
        in_messages: whether the reasoning is a separate message. The end mark then ends with the header of the next
            message, as every prompt does.
    """

    name: str
    start: str = "<think>"
    end: str = "</think>"
    implicit: bool = False
    lead: str = ""
    in_messages: bool = False

    @property
    def mention(self) -> str:
        """Text that occurs in the source of the chat templates of this format."""
        return self.start if self.in_messages else self.end

    def is_open_at(self, prompt: str) -> bool | None:
        """Return whether a prompt ends within the reasoning; None if the prompt has ended the reasoning already.

        In the latter case the prompt ends with the end mark, or with ``lead``.
        """
        tail, lead = prompt.rstrip(), self.lead.strip()
        if (lead and tail.endswith(lead)) or (tail.endswith(self.end) and not self.in_messages):
            return None
        return self.implicit or tail.endswith(self.start)


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


def reasoning_format_of(tokenizer: Tokenizer, parser: str) -> ReasoningFormat | None:
    """Return the model's reasoning format; None for a model without reasoning.

    Args:
        parser: name of a format; ``none``; or ``auto``, which selects the first format whose mark the chat template
            contains, or else derives a format from the text that the template renders around reasoning.

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
