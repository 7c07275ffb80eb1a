"""``POST /v1/embeddings``, ``/v1/classify`` and ``/v1/rerank``: what a model gives of texts beside tokens."""

from __future__ import annotations

import base64
import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from ...engine.errors import RequestError
from ...engine.serving.label_shares import LabelShares
from ...engine.serving.pooled_values import Floats, class_probabilities, embedding, prompt_of
from ..access.caller import Caller
from ..generate.envelope import json_response
from ..generate.label_reads import LabelReader
from ..generate.pooled_reads import PooledReader, plan_pooled
from ..generate.rerank_reads import plan_rerank
from ..generate.server_state import ServerState
from ..generate.streams import collect, generate, while_connected
from ..observe.token_usage import UsageCount
from ..protocol.pooled import ClassifyRequest, EmbeddingRequest, RerankRequest
from .dependencies import CallerOf, JsonRoute, State, set_facts

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine

router = APIRouter(route_class=JsonRoute, tags=["pooled outputs"])


@router.post("/v1/embeddings")
async def create_embedding(body: EmbeddingRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Embed texts."""
    target = await state.models.find(body.asked_model, caller)
    engine, pooler = target.engine, target.engine.pooler
    if body.dimensions is not None and pooler.size and body.dimensions > pooler.size:
        raise RequestError(
            f"'dimensions' must be at most {pooler.size}, not {body.dimensions}: a hidden state has so many values.",
            param="dimensions",
        )
    reader = await plan_pooled(engine, target.adapter, body, caller, "embed", prompt_of(pooler, body.prompt_name))
    await _read(state, caller, request, reader, target.name, f"embd-{uuid.uuid4().hex}")
    normalizes = pooler.normalizes if body.normalize is None else body.normalize
    vectors = [embedding(each, dimensions=body.dimensions, normalizes=normalizes) for each in reader.pooled]
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    return json_response({"object": "list", "data": data, "model": target.name, "usage": _usage(reader)})


@router.post("/v1/classify")
async def create_classification(body: ClassifyRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Classify texts by the model's classification head."""
    target = await state.models.find(body.asked_model, caller)
    engine = target.engine
    reader = await plan_pooled(engine, target.adapter, body, caller, "classify")
    response_id = f"classify-{uuid.uuid4().hex}"
    await _read(state, caller, request, reader, target.name, response_id)
    data = [_class(engine, index, pooled) for index, pooled in enumerate(reader.pooled)]
    return json_response(
        {
            "id": response_id,
            "object": "list",
            "created": int(time.time()),
            "model": target.name,
            "data": data,
            "usage": _usage(reader),
        }
    )


@router.post("/v1/rerank")
async def create_ranking(body: RerankRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Order documents by how relevant they are to a query."""
    target = await state.models.find(body.asked_model, caller)
    reader = await plan_rerank(target, body, caller)
    response_id = f"rerank-{uuid.uuid4().hex}"
    await _read(state, caller, request, reader, target.name, response_id)
    scores = [LabelShares.of(logprobs).shares[0] for logprobs in reader.logprobs]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    texts = body.texts
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": texts[index]}} if body.return_documents else {})
        for index in order
    ]
    return json_response({"id": response_id, "model": target.name, "usage": _usage(reader), "results": results})


async def _read(
    state: ServerState,
    caller: Caller,
    request: Request,
    reader: PooledReader | LabelReader,
    model: str,
    response_id: str,
) -> None:
    """Run all of a request as one that is admitted."""
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
    """Return vLLM's answer for a text."""
    shares = class_probabilities(pooled, engine.pooler)
    named = engine.pooler.labels
    best = int(shares.argmax())
    label = named[best] if len(named) == len(shares) else f"LABEL_{best}"
    return {"index": index, "label": label, "probs": shares.tolist(), "num_classes": len(shares)}
