"""``POST /v1/score``: probabilities of labels after a query joined with each of several items."""

from __future__ import annotations

import math
import uuid
from typing import Any

from fastapi import APIRouter, Request, Response

from ...engine.serving.label_shares import LabelShares
from ..generate.envelope import json_response
from ..generate.label_reads import LabelReader, asked_models
from ..generate.score_reads import plan_scores
from ..protocol.pooled import PairRequest
from ..protocol.scores import AnyScoreRequest, ScoreRequest
from .decisions import read_labels
from .dependencies import CallerOf, JsonRoute, State
from .pooled import score_pairs

router = APIRouter(route_class=JsonRoute, tags=["decisions"])


@router.post("/v1/score")
async def create_score(body: AnyScoreRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Score labels as continuations of a query joined with each item, or score pairs of texts."""
    if isinstance(body, PairRequest):
        return await score_pairs(body, request, state, caller)
    name, [model] = await asked_models(state, caller, body.model, body.prompt_cache_key, [None], ["model"])
    reader = await plan_scores(body, model, caller)
    response_id = f"score-{uuid.uuid4().hex}"
    await read_labels(state, caller, request, reader, name, response_id)
    return json_response(_score_body(body, name, response_id, reader))


def _score_body(body: ScoreRequest, model: str, response_id: str, reader: LabelReader) -> dict[str, Any]:
    """Return SGLang's scoring response, by item and label."""
    num_prompt = len(reader.request.tokens)
    found: dict[str, Any] = {
        "id": response_id,
        "object": "scoring",
        "model": model,
        "scores": [
            list(LabelShares.of(logprobs).shares) if body.apply_softmax else [math.exp(each) for each in logprobs]
            for logprobs in reader.logprobs
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "prompt_tokens_details": {"cached_tokens": reader.cached},
            "completion_tokens": 0,
            "total_tokens": num_prompt,
        },
    }
    return found | ({"logprobs": reader.by_token} if body.logprobs else {})
