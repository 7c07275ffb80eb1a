"""Adapter parts: the field ``adapters``, a weighted combination of adapters that answers a request."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from ...engine.weighted_adapters import MAX_PARTS, MAX_WEIGHT, WeightedPart, combination_name
from .base import StrictModel, rejected

MAX_MODEL_NAME = 256
ModelName = Annotated[str, Field(max_length=MAX_MODEL_NAME)]


class AdapterPart(StrictModel):
    """An adapter of a combination, and its weight."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_NAME)]
    weight: Annotated[float, Field(ge=-MAX_WEIGHT, le=MAX_WEIGHT)]


def _check_distinct(parts: list[AdapterPart]) -> list[AdapterPart]:
    seen: set[str] = set()
    for index, part in enumerate(parts):
        if part.name in seen:
            raise rejected("is given twice: add up its weights", index, "name")
        if " " in part.name or "*" in part.name:
            raise rejected("is not an adapter's name", index, "name")
        seen.add(part.name)
    return parts


class AdapterFields(StrictModel):
    """The fields ``model`` and, as an extension, ``adapters``.

    With ``adapters``, ``model`` names the base model or is absent.
    """

    model: ModelName | None = None
    adapters: (
        Annotated[list[AdapterPart], Field(min_length=1, max_length=MAX_PARTS), AfterValidator(_check_distinct)] | None
    ) = None

    @property
    def asked_model(self) -> str | None:
        """The model's name in the form that ``ModelDirectory.find`` accepts."""
        if self.adapters is None:
            return self.model
        combined = combination_name(WeightedPart(part.name, float(part.weight)) for part in self.adapters)
        return f"{self.model}:{combined}" if self.model else combined
