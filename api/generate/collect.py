"""Whole answers out of deltas, for requests that do not stream."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...engine.errors import EngineError
from ..observe.token_usage import UsageCount, finish_reason, min_completion_tokens
from .streams import Deltas

if TYPE_CHECKING:
    from ...engine.serving.output_processor import Finish, TokenLogprob


@dataclass(slots=True)
class Answer:
    """One sequence's whole answer."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def reason(self) -> str:
        """OpenAI's finish reason. EngineError if the sequence has not come to an end."""
        if self.finish is None:
            raise EngineError("The engine sent no end of the answer.")
        return finish_reason(self.finish)

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token that ended it."""
        return None if self.finish is None else self.finish.stop_reason

    @property
    def min_tokens(self) -> int | None:
        """See ``usage.min_completion_tokens``."""
        return None if self.finish is None else min_completion_tokens(self.finish)


async def collect(deltas: Deltas, usage: UsageCount) -> dict[tuple[int, int], Answer]:
    """Answers by (number of the prompt, index); their token counts are added to ``usage``."""
    answers: dict[tuple[int, int], Answer] = {}
    async with aclosing(deltas) as stream:
        async for prompt, several in stream:
            for delta in several:
                answer = answers.setdefault((prompt, delta.index), Answer())
                answer.text.append(delta.text)
                answer.logprobs.extend(delta.logprobs)
                answer.prompt_logprobs.extend(delta.prompt_logprobs)
                if delta.finish is not None:
                    answer.finish = delta.finish
                    usage.add(prompt, delta.finish.usage)
    return answers
