"""Request fields for structured output: response_format, structured_outputs, guided_*, regex, ebnf."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from .base import FormatName, StrictModel, rejected
from .sampling import SamplingFields


def _check_schema(value: Any) -> Any:
    if not isinstance(value, dict | bool):
        raise rejected("must be a JSON Schema: an object or a boolean")
    return value


def _check_schema_or_text(value: Any) -> Any:
    if not isinstance(value, dict | bool | str):
        raise rejected("must be a JSON Schema, as an object, a boolean or their JSON text")
    return value


def _check_tag(value: Any) -> Any:
    if not isinstance(value, dict | str):
        raise rejected("must be a structural tag, as an object or its JSON text")
    return value


Schema = Annotated[Any, AfterValidator(_check_schema)]
SchemaOrText = Annotated[Any, AfterValidator(_check_schema_or_text)]


class JsonSchemaFormat(StrictModel):
    """A named schema. It is enforced even if ``strict`` is not set."""

    name: FormatName | None = None
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool = False


class ResponseFormat(StrictModel):
    """OpenAI's ``response_format``, and XGrammar's structural tags in the current (``format``) and the older syntax."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[Any] | None = None
    triggers: list[Any] | None = None

    @model_validator(mode="after")
    def _check_type(self) -> ResponseFormat:
        fields = {"json_schema": "json_schema"} | dict.fromkeys(("format", "structures", "triggers"), "structural_tag")
        for name, kind in fields.items():
            if getattr(self, name) is not None and self.type != kind:
                raise rejected(f"is only allowed with the type '{kind}', not with '{self.type}'", name)
        if self.type == "json_schema" and self.json_schema is None:
            raise rejected("is required where 'type' is 'json_schema'", "json_schema")
        if self.type == "structural_tag":
            self._check_tag()
        return self

    def _check_tag(self) -> None:
        if self.format is not None and self.structures is not None:
            raise rejected("contradicts 'format'", "structures")
        if self.format is None and self.structures is None:
            raise rejected("is required where 'type' is 'structural_tag'", "format")
        if (self.structures is None) != (self.triggers is None):
            raise rejected("is required with 'structures', and only then", "triggers")

    def tag(self) -> dict[str, Any]:
        return self.model_dump(include={"format", "structures", "triggers"}, exclude_none=True)


class StructuredOutputs(StrictModel):
    """vLLM's ``structured_outputs``. Exactly one of the fields is set."""

    json_: SchemaOrText | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: Annotated[Any, AfterValidator(_check_tag)] = None

    @model_validator(mode="after")
    def _check_one(self) -> StructuredOutputs:
        if len(self.given) > 1:
            raise rejected(f"contradicts '{self.given[0]}'", self.given[1])
        if not self.given:
            raise rejected("must contain exactly one of json, regex, choice, grammar, json_object and structural_tag")
        return self

    @property
    def given(self) -> list[str]:
        """Names of the fields that are set."""
        values = {name.rstrip("_"): getattr(self, name) for name in type(self).model_fields}
        values["json_object"] = values["json_object"] or None
        return [name for name, value in values.items() if value is not None]


_FORMAT_FIELDS = (
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("regex", "ebnf"),
)


class StructuredFields(SamplingFields):
    """Fields of chats and completions for structured output. At most one of them may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    field_probabilities: bool = False

    @model_validator(mode="after")
    def _check_one_format(self) -> StructuredFields:
        fields = self.format_fields
        if len(fields) > 1:
            raise rejected(f"contradicts '{fields[0]}'", fields[1])
        if fields and self.include_stop_str_in_output:
            raise rejected(f"cannot be used with '{fields[0]}'", "include_stop_str_in_output")
        if self.field_probabilities and not self._has_schema:
            raise rejected(
                "needs a JSON Schema for the answer, for example in 'response_format'", "field_probabilities"
            )
        return self

    @property
    def _has_schema(self) -> bool:
        outputs, form = self.structured_outputs, self.response_format
        if self.guided_json is not None or (outputs is not None and outputs.json_ is not None):
            return True
        return form is not None and form.json_schema is not None

    @property
    def format_fields(self) -> list[str]:
        """Names of the set fields that request an output format."""
        given = [name for name in _FORMAT_FIELDS if getattr(self, name) is not None]
        plain = self.response_format is not None and self.response_format.type == "text"
        return [name for name in given if not (plain and name == "response_format")]
