"""``POST /v1/decisions`` and ``POST /v1/systemone``: typed questions about one input, answered with probabilities."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request, Response

from ...engine.serving.calibration import question_digest
from ...engine.serving.calibration_folder import NamedCalibration
from ...engine.serving.label_shares import LabelShares
from ...engine.serving.request_threads import on_request_thread
from ...engine.text.questions import TypedQuestion
from ...engine.types import Priority
from ..access.caller import Caller
from ..generate.decision_answers import decision_body, decision_usage, system_one_body
from ..generate.envelope import json_response
from ..generate.label_reads import AskedModel, LabelReader, asked_models, plan_reads
from ..generate.server_state import ServerState
from ..generate.streams import collect, generate, while_connected
from ..large_bodies import beside_loop
from ..observe.token_usage import UsageCount
from ..protocol.decisions import DecisionRequest
from ..protocol.sampling import PriorityName, priority_of
from ..protocol.system_one import SystemOneRequest
from .dependencies import CallerOf, JsonRoute, State, set_facts

router = APIRouter(route_class=JsonRoute, tags=["decisions"])


@router.post("/v1/decisions")
async def create_decision(body: DecisionRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Answer typed questions about an input."""
    session = body.prompt_cache_key or ""
    named = [question.model for question in body.questions]
    fields = [f"questions[{index}].model" for index in range(len(named))]
    name, models = await asked_models(state, caller, body.asked_model, session or None, named, fields)
    questions = body.typed_questions
    calibrated = [question.calibration for question in body.questions]
    places = [f"questions[{index}].calibration" for index in range(len(calibrated))]
    calibrations = await on_request_thread(partial(state.stores.calibrations.named, calibrated, places))
    reader = await plan_reads(
        state,
        caller,
        body.messages,
        questions,
        models,
        salt=body.cache_salt or "",
        session=session,
        priority=_priority(body.priority),
        template_kwargs={},
        input_field="input",
    )
    await read_labels(state, caller, request, reader, name, f"dec_{uuid.uuid4().hex}")
    found, digests = await beside_loop(partial(_calibrated, state, reader, models, questions, calibrations))
    usage = decision_usage(len(reader.request.tokens), reader.cached)
    return json_response(decision_body(body, name, found, digests, usage))


def _calibrated(
    state: ServerState,
    reader: LabelReader,
    models: Sequence[AskedModel],
    questions: Sequence[TypedQuestion],
    calibrations: Sequence[NamedCalibration | None],
) -> tuple[list[LabelShares], list[str | None]]:
    """Return the shares of each question's labels, calibrated if requested, and the digest of question and model.

    Raises:
        RequestError: a calibration was fitted for another question or model.
    """
    # The digest of an adapter's content is read only now, because the adapter may have been loaded for this request.
    digests = [
        None if (content := state.models.content_digest(model.adapter)) is None else question_digest(content, question)
        for model, question in zip(models, questions, strict=True)
    ]
    shares = [LabelShares.of(logprobs) for logprobs in reader.logprobs]
    found = [
        each if how is None else how.apply(each, digest)
        for each, how, digest in zip(shares, calibrations, digests, strict=True)
    ]
    return found, digests


@router.post("/v1/systemone")
async def create_system_one(body: SystemOneRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Answer named questions about a state."""
    named = [question.model for question in body.questions.values()]
    fields = [f"questions.{name}.model" for name in body.questions]
    name, models = await asked_models(state, caller, body.model, None, named, fields)
    questions = body.typed_questions
    calibrated = [question.calibration for question in body.questions.values()]
    places = [f"questions.{name}.calibration" for name in body.questions]
    calibrations = await on_request_thread(partial(state.stores.calibrations.named, calibrated, places))
    reader = await plan_reads(
        state,
        caller,
        body.messages,
        questions,
        models,
        salt=body.cache_salt or "",
        session="",
        priority=_priority(body.priority),
        template_kwargs=body.chat_template_kwargs,
        input_field="state",
    )
    response_id = f"decision-{uuid.uuid4().hex}"
    await read_labels(state, caller, request, reader, name, response_id)
    found, digests = await beside_loop(partial(_calibrated, state, reader, models, questions, calibrations))
    return json_response(system_one_body(body, name, response_id, found, digests, len(reader.request.tokens)))


def _priority(name: PriorityName | None) -> Priority | None:
    return None if name is None else priority_of(name)


async def read_labels(
    state: ServerState, caller: Caller, request: Request, reader: LabelReader, model: str, response_id: str
) -> None:
    """Compute the logprobs of all labels, as one admitted request."""
    set_facts(caller, [reader.request], model=model, stream=False, response_id=response_id)
    deltas = generate(state, reader, [reader.request], caller, usage=UsageCount())
    await while_connected(request.receive, collect(deltas))
