"""Routes of pooled outputs: embeddings, classes, rankings and scores of texts."""

from __future__ import annotations

import base64
import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from ...engine.errors import RequestError
from ...engine.serving.pooled_values import Floats, class_probabilities, embedding, prompt_of
from ...engine.types import Pooler
from ..access.caller import Caller
from ..generate.envelope import json_response
from ..generate.label_reads import LabelReader
from ..generate.pair_scores import TextPair, plan_pairs
from ..generate.pooled_reads import PooledReader, plan_pooled
from ..generate.server_state import ServerState
from ..generate.streams import collect, generate, while_connected
from ..observe.token_usage import UsageCount
from ..protocol.pooled import ClassifyRequest, EmbeddingRequest, PairRequest, PoolingRequest, RerankRequest
from .dependencies import CallerOf, JsonRoute, State, set_facts

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine

router = APIRouter(route_class=JsonRoute, tags=["pooled outputs"])


@router.post("/v1/embeddings")
async def create_embedding(body: EmbeddingRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Embed texts."""
    target = await state.models.find(body.asked_model, caller)
    engine, pooler = target.engine, target.engine.pooler
    _check_dimensions(body.dimensions, pooler)
    reader = await plan_pooled(engine, target.adapter, body, caller, "embed", prompt_of(pooler, body.prompt_name))
    await _read(state, caller, request, reader, target.name, f"embd-{uuid.uuid4().hex}")
    normalizes = pooler.normalizes if body.normalize is None else body.normalize
    vectors = [embedding(each, dimensions=body.dimensions, normalizes=normalizes) for each in reader.pooled]
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    return json_response({"object": "list", "data": data, "model": target.name, "usage": _usage(reader)})


@router.post("/pooling")
async def create_pooling(body: PoolingRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Embed or classify texts, with one form of response for both."""
    target = await state.models.find_pooled(body.asked_model, caller)
    engine, pooler = target.engine, target.pooler
    task = body.task or ("classify" if pooler.labels else "embed")
    if task == "classify" and (name := _first_given(body.dimensions, body.normalize)):
        raise RequestError(f"'{name}' is only allowed for embeddings, not for classification.", param=name)
    _check_dimensions(body.dimensions, pooler)
    before = prompt_of(pooler, None) if task == "embed" else ""
    reader = await plan_pooled(engine, target.adapter, body, caller, task, before)
    response_id = f"pool-{uuid.uuid4().hex}"
    await _read(state, caller, request, reader, target.name, response_id)
    normalizes = pooler.normalizes if body.normalize is None else body.normalize
    vectors = [
        class_probabilities(each, pooler)
        if task == "classify"
        else embedding(each, dimensions=body.dimensions, normalizes=normalizes)
        for each in reader.pooled
    ]
    data = [
        {"index": index, "object": "pooling", "data": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    return json_response(_listed(response_id, target.name, data, reader))


@router.post("/classify", include_in_schema=False)
@router.post("/v1/classify")
async def create_classification(body: ClassifyRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Classify texts with the model's classification head."""
    target = await state.models.find(body.asked_model, caller)
    engine = target.engine
    reader = await plan_pooled(engine, target.adapter, body, caller, "classify")
    response_id = f"classify-{uuid.uuid4().hex}"
    await _read(state, caller, request, reader, target.name, response_id)
    data = [_class(engine, index, pooled) for index, pooled in enumerate(reader.pooled)]
    return json_response(_listed(response_id, target.name, data, reader))


@router.post("/score")
async def create_pair_scores(body: PairRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Score pairs of texts: how relevant the second text is to the first."""
    return await score_pairs(body, request, state, caller)


async def score_pairs(body: PairRequest, request: Request, state: ServerState, caller: Caller) -> Response:
    """Answer a request to ``/score``."""
    target = await state.models.find_pooled(body.asked_model, caller)
    queries, documents = body.listed
    one = len(queries) == 1
    pairs = [
        TextPair(queries[0 if one else at], document, _place("text_1", body.text_1, at), f"text_2[{at}]")
        for at, document in enumerate(documents)
    ]
    plan = await plan_pairs(target, pairs, body, caller, body.instruction)
    response_id = f"score-{uuid.uuid4().hex}"
    await _read(state, caller, request, plan.reader, target.name, response_id)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(plan.scores())]
    return json_response(_listed(response_id, target.name, data, plan.reader))


def _place(field: str, given: str | list[str], index: int) -> str:
    return field if isinstance(given, str) or len(given) == 1 else f"{field}[{index}]"


@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/v1/rerank")
async def create_ranking(body: RerankRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Rank documents by their relevance to a query."""
    target = await state.models.find_pooled(body.asked_model, caller)
    documents = enumerate(body.texts)
    pairs = [TextPair(body.query, text, "query", f"documents[{index}]") for index, text in documents]
    plan = await plan_pairs(target, pairs, body, caller, body.instruction)
    response_id = f"rerank-{uuid.uuid4().hex}"
    await _read(state, caller, request, plan.reader, target.name, response_id)
    scores = plan.scores()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    texts = body.texts
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": texts[index]}} if body.return_documents else {})
        for index in order
    ]
    return json_response({"id": response_id, "model": target.name, "usage": _usage(plan.reader), "results": results})


def _check_dimensions(dimensions: int | None, pooler: Pooler) -> None:
    if dimensions is not None and pooler.size and dimensions > pooler.size:
        raise RequestError(
            f"'dimensions' must be at most {pooler.size}, the size of an embedding, not {dimensions}.",
            param="dimensions",
        )


def _first_given(dimensions: int | None, normalize: bool | None) -> str | None:
    return "dimensions" if dimensions is not None else "normalize" if normalize is not None else None


def _listed(
    response_id: str, model: str, data: list[dict[str, Any]], reader: PooledReader | LabelReader
) -> dict[str, Any]:
    """Build vLLM's response for a list of texts or pairs."""
    facts = {"id": response_id, "object": "list", "created": int(time.time()), "model": model}
    return facts | {"data": data, "usage": _usage(reader)}


async def _read(
    state: ServerState,
    caller: Caller,
    request: Request,
    reader: PooledReader | LabelReader,
    model: str,
    response_id: str,
) -> None:
    """Run all sequences of a request as one admitted request."""
    set_facts(caller, [reader.request], model=model, stream=False, response_id=response_id)
    deltas = generate(state, reader, [reader.request], caller, usage=UsageCount())
    await while_connected(request.receive, collect(deltas))


def _usage(reader: PooledReader | LabelReader) -> dict[str, Any]:
    num_prompt = len(reader.request.tokens)
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt,
        "prompt_tokens_details": {"cached_tokens": reader.cached},
    }


def _encoded(vector: Floats, encoding_format: str) -> str | list[float]:
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    found: list[float] = vector.tolist()
    return found


def _class(engine: AsyncEngine, index: int, pooled: bytes) -> dict[str, Any]:
    """Build vLLM's classification of one text."""
    shares = class_probabilities(pooled, engine.pooler)
    named = engine.pooler.labels
    best = int(shares.argmax())
    label = named[best] if len(named) == len(shares) else f"LABEL_{best}"
    return {"index": index, "label": label, "probs": shares.tolist(), "num_classes": len(shares)}
