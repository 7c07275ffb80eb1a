"""KV hints: what a client knows of the later use of its KV. They change what is evicted when, and no answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ...engine.types import MAX_PIN_SECONDS, MAX_TOKEN_COUNT
from .base import StrictModel, rejected

MAX_ACTIONS = 16  # as vLLM's
MAX_DIRECTIVES = 128
_RETAIN = "kv.retain"
_Name = Annotated[str, Field(max_length=256)]


class RetainDirective(StrictModel):
    """A range of tokens in ``kv.retain``: a priority above 0 keeps it for ``duration`` seconds, 0 releases it."""

    priority: Annotated[int, Field(ge=0, le=100)]
    start: Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)] = 0
    end: Annotated[int, Field(ge=1, le=MAX_TOKEN_COUNT)] | None = None
    duration: Annotated[float, Field(ge=0)] | None = None
    covers_output: bool = False


class RetainPayload(StrictModel):
    """What a ``kv.retain`` says. Ranges are taken for the whole session."""

    scope: _Name | None = None
    directives: Annotated[list[RetainDirective], Field(max_length=MAX_DIRECTIVES)]


class RetainAction(StrictModel):
    """An action of vLLM's envelope that keeps or releases KV."""

    action_id: _Name | None = None
    action_type: Literal["kv.retain"]
    action_version: _Name = "1.0"
    payload: RetainPayload


class OtherAction(StrictModel):
    """An action of another type, which is left out."""

    action_id: _Name | None = None
    action_type: _Name
    action_version: _Name = "1.0"
    payload: dict[str, Any] = Field(default_factory=dict)


def _kind(value: Any) -> str:
    kind = value.get("action_type") if isinstance(value, dict) else getattr(value, "action_type", None)
    return "<retain>" if kind == _RETAIN else "<other>"


Action = Annotated[
    Annotated[RetainAction, Tag("<retain>")] | Annotated[OtherAction, Tag("<other>")], Discriminator(_kind)
]


class KvHints(StrictModel):
    """What to do with a session's KV (``prompt_cache_key``) after the answer, or with a prompt's before its request.

    Either the first three fields say it, or vLLM's envelope.
    """

    retain_for: Annotated[float, Field(gt=0, le=MAX_PIN_SECONDS)] | None = None
    release: bool = False
    prefetch: bool = False
    protocol_version: _Name | None = None
    message_id: _Name | None = None
    actions: Annotated[list[Action], Field(max_length=MAX_ACTIONS)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_pairs(self) -> KvHints:
        if self.release and self.retain_for is not None:
            raise rejected("contradicts 'retain_for'", "release")
        return self

    def check_session(self, session: str) -> None:
        """Refuse to keep or release a session that has no name."""
        if not session and (self.release or self.retain_for is not None):
            raise rejected("needs 'prompt_cache_key'", "kv_hints", "release" if self.release else "retain_for")

    @property
    def seconds(self) -> float | None:
        """How long the session is kept after the answer, 0 for a release; None where nothing is said of it."""
        if self.release or self.retain_for is not None:
            return self.retain_for or 0.0
        retained = [action.payload.directives for action in self.actions if isinstance(action, RetainAction)]
        times = [_seconds(each) for directives in retained for each in directives]
        return max(times, default=None)


def _seconds(directive: RetainDirective) -> float:
    if not directive.priority:
        return 0.0
    return MAX_PIN_SECONDS if directive.duration is None else min(directive.duration, MAX_PIN_SECONDS)
