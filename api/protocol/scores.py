"""Score bodies: body of ``POST /v1/score``, for the probabilities of labels after a query joined with each item."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, model_validator

from ...engine.types import Priority
from .adapter_parts import ModelName
from .base import StrictModel, rejected, string_or_list
from .pooled import PairRequest
from .sampling import CacheKey, PriorityName, Salt, priority_of

MAX_ITEMS = 1000
MAX_LABELS = 4096

TokenIds = list[Annotated[int, Field(ge=0)]]
Text = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[TokenIds, Tag("<list>")],
    Discriminator(
        string_or_list, custom_error_type="rejected", custom_error_message="must be a string or a list of token ids"
    ),
]
Items = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[Text], Field(min_length=1, max_length=MAX_ITEMS), Tag("<list>")],
    Discriminator(
        string_or_list,
        custom_error_type="rejected",
        custom_error_message="must be a string, or a list of strings or of lists of token ids",
    ),
]


def _score_form(value: Any) -> str:
    """Return the form of a body of ``/v1/score``, parsed or a model.

    In vLLM's form it has two texts or lists of texts.
    """
    if isinstance(value, PairRequest):
        return "<pairs>"
    names = value.keys() if isinstance(value, dict) else set()
    is_pairs = not names.isdisjoint(("text_1", "text_2")) or {"queries", "documents"} <= names
    return "<pairs>" if is_pairs else "<labels>"


class ScoreRequest(StrictModel):
    """Body with SGLang's fields. ``labels``, ``logprobs`` and the fields for the cache are extensions.

    Attributes:
        items: one prompt is built for each item: the query, then the item. Items and query are all texts or all token
            ids.
        label_token_ids: tokens whose probabilities after the prompt are returned.
        labels: candidates that replace ``label_token_ids``: texts or token ids, each of any number of tokens.
        apply_softmax: whether to normalize the probabilities over the labels; otherwise they refer to the whole
            vocabulary.
        item_first: whether the item is put before the query.
        logprobs: whether to also return the logprobs of each label's tokens.
    """

    query: Text
    items: Items
    label_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_LABELS)] | None = None
    labels: Annotated[list[Text], Field(min_length=1, max_length=MAX_LABELS)] | None = None
    apply_softmax: bool = False
    item_first: bool = False
    logprobs: bool = False
    model: ModelName | None = None
    prompt_cache_key: CacheKey | None = None
    cache_salt: Salt | None = None
    priority: PriorityName | None = None

    @model_validator(mode="after")
    def _check_kinds(self) -> ScoreRequest:
        if (self.label_token_ids is None) == (self.labels is None):
            if self.labels is not None:
                raise rejected("contradicts 'label_token_ids'", "labels")
            raise rejected("is required", "label_token_ids")
        for index, item in enumerate(self.listed):
            if isinstance(item, str) != isinstance(self.query, str):
                wanted = "a string" if isinstance(self.query, str) else "a list of token ids"
                place = ("items",) if isinstance(self.items, str) else ("items", index)
                raise rejected(f"must be {wanted}, like 'query'", *place)
        return self

    @property
    def listed(self) -> list[str | list[int]]:
        """The items as a list."""
        return [self.items] if isinstance(self.items, str) else self.items

    @property
    def prompts(self) -> list[str | list[int]]:
        """The query joined with each item; all as texts or all as token ids."""
        query = self.query
        if isinstance(query, str):
            texts = [str(item) for item in self.listed]
            return [item + query if self.item_first else query + item for item in texts]
        tokens = [list(item) for item in self.listed if not isinstance(item, str)]
        return [[*item, *query] if self.item_first else [*query, *item] for item in tokens]

    @property
    def endings(self) -> list[str | list[int]]:
        """The labels, as texts or token ids."""
        if self.labels is not None:
            return self.labels
        assert self.label_token_ids is not None
        return [[token] for token in self.label_token_ids]

    @property
    def priority_class(self) -> Priority | None:
        return None if self.priority is None else priority_of(self.priority)

    def item_field(self, index: int) -> str:
        """Return the name of an item's field in the request, for error messages."""
        return "items" if isinstance(self.items, str) else f"items[{index}]"


AnyScoreRequest = Annotated[
    Annotated[ScoreRequest, Tag("<labels>")] | Annotated[PairRequest, Tag("<pairs>")], Discriminator(_score_form)
]
"""A body in SGLang's form or in vLLM's form."""
