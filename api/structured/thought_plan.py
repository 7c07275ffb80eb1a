"""Thought plan: rules for separating the reasoning from the answers of one request, and the engine's rules for it."""

from __future__ import annotations

from dataclasses import dataclass

from ...engine.text.reasoning_formats import ReasoningFormat
from ...grammar.thought_rules import ThoughtRules
from .output_format import OutputFormat

# Largest number of newlines that models write between the end mark and the answer.
MAX_NEWLINES = 2


@dataclass(frozen=True, slots=True)
class ThoughtPlan:
    """Rules for separating the reasoning from the answers of one request.

    Attributes:
        is_open: whether the prompt ends within the reasoning.
        lead: text between the reasoning and the answer, which belongs to neither.
        strips: whether newlines between the reasoning and the answer are dropped.
        shown: whether the client wants to see the reasoning.
    """

    format: ReasoningFormat
    is_open: bool
    lead: str
    strips: bool
    shown: bool

    def rules(self, budget: int | None) -> ThoughtRules:
        """Return the engine's rules for the reasoning.

        ``budget`` is its largest number of tokens; None for no limit.
        """
        newlines = MAX_NEWLINES if self.strips else 0
        return ThoughtRules(self.format.start, self.format.end, self.is_open, budget, self.lead, newlines)


def plan_thought(
    form: ReasoningFormat | None,
    prompt: str,
    *,
    continued: str | None,
    output_format: OutputFormat | None,
    shown: bool,
) -> ThoughtPlan | None:
    """Determine how to separate the reasoning from the answer.

    Returns None if the prompt has already ended the reasoning.

    Args:
        prompt: the conversation as rendered by the chat template.
        continued: text of the message that the answer continues.
    """
    if form is None:
        return None
    if continued is None:
        is_open = form.is_open_at(prompt)
    else:
        is_open = continued.rfind(form.start) > continued.rfind(form.end) or None
    if is_open is None:
        return None
    tools = None if output_format is None else output_format.tools
    # If the answer must match a text of the client exactly, a newline before it may be a part of it.
    strips = output_format is None or tools is not None or output_format.spec.kind.is_json
    # If calls begin with the text that ends the content, they follow the content's opening.
    begins_in_content = tools is None or tools.format.closes_content
    lead = (form.lead if begins_in_content else "") + ("" if tools is None else tools.prefill)
    return ThoughtPlan(form, is_open, lead, strips and not form.in_messages, shown)
