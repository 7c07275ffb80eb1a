"""What all request models share: strict types, null means absent, and no field that is silently passed over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from ...engine.errors import RequestError


class StrictModel(BaseModel):
    """A JSON object with known fields only. An explicit null is the same as leaving the field out."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that would change the answer in a way that is not implemented.

    Attributes:
        reason: a sentence for the client.
        neutral: values that ask for nothing, and are taken.
    """

    reason: str
    neutral: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        """Whether the value asks for nothing. True is not 1 here, and an object's nulls are absent."""
        if isinstance(value, dict):
            value = {name: entry for name, entry in value.items() if entry is not None}
        return any(type(value) is type(known) and value == known for known in self.neutral)


class RequestModel(StrictModel):
    """The body of a request.

    Attributes:
        ignored: fields of OpenAI's that never change the answer: taken, whatever they hold, and left alone.
        refused: fields that would change it: refused by name unless their value asks for nothing.
    """

    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, Refusal]] = {}

    @model_validator(mode="before")
    @classmethod
    def _screen(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {name: value for name, value in data.items() if name not in cls.ignored}
        for name, refusal in cls.refused.items():
            value = kept.pop(name, None)
            if value is not None and not refusal.allows(value):
                raise RequestError(
                    f"'{name}' is not supported: {refusal.reason}", param=name, code="unsupported_parameter"
                )
        return kept


def string_or_list(value: Any) -> str | None:
    """Discriminator of a field with two forms. Names in ``<>`` stay out of an error's ``param``."""
    if isinstance(value, str):
        return "<string>"
    return "<list>" if isinstance(value, list) else None


def rejected(what: str, *field: str | int) -> PydanticCustomError:
    """An error inside a validator: ``what`` follows the field's name in the sentence, ``field`` leads on from it."""
    return PydanticCustomError("rejected", what, {"field": field})
