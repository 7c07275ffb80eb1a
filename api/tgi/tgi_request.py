"""TGI request: bodies of Text Generation Inference, and their translation to completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from ...engine.types import MAX_LOGPROBS, MAX_TOKEN_COUNT
from ..generate.field_names import FieldNames
from ..protocol.adapter_parts import ModelName
from ..protocol.base import Refusal, StrictModel, rejected
from ..protocol.completions import CompletionRequest

MAX_STOPS = 128
_SAMPLING = ("temperature", "top_k", "top_p", "seed", "repetition_penalty")
NAMES = FieldNames(
    (r"^(guided_json|guided_regex)\b", "parameters.grammar"),
    (r"^max_tokens$", "parameters.max_new_tokens"),
    (r"^prompt$", "inputs"),
    (rf"^({'|'.join(_SAMPLING)}|frequency_penalty|stop)$", r"parameters.\1"),
    parts={"guided_json": "grammar", "guided_regex": "grammar", "max_tokens": "max_new_tokens"},
)
"""Names of a completion's fields in Text Generation Inference."""


class TgiGrammar(StrictModel):
    """Format of the answer: a JSON Schema, a JSON Schema with a name, or a regular expression."""

    type: Literal["json", "regex", "json_schema"]
    value: Any

    @model_validator(mode="after")
    def _check_value(self) -> TgiGrammar:
        if self.type == "regex" and not isinstance(self.value, str):
            raise rejected("must be a regular expression", "value")
        if self.type == "json" and not isinstance(self.value, dict | bool | str):
            raise rejected("must be a JSON Schema", "value")
        if self.type == "json_schema" and not (
            isinstance(self.value, dict) and isinstance(self.value.get("schema"), dict | bool)
        ):
            raise rejected("must be an object with a 'schema'", "value")
        return self


class TgiSampling(StrictModel):
    """Sampling parameters."""

    do_sample: bool = False
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(gt=0)] | None = None
    top_k: Annotated[int, Field(ge=1)] | None = None
    top_p: float | None = None

    @property
    def is_greedy(self) -> bool:
        return not (self.do_sample or self.temperature or self.top_k or self.top_p)


class TgiParameters(TgiSampling):
    """Parameters of a request. Without ``do_sample`` or any sampling option, decoding is greedy.

    Attributes:
        truncate: largest number of tokens of the prompt; the beginning of a longer prompt is cut off.
    """

    refused: ClassVar[Mapping[str, Refusal]] = {
        "best_of": Refusal("only one answer is generated.", (1,)),
        "decoder_input_details": Refusal("prompt tokens are not reported here: use /v1/completions.", (False,)),
        "typical_p": Refusal("this sampling method is not supported: remove it.", (1, 1.0)),
        "watermark": Refusal("watermarks are not supported.", (False,)),
    }

    adapter_id: ModelName | None = None
    details: bool = False
    grammar: TgiGrammar | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_COUNT)] = 100
    return_full_text: bool = False
    stop: Annotated[list[str], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    top_n_tokens: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    truncate: Annotated[int, Field(ge=1, le=MAX_TOKEN_COUNT)] | None = None


class TgiRequest(StrictModel):
    """Body of all routes. Only ``/`` reads ``stream``."""

    inputs: str
    parameters: TgiParameters = Field(default_factory=TgiParameters)
    stream: bool = False

    def as_completion(self, prompt: str | list[int], *, stream: bool) -> CompletionRequest:
        """Translate to a completion of a prompt. Free text may contain stop strings. Raises RequestValidationError."""
        given = self.parameters
        fields: dict[str, Any] = {
            **{name: value for name in _SAMPLING if (value := getattr(given, name)) is not None},
            "model": given.adapter_id,
            "prompt": prompt,
            "max_tokens": given.max_new_tokens,
            "frequency_penalty": given.frequency_penalty,
            "stop": given.stop,
            "include_stop_str_in_output": given.grammar is None,
            "logprobs": given.top_n_tokens,
            "stream": stream,
        }
        if given.is_greedy:
            fields["temperature"] = 0.0
        match given.grammar:
            case TgiGrammar(type="regex", value=value):
                fields["guided_regex"] = value
            case TgiGrammar(type="json", value=value):
                fields["guided_json"] = value
            case TgiGrammar(value=value):
                fields["guided_json"] = value["schema"]
        with NAMES.naming_invalid():
            return CompletionRequest.model_validate(fields)
