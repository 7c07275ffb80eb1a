"""Token counts of a whole request, over its prompts and the n answers to each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...engine.errors import EngineError
from ...engine.types import FinishReason, Usage

if TYPE_CHECKING:
    from ...engine.serving.output_processor import Finish


def usage_body(prompt: int, completion: int) -> dict[str, Any]:
    """OpenAI's ``usage`` as far as it is known before the end."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of one HTTP request: of its prompts, those of them that were cached, of all answers together."""

    prompt: int
    cached: int
    completion: int


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

    def add_broken_off(self, prompt: int, num_prompt: int, num_completion: int) -> None:
        """Take a sequence that began and whose end nobody waited for. What was cached for it is not known."""
        cached = min((usage.cached for usage in self._by_prompt.get(prompt, ())), default=0)
        self.add(prompt, Usage(num_prompt, cached, num_completion))

    def counts(self) -> TokenCounts:
        """The sum. Of a prompt's n sequences the one with the fewest cached tokens computed it: that one counts."""
        groups = self._by_prompt.values()
        return TokenCounts(
            sum(group[0].prompt for group in groups),
            sum(min(usage.cached for usage in group) for group in groups),
            0 if self._drop_completion else sum(usage.completion for group in groups for usage in group),
        )

    def body(self) -> dict[str, Any]:
        """The sum as OpenAI's ``usage``."""
        counts = self.counts()
        groups = self._by_prompt.values()
        generated = [] if self._drop_completion else [usage for group in groups for usage in group]
        drafted = sum(usage.drafted for usage in generated)
        return {
            **usage_body(counts.prompt, counts.completion),
            "prompt_tokens_details": {
                "cached_tokens": counts.cached,
                "forked_tokens": sum(min(group, key=_cached).forked for group in groups),
                "pinned_tokens": sum(max(usage.pinned for usage in group) for group in groups),
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": drafted,
                "rejected_prediction_tokens": 0,  # what did not stand is not counted
                "drafted_tokens": drafted,
                "forced_tokens": sum(usage.forced for usage in generated),
            },
        }


def _cached(usage: Usage) -> int:
    return usage.cached


def min_completion_tokens(finish: Finish) -> int | None:
    """Of an answer that was cut off at its budget: the budget that its form needs at least, if that is known."""
    return finish.usage.shortest if finish.reason is FinishReason.LENGTH else None


def finish_reason(finish: Finish) -> str:
    """OpenAI's word for the end of a sequence, or ``error``. EngineError if it did not come to an end of its own."""
    if finish.reason is not FinishReason.ABORT:
        return finish.reason.value
    raise EngineError("The answer was broken off by the engine.")
