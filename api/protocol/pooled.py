"""Pooled bodies: bodies of ``POST /v1/embeddings``, ``/pooling``, ``/v1/classify``, ``/v1/rerank`` and ``/score``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from ...engine.types import Priority
from .adapter_parts import AdapterFields
from .base import StrictModel, rejected, string_or_list
from .chat_messages import MAX_NAME
from .sampling import PriorityName, Salt, priority_of

MAX_TEXTS = 2048
MAX_DIMENSIONS = 1 << 16

TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


def _input_form(value: Any) -> str | None:
    if not isinstance(value, list):
        return string_or_list(value)
    first = value[0] if value else None
    if isinstance(first, list):
        return "<token lists>"
    return "<tokens>" if type(first) is int else "<strings>"


Texts = Annotated[
    Annotated[str, Tag("<string>"), Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Tag("<strings>"), Field(min_length=1, max_length=MAX_TEXTS)]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[list[TokenIds], Tag("<token lists>"), Field(max_length=MAX_TEXTS)],
    Discriminator(
        _input_form,
        custom_error_type="rejected",
        custom_error_message="must be a string, a list of strings, a list of token ids or a list of such lists",
    ),
]


class PooledFields(AdapterFields):
    """Fields of all requests whose answer is not text. ``cache_salt`` and ``priority`` are extensions."""

    ignored: ClassVar[frozenset[str]] = frozenset({"user", "safety_identifier"})

    cache_salt: Salt | None = None
    priority: PriorityName | None = None

    @property
    def priority_class(self) -> Priority | None:
        return None if self.priority is None else priority_of(self.priority)


class InputFields(PooledFields):
    """Fields of requests whose ``input`` consists of texts or token ids."""

    input: Texts

    @property
    def listed(self) -> list[str | list[int]]:
        """The input as a list."""
        if isinstance(self.input, str) or isinstance(self.input[0], int):
            return [self.input]
        return self.input  # type: ignore[return-value]

    def place(self, index: int) -> str:
        """Return the name of an input's field in the request, for error messages."""
        return f"input[{index}]" if self.listed is self.input else "input"


class EmbeddingRequest(InputFields):
    """Body of an embeddings request with OpenAI's fields. ``normalize`` and ``prompt_name`` are extensions.

    Attributes:
        dimensions: number of leading values to return; they are scaled to length 1 again.
        normalize: whether embeddings are scaled to length 1; by default as the checkpoint specifies.
        prompt_name: name of the checkpoint's prompt that is put before each text; by default the checkpoint's default
            prompt.
    """

    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    normalize: bool | None = None
    prompt_name: Annotated[str, Field(max_length=MAX_NAME)] | None = None


class ClassifyRequest(InputFields):
    """Body of a classification request with vLLM's fields."""


class PoolingRequest(InputFields):
    """Body of a pooling request with vLLM's fields. ``normalize`` has the same meaning as in ``EmbeddingRequest``.

    Attributes:
        task: ``embed`` for embeddings, ``classify`` for class probabilities; by default the task that the model offers.
    """

    task: Literal["embed", "classify"] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    normalize: bool | None = None


PairTexts = Annotated[
    Annotated[str, Tag("<string>"), Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Tag("<list>"), Field(min_length=1, max_length=MAX_TEXTS)],
    Discriminator(
        string_or_list, custom_error_type="rejected", custom_error_message="must be a string or a list of strings"
    ),
]


class PairRequest(PooledFields):
    """Body of ``/score`` with vLLM's fields. ``queries`` and ``documents`` are other names of the texts.

    Attributes:
        text_1: queries: one query for all texts of ``text_2``, or one query for each of them.
        instruction: a description of relevant documents, for causal models that are asked in words.
    """

    text_1: PairTexts
    text_2: PairTexts
    instruction: Annotated[str, Field(pattern=r"\S")] | None = None

    @model_validator(mode="before")
    @classmethod
    def _rename(cls, given: Any) -> Any:
        """Accept the texts under their other names, if both have these names."""
        if not isinstance(given, dict) or not {"queries", "documents"} <= given.keys() or "text_1" in given:
            return given
        return {{"queries": "text_1", "documents": "text_2"}.get(name, name): value for name, value in given.items()}

    @model_validator(mode="after")
    def _check_numbers(self) -> PairRequest:
        queries, documents = self.listed
        if len(queries) not in (1, len(documents)):
            raise rejected(f"must be one text, or as many texts as 'text_2': {len(documents)}", "text_1")
        return self

    @property
    def listed(self) -> tuple[list[str], list[str]]:
        """The texts as lists."""
        texts = self.text_1, self.text_2
        queries, documents = ([each] if isinstance(each, str) else each for each in texts)
        return queries, documents


class RerankDocument(StrictModel):
    """A document that consists of a text only."""

    text: Annotated[str, Field(min_length=1)]


Documents = Annotated[
    list[
        Annotated[
            Annotated[str, Tag("<string>"), Field(min_length=1)] | Annotated[RerankDocument, Tag("<object>")],
            Discriminator(
                lambda value: "<string>" if isinstance(value, str) else "<object>" if isinstance(value, dict) else None,
                custom_error_type="rejected",
                custom_error_message="must be a string or an object with a 'text'",
            ),
        ]
    ],
    Field(min_length=1, max_length=MAX_TEXTS),
]


class RerankRequest(PooledFields):
    """Body of a rerank request with Cohere's and Jina's fields. ``instruction`` is an extension.

    Attributes:
        top_n: number of best documents to return.
        instruction: a description of relevant documents, for causal models that are asked in words.
    """

    query: Annotated[str, Field(min_length=1)]
    documents: Documents
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = True
    instruction: str | None = None

    @model_validator(mode="after")
    def _check_instruction(self) -> RerankRequest:
        if self.instruction is not None and not self.instruction.strip():
            raise rejected("must not be empty", "instruction")
        return self

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]
