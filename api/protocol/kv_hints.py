"""KV hints: a client's hints about the later use of its KV. They affect which KV is evicted, but never an answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ...engine.types import MAX_PIN_SECONDS, MAX_TOKEN_COUNT
from .base import StrictModel, rejected

MAX_ACTIONS = 16  # vLLM's limit.
MAX_DIRECTIVES = 128
_RETAIN = "kv.retain"
_Name = Annotated[str, Field(max_length=256)]


class RetainDirective(StrictModel):
    """A range of tokens in ``kv.retain``.

    A priority above 0 keeps the KV for ``duration`` seconds; 0 releases the KV.
    """

    priority: Annotated[int, Field(ge=0, le=100)]
    start: Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)] = 0
    end: Annotated[int, Field(ge=1, le=MAX_TOKEN_COUNT)] | None = None
    duration: Annotated[float, Field(ge=0)] | None = None
    covers_output: bool = False


class RetainPayload(StrictModel):
    """The content of a ``kv.retain`` action. Its ranges are applied to the whole session."""

    scope: _Name | None = None
    directives: Annotated[list[RetainDirective], Field(max_length=MAX_DIRECTIVES)]


class RetainAction(StrictModel):
    """An action that keeps or releases KV, in vLLM's format."""

    action_id: _Name | None = None
    action_type: Literal["kv.retain"]
    action_version: _Name = "1.0"
    payload: RetainPayload


class OtherAction(StrictModel):
    """An action of another type. It is ignored."""

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
    """Hints for a session's KV after the answer (``prompt_cache_key``), or for a prompt's KV before its request.

    The hints are given either in the first three fields or in the fields of vLLM's format.
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
        """Raise an error if a request without a session asks to keep or release its session."""
        if not session and (self.release or self.retain_for is not None):
            raise rejected("needs 'prompt_cache_key'", "kv_hints", "release" if self.release else "retain_for")

    @property
    def seconds(self) -> float | None:
        """Seconds for which the session is kept after the answer; 0 to release it, None if the hints do not say."""
        if self.release or self.retain_for is not None:
            return self.retain_for or 0.0
        retained = [action.payload.directives for action in self.actions if isinstance(action, RetainAction)]
        times = [_seconds(each) for directives in retained for each in directives]
        return max(times, default=None)


def _seconds(directive: RetainDirective) -> float:
    if not directive.priority:
        return 0.0
    return MAX_PIN_SECONDS if directive.duration is None else min(directive.duration, MAX_PIN_SECONDS)
