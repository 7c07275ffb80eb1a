"""Infer tensors: bodies of the Open Inference Protocol, version 2.

The tensors hold texts and options of completions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import orjson
from pydantic import Field, model_validator

from ..exact_json import loads_exact
from .base import MAX_ID, Id, StrictModel, rejected
from .completions import MAX_PROMPTS

INPUTS: dict[str, tuple[str, list[int]]] = {
    "text_input": ("BYTES", [-1]),
    "stream": ("BOOL", [1]),
    "sampling_parameters": ("BYTES", [1]),
    "exclude_input_in_output": ("BOOL", [1]),
}
"""Name, datatype and shape of the input tensors. The names are those of Triton's backends for language models."""
OUTPUTS: dict[str, tuple[str, list[int]]] = {
    "text_output": ("BYTES", [-1]),
    "finish_reason": ("BYTES", [-1]),
    "num_input_tokens": ("UINT32", [-1]),
    "num_output_tokens": ("UINT32", [-1]),
}
_NOT_OPTIONS = frozenset(("prompt", "model", "stream", "n", "echo", "stream_options", "logprobs"))
_NEUTRAL: Mapping[str, tuple[type, ...]] = {
    "binary_data_output": (bool,),
    "priority": (int,),
    "sequence_end": (bool,),
    "sequence_id": (int, str),
    "sequence_start": (bool,),
    "timeout": (int,),
    "triton_enable_empty_final_response": (bool,),
}
"""Types of Triton's parameters that never change the answer here.

A priority given as text is an option of completions.
"""
MAX_UINT64 = (1 << 64) - 1
MAX_TENSORS = 16


class InferTensor(StrictModel):
    """An input tensor. Its values are a flat list, or lists nested according to its shape."""

    ignored: ClassVar[frozenset[str]] = frozenset({"parameters"})

    name: Id
    datatype: Id
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=8)]
    data: list[Any]

    @property
    def values(self) -> list[Any]:
        """The values as a flat list."""
        return [each for value in self.data for each in (value if isinstance(value, list) else [value])]


class InferOutput(StrictModel):
    """An output that the client requests."""

    ignored: ClassVar[frozenset[str]] = frozenset({"parameters"})

    name: Id


class InferRequest(StrictModel):
    """Body of ``POST /v2/models/{name}/infer``. Options are in ``sampling_parameters`` (JSON) or in ``parameters``."""

    id: Id = ""
    parameters: dict[str, Any] = Field(default_factory=dict)
    inputs: Annotated[list[InferTensor], Field(min_length=1, max_length=MAX_TENSORS)]
    outputs: Annotated[list[InferOutput], Field(max_length=MAX_TENSORS)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_tensors(self) -> InferRequest:
        names = [each.name for each in self.inputs]
        for number, tensor in enumerate(self.inputs):
            if tensor.name not in INPUTS or names.index(tensor.name) != number:
                raise rejected(f"must be one of {', '.join(INPUTS)}, each once", "inputs", number, "name")
            kind = INPUTS[tensor.name][0]
            if tensor.datatype != kind:
                raise rejected(f"must be {kind}", "inputs", number, "datatype")
            self._check_data(number, tensor, str if kind == "BYTES" else bool)
        if "text_input" not in names:
            raise rejected("must have a tensor 'text_input'", "inputs")
        for number, output in enumerate(self.outputs):
            if output.name not in OUTPUTS:
                raise rejected(f"must be one of {', '.join(OUTPUTS)}", "outputs", number, "name")
        self.options  # noqa: B018 - checked before it is used
        return self

    @staticmethod
    def _check_data(number: int, tensor: InferTensor, kind: type) -> None:
        count = 1
        for size in tensor.shape:
            count *= size
        most = MAX_PROMPTS if tensor.name == "text_input" else 1
        if not 1 <= count <= most:
            raise rejected(f"must have 1 to {most} values in all", "inputs", number, "shape")
        values = tensor.values
        if len(values) != count or any(type(value) is not kind for value in values):
            what = "strings" if kind is str else "booleans"
            raise rejected(f"must have as many {what} as 'shape' says: {count}", "inputs", number, "data")

    def _one(self, name: str) -> Any:
        return next((tensor.values[0] for tensor in self.inputs if tensor.name == name), None)

    @property
    def texts(self) -> list[str]:
        """The prompts."""
        return next(tensor.values for tensor in self.inputs if tensor.name == "text_input")

    @property
    def wants_stream(self) -> bool:
        return bool(self._one("stream"))

    @property
    def echoes(self) -> bool:
        """Whether an answer begins with its prompt.

        Clients request this by the value false of ``exclude_input_in_output``.
        """
        return self._one("exclude_input_in_output") is False

    @property
    def wanted(self) -> list[str]:
        """Names of the requested outputs; the text output if none is named."""
        return [each.name for each in self.outputs] or ["text_output"]

    @property
    def options(self) -> Mapping[str, Any]:
        """The options as fields of a completion.

        Raises PydanticCustomError for an option that has a tensor of its own.
        """
        text = self._one("sampling_parameters")
        try:
            given = {} if text is None else loads_exact(text.encode())
        except (orjson.JSONDecodeError, UnicodeEncodeError):
            given = None
        if not isinstance(given, dict):
            raise rejected("must be a JSON object", "sampling_parameters")
        options = {name: value for name, value in self.parameters.items() if not _is_neutral(name, value)} | given
        for name in options:
            if name in _NOT_OPTIONS:
                raise rejected("is not a parameter: the tensors and the path set it", "sampling_parameters", name)
        return options

    def completion_fields(self, model: str) -> dict[str, Any]:
        """Return the fields of the completion request that this request represents."""
        return {**self.options, "model": model, "prompt": self.texts, "echo": self.echoes}


class RepositoryRequest(StrictModel):
    """Body of the index request. With ``ready``, models and adapters that are not loaded are left out."""

    ready: bool = False


class RepositoryLoadRequest(StrictModel):
    """Body of a load request. ``lora_path`` in ``parameters`` is the path of the adapter; the default is its name."""

    parameters: dict[str, Any] = Field(default_factory=dict)


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a parameter never changes the answer. Raises PydanticCustomError for a wrong type or range."""
    kinds = _NEUTRAL.get(name)
    if kinds is None or (name == "priority" and isinstance(value, str)):
        return False
    if value is None:
        return True
    if type(value) not in kinds:
        words = " or ".join({bool: "a boolean", int: "an integer", str: "a string"}[kind] for kind in kinds)
        raise rejected(f"must be {words}", "parameters", name)
    if type(value) is int and not 0 <= value <= MAX_UINT64:
        raise rejected(f"must be from 0 to {MAX_UINT64}", "parameters", name)
    if isinstance(value, str) and len(value) > MAX_ID:
        raise rejected(f"must have at most {MAX_ID} characters", "parameters", name)
    return True
