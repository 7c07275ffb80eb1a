"""Base of request models: strict types; null means absent; unsupported fields are ignored or refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_ID = 256
Id = Annotated[str, Field(max_length=MAX_ID)]
"""Id or name in a request. Some of them are repeated in the response."""
MAX_FORMAT_NAME = 64  # OpenAI's limit.
FormatName = Annotated[str, Field(max_length=MAX_FORMAT_NAME)]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The rule by which a field that is not implemented is refused.

    Attributes:
        reason: a sentence for the client.
        neutral: values that are accepted, because they do not change the answer.
    """

    reason: str
    neutral: tuple[Any, ...] = ()

    def allows(self, value: Any) -> bool:
        """Return whether a value is neutral. True does not equal 1, and null entries of an object count as absent."""
        if isinstance(value, dict):
            value = {name: entry for name, entry in value.items() if entry is not None}
        return any(type(value) is type(neutral) and value == neutral for neutral in self.neutral)


class StrictModel(BaseModel):
    """A JSON object that may only have known fields. An explicit null equals an absent field.

    A model that is the default of a field should be frozen, because pydantic copies a default without a hash for each
    request.

    Attributes:
        ignored: names of fields that never change the answer. They are accepted with any value.
        refused: fields that would change the answer. They are refused by name unless their value is neutral.
    """

    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, Refusal]] = {}

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @property
    def left_out(self) -> Sequence[str]:
        """Place and kind of each part of the request that is left out: it is not supported and changes no answer."""
        return ()

    @model_validator(mode="before")
    @classmethod
    def _drop_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for name, value in data.items():
            if value is None or name in cls.ignored:
                continue
            refusal = cls.refused.get(name)
            if refusal is None:
                kept[name] = value
            elif not refusal.allows(value):
                raise PydanticCustomError("unsupported", "{reason}", {"reason": refusal.reason, "field": (name,)})
        return kept


def string_or_list(value: Any) -> str | None:
    """Discriminator of a field that is a string or a list. Names in ``<>`` do not appear in an error's ``param``."""
    if isinstance(value, str):
        return "<string>"
    return "<list>" if isinstance(value, list) else None


def typed_by(*kinds: str) -> tuple[Discriminator, BeforeValidator]:
    """Return the annotations of a union of objects by their ``type``. The tag of each member is its type in ``<>``."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in kinds:
            if value.get("type") is None:
                raise rejected("is required", "type")
            raise rejected(f"must be one of {', '.join(map(repr, kinds))}", "type")
        return value

    def form(value: Any) -> str | None:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return f"<{kind}>" if kind in kinds else None

    wanted = Discriminator(form, custom_error_type="rejected", custom_error_message="must be an object with a 'type'")
    return wanted, BeforeValidator(check)


def rejected(reason: str, *field: str | int) -> PydanticCustomError:
    """Return an error for a validator. ``reason`` follows the field's name; ``field`` is a path below that field."""
    return PydanticCustomError("rejected", reason, {"field": field})
