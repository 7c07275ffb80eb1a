"""Token usage: sums the tokens of one HTTP request over its prompts and their n answers; OpenAI's finish reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...engine.errors import EngineError
from ...engine.types import FinishReason, Usage

if TYPE_CHECKING:
    from ...engine.serving.output_processor import Finish


def usage_body(prompt: int, completion: int) -> dict[str, Any]:
    """Return OpenAI's ``usage`` with the counts that are known before the end of a request."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Token counts of one HTTP request: all prompts and the cached part; all answers and the drafted part."""

    prompt: int
    cached: int
    completion: int
    drafted: int = 0


class UsageCount:
    """Sums the usage of the sequences that have ended. A prompt counts once, however many answers it gets.

    Args:
        drop_completion: whether the client requested no tokens, so that generated tokens do not count.
    """

    def __init__(self, *, drop_completion: bool = False) -> None:
        self._by_prompt: dict[int, list[Usage]] = {}
        self._drop_completion = drop_completion

    def add(self, prompt: int, usage: Usage) -> None:
        self._by_prompt.setdefault(prompt, []).append(usage)

    def add_aborted(self, prompt: int, num_prompt: int, num_completion: int) -> None:
        """Add a sequence that was aborted after its first token. The number of its cached tokens is not known."""
        cached = min((usage.cached for usage in self._by_prompt.get(prompt, ())), default=0)
        self.add(prompt, Usage(num_prompt, cached, num_completion))

    def counts(self) -> TokenCounts:
        """Return the sum. For the n sequences of a prompt, the smallest number of cached tokens counts."""
        groups = self._by_prompt.values()
        return TokenCounts(
            sum(group[0].prompt for group in groups),
            sum(min(usage.cached for usage in group) for group in groups),
            0 if self._drop_completion else sum(usage.completion for group in groups for usage in group),
            0 if self._drop_completion else sum(usage.drafted for group in groups for usage in group),
        )

    def body(self) -> dict[str, Any]:
        """Return the sum as OpenAI's ``usage``."""
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
                "reasoning_tokens": sum(usage.reasoning for usage in generated),
                "accepted_prediction_tokens": drafted,
                "rejected_prediction_tokens": 0,  # Rejected draft tokens are not counted.
                "drafted_tokens": drafted,
                "forced_tokens": sum(usage.forced for usage in generated),
            },
        }


def _cached(usage: Usage) -> int:
    return usage.cached


def finish_fields(finish: Finish | None) -> dict[str, Any]:
    """Return ``finish_reason``, ``stop_reason`` and, for an answer cut off at its budget, ``min_completion_tokens``.

    Raises:
        EngineError: the engine has not ended the sequence, or has aborted it.
    """
    if finish is None:
        raise EngineError("The engine did not finish the answer.")
    if finish.reason is FinishReason.ABORT:
        raise EngineError("The engine aborted the answer.")
    fields: dict[str, Any] = {"finish_reason": finish.reason.value, "stop_reason": finish.told_stop_reason}
    if finish.reason is FinishReason.LENGTH and finish.usage.shortest is not None:
        fields["min_completion_tokens"] = finish.usage.shortest
    return fields
