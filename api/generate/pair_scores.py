"""Pair scores: plans the prompts with which a model scores pairs of texts, and computes the scores from the results."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ...engine.errors import ContextTooLong, RequestError
from ...engine.serving.label_shares import LabelShares
from ...engine.serving.pair_scoring import DOCUMENT_PROMPTS, QUERY_PROMPTS, head_score, pair_scoring, prompt_name_of
from ...engine.serving.pooled_values import embedding, prompt_of
from ...engine.serving.request import TextRequest
from ...engine.serving.request_threads import on_request_thread
from ...engine.types import Pooler, Pooling
from ..access.caller import Caller
from ..protocol.pooled import PooledFields
from .label_reads import LabelReader
from .model_directory import ModelTarget
from .pooled_reads import PooledReader, pooled_request, text_request
from .rerank_reads import plan_rerank


@dataclass(frozen=True, slots=True)
class TextPair:
    """A query and a document, with the names of their fields in the request."""

    query: str
    document: str
    query_field: str
    document_field: str


@dataclass(frozen=True, slots=True)
class PairReader:
    """Computes the prompts of one request's pairs, and the pairs' scores.

    Attributes:
        reader: computes all prompts.
        scores: returns the score of each pair; must be called after the stream has ended.
    """

    reader: PooledReader | LabelReader
    scores: Callable[[], list[float]]


async def plan_pairs(
    target: ModelTarget, pairs: Sequence[TextPair], body: PooledFields, caller: Caller, instruction: str | None = None
) -> PairReader:
    """Build the reader that scores pairs.

    Args:
        instruction: a description of relevant documents, for a causal model that is asked in words.

    Raises:
        RequestError: the model cannot score pairs, or an instruction is given to a model that is not asked in words.
        ContextTooLong: a pair does not fit.
    """
    scoring = pair_scoring(target.pooler)
    if instruction is not None and scoring != "words":
        raise RequestError(
            "'instruction' needs a model that is prompted (a causal language model).", param="instruction"
        )
    if scoring == "words":
        texts = [(each.query, each.document, each.document_field) for each in pairs]
        words = await plan_rerank(target, texts, body, caller, instruction)
        return PairReader(words, lambda: [LabelShares.of(logprobs).shares[0] for logprobs in words.logprobs])
    plan = _by_head if scoring == "head" else _by_embeddings
    # Thousands of texts are encoded. On the event loop this would block other streams.
    return await on_request_thread(partial(plan, target, pairs, body, caller))


def _by_head(target: ModelTarget, pairs: Sequence[TextPair], body: PooledFields, caller: Caller) -> PairReader:
    base = pooled_request(body, target.adapter, caller, "classify")
    reader = PooledReader(target.engine, [_pair_request(target, base, each) for each in pairs], caller)
    pooler = target.engine.pooler
    return PairReader(reader, lambda: [head_score(each, pooler) for each in reader.pooled])


def _pair_request(target: ModelTarget, base: TextRequest, pair: TextPair) -> TextRequest:
    """Return a request with both texts in one prompt, joined as the tokenizer specifies."""
    engine = target.engine
    longest = engine.pooler.max_length or engine.max_model_len
    try:
        engine.check_length(pair.query)
        engine.check_length(pair.document)
        tokens: array[int] = engine.tokenizer.encode_pair(pair.query, pair.document)
        if len(tokens) > longest:
            raise ContextTooLong(len(tokens), 0, longest)
        return engine.limits.check(replace(base, tokens=tokens))
    except RequestError as error:
        error.param = pair.document_field
        raise


def _by_embeddings(target: ModelTarget, pairs: Sequence[TextPair], body: PooledFields, caller: Caller) -> PairReader:
    """Build the reader that embeds each text once, with the checkpoint's prompt for queries or for documents."""
    pooling: Pooling = "embed"
    base, pooler = pooled_request(body, target.adapter, caller, pooling), target.engine.pooler
    before = _prompt(pooler, QUERY_PROMPTS), _prompt(pooler, DOCUMENT_PROMPTS)
    places: dict[tuple[str, str], int] = {}
    requests: list[TextRequest] = []

    def place(prompt: str, text: str, field: str) -> int:
        if (prompt, text) not in places:
            places[prompt, text] = len(requests)
            requests.append(text_request(target.engine, base, field, text, prompt))
        return places[prompt, text]

    found = [
        (place(before[0], each.query, each.query_field), place(before[1], each.document, each.document_field))
        for each in pairs
    ]
    reader = PooledReader(target.engine, requests, caller)
    return PairReader(reader, partial(_cosines, reader, found))


def _prompt(pooler: Pooler, names: Sequence[str]) -> str:
    return prompt_of(pooler, prompt_name_of(pooler, names))


def _cosines(reader: PooledReader, pairs: Sequence[tuple[int, int]]) -> list[float]:
    vectors = [embedding(each, dimensions=None, normalizes=True).astype(np.float64) for each in reader.pooled]
    return [float(vectors[first] @ vectors[second]) for first, second in pairs]
