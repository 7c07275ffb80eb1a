"""Reasoning fields: request fields for effort, budget and visibility of the reasoning, as several clients name them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from .base import StrictModel, rejected
from .structured import StructuredFields

MAX_THINKING_BUDGET = 1 << 20
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Budget = Annotated[int, Field(ge=-1, le=MAX_THINKING_BUDGET)]


class ThinkingConfig(StrictModel):
    """Anthropic's and DeepSeek's form: whether the model reasons, and for how many tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_THINKING_BUDGET)] | None = None


class ReasoningOption(StrictModel):
    """OpenRouter's form. The reasoning is shown unchanged, so a kind of summary cannot be chosen."""

    model_config = ConfigDict(frozen=True)

    effort: Effort | None = None
    max_tokens: Annotated[int, Field(ge=0, le=MAX_THINKING_BUDGET)] | None = None
    enabled: bool | None = None
    exclude: bool = False
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ReasoningFields(StructuredFields):
    """Fields for the reasoning before an answer.

    Budgets are numbers of tokens: vLLM's ``thinking_token_budget``, Qwen's ``thinking_budget``,
    ``thinking.budget_tokens`` and ``reasoning.max_tokens``. A budget of -1 means no limit.
    """

    reasoning_effort: Effort | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
    thinking: ThinkingConfig | None = None
    reasoning: ReasoningOption = ReasoningOption()
    enable_thinking: bool | None = None
    include_reasoning: bool = True

    @model_validator(mode="after")
    def _check_thinking(self) -> ReasoningFields:
        efforts = [(name, value) for name, value in self._efforts.items() if value is not None]
        for given in (self._budgets, self._wishes, efforts):
            for name, value in given[1:]:
                if value != given[0][1]:
                    raise rejected(f"contradicts '{given[0][0]}'", *name.split("."))
        return self

    @property
    def shows_thoughts(self) -> bool:
        """Whether the response contains the reasoning."""
        return self.include_reasoning and not self.reasoning.exclude

    @property
    def thinks(self) -> bool | None:
        """Whether reasoning is requested; None if the model's template decides."""
        return self._wishes[0][1] if self._wishes else None

    @property
    def thought_budget(self) -> int | None:
        """Largest number of reasoning tokens; None for no limit."""
        if self.thinks is False:
            return 0
        return next((value for _, value in self._budgets if value >= 0), None)

    @property
    def thinking_kwargs(self) -> dict[str, Any]:
        """Variables of the chat template that control reasoning, under the names that templates use."""
        named = next(filter(None, self._efforts.values()), None)
        effort = {} if named is None else {"reasoning_effort": named}
        thinks = self.thinks
        return effort if thinks is None else {**effort, "enable_thinking": thinks, "thinking": thinks}

    @property
    def _efforts(self) -> dict[str, Effort | None]:
        return {"reasoning_effort": self.reasoning_effort, "reasoning.effort": self.reasoning.effort}

    @property
    def _wishes(self) -> list[tuple[str, bool]]:
        """For each field that is set, its name and whether it requests reasoning."""
        kind = None if self.thinking is None else self.thinking.type
        wishes = {
            **{name: None if effort is None else effort != "none" for name, effort in self._efforts.items()},
            "reasoning.enabled": self.reasoning.enabled,
            "thinking.type": None if kind in (None, "adaptive") else kind == "enabled",
            "enable_thinking": self.enable_thinking,
        }
        return [(name, value) for name, value in wishes.items() if value is not None]

    @property
    def _budgets(self) -> list[tuple[str, int]]:
        budgets = {
            "thinking_token_budget": self.thinking_token_budget,
            "thinking_budget": self.thinking_budget,
            "thinking.budget_tokens": None if self.thinking is None else self.thinking.budget_tokens,
            "reasoning.max_tokens": self.reasoning.max_tokens,
        }
        return [(name, value) for name, value in budgets.items() if value is not None]
