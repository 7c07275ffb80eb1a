"""Token counts of a whole request, over its prompts and the n answers to each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from engine.types import FinishReason, Usage

if TYPE_CHECKING:
    from engine.generation import Finish


def usage_body(prompt: int, completion: int) -> dict[str, Any]:
    """OpenAI's ``usage`` as far as it is known before the end."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


class UsageCount:
    """Adds up what the ends of the sequences report. A prompt counts once, however many answers it gets.

    Args:
        drop_completion: generated tokens were not asked for, and do not count.
    """

    def __init__(self, *, drop_completion: bool = False) -> None:
        self._by_prompt: dict[int, list[Usage]] = {}
        self._drop_completion = drop_completion

    def add(self, prompt: int, usage: Usage) -> None:
        """Take the end of a sequence of this prompt."""
        self._by_prompt.setdefault(prompt, []).append(usage)

    def body(self) -> dict[str, Any]:
        """The sum. Of a prompt's n sequences the one with the fewest cached tokens computed it: that one counts."""
        groups = self._by_prompt.values()
        body = usage_body(sum(group[0].prompt for group in groups), 0)
        cached = sum(min(usage.cached for usage in group) for group in groups)
        generated = [] if self._drop_completion else [usage for group in groups for usage in group]
        body["completion_tokens"] = sum(usage.completion for usage in generated)
        body["total_tokens"] += body["completion_tokens"]
        body["prompt_tokens_details"] = {"cached_tokens": cached}
        body["completion_tokens_details"] = {
            "drafted_tokens": sum(usage.drafted for usage in generated),
            "forced_tokens": sum(usage.forced for usage in generated),
        }
        return body


def min_completion_tokens(finish: Finish) -> int | None:
    """Of an answer that was cut off at its budget: the budget that its form needs at least, if that is known."""
    return finish.usage.shortest if finish.reason is FinishReason.LENGTH else None


def finish_reason(finish: Finish) -> str:
    """OpenAI's word for the end of a sequence, or ``error``. EngineError if it did not come to an end of its own."""
    if finish.reason is not FinishReason.ABORT:
        return finish.reason.value
    raise EngineError("The answer was broken off by the engine.")
