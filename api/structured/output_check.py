"""Watches the ends of structured answers: one that breaks its promise ends in ``error``, never in ``stop``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...engine.types import FinishReason
from ..tools.tool_parser import read_calls
from ..tools.tool_plan import Reading
from .output_format import OutputFormat
from .output_validators import OutputValidators

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TextDelta


class OutputCheck:
    """The answers of one request, put together and judged at their ends.

    An answer that was cut off at its budget, or by a stop string or token of the request's, is not judged.

    Attributes:
        num_broken: answers that did not hold the promise.
    """

    def __init__(self, output_format: OutputFormat, validators: OutputValidators) -> None:
        self.num_broken = 0
        self._output_format = output_format
        self._validators = validators
        self._texts: dict[tuple[int, int], list[str]] = {}

    async def judge(self, deltas: Sequence[TextDelta]) -> list[TextDelta]:
        """The deltas that came together, with ends that are right."""
        return [await self._judged(delta) for delta in deltas]

    async def _judged(self, delta: TextDelta) -> TextDelta:
        texts = self._texts.setdefault((delta.prompt, delta.index), [])
        texts.append(delta.text)
        finish = delta.finish
        if finish is None or finish.reason is not FinishReason.STOP or finish.stop_reason is not None:
            return delta
        if await self._holds("".join(texts)):
            return delta
        self.num_broken += 1
        return replace(delta, finish=replace(finish, reason=FinishReason.ERROR))

    async def _holds(self, text: str) -> bool:
        form, plan = self._output_format.form, self._output_format.tools
        if plan is not None:
            text, calls = read_calls(plan, text)
            for call in calls:
                spec = plan.arguments.get(call.name)
                if spec is None or not await self._validators.hold(spec, call.arguments):
                    return False
            if calls or plan.reading is not Reading.TRIGGERED:
                return bool(calls)
        return form is None or not form.kind.is_json or await self._validators.hold(form, text)
