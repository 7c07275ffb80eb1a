"""Rerank reads: computes the probability of "yes" against "no" when a model judges whether a document meets a query.

The tokens before the document are the same for all documents of a query, so they are computed once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...engine.errors import ContextTooLong, RequestError
from ...engine.serving.ending_tree import EndingTree
from ...engine.serving.request import TextRequest
from ...engine.serving.request_threads import on_request_thread
from ...engine.text.answer_opening import NO_THOUGHT, AnswerOpening
from ...engine.text.rerank_prompt import ANSWERS, DEFAULT_INSTRUCTION, rerank_messages
from ..access.caller import Caller
from ..protocol.pooled import PooledFields
from .label_reads import AskedModel, LabelReader, PlannedQuestion
from .model_directory import ModelTarget
from .pooled_reads import pooled_request


async def plan_rerank(
    target: ModelTarget,
    texts: Sequence[tuple[str, str, str]],
    body: PooledFields,
    caller: Caller,
    instruction: str | None,
) -> LabelReader:
    """Build the reader of the two possible answers for each document.

    Args:
        texts: for each pair, the query, the document, and the name of the document's field in the request.
        instruction: a text that describes which documents count as relevant.

    Raises:
        RequestError: the model has no chat template, or begins every answer with reasoning.
        ContextTooLong: a document does not fit.
    """
    engine = target.engine
    if not engine.tokenizer.has_chat_template:
        raise RequestError("This model has no chat template, which this request needs.", param="model")
    base = pooled_request(body, target.adapter, caller, "")
    planned = await on_request_thread(partial(_planned, target, texts, base, instruction or DEFAULT_INSTRUCTION))
    return LabelReader(planned, caller)


def _planned(
    target: ModelTarget, texts: Sequence[tuple[str, str, str]], base: TextRequest, instruction: str
) -> list[PlannedQuestion]:
    engine, model = target.engine, AskedModel(target.adapter, target.engine)
    endings = [engine.tokenizer.encode(answer, False) for answer in ANSWERS]
    kwargs = {**target.dialect.defaults, **NO_THOUGHT}
    opening = AnswerOpening(engine.tokenizer, target.reasoning, kwargs)
    planned = []
    for query, document, field in texts:
        messages = rerank_messages(query, document, instruction)
        text = engine.tokenizer.render_chat(messages, add_generation_prompt=True, kwargs=kwargs)
        completed = opening.complete(text)
        try:
            engine.check_length(text)
            tokens = engine.tokenizer.encode(completed, False)
            _check_room(tokens, endings, engine.max_model_len)
            request = replace(base, tokens=tokens)
            engine.limits.check(request)
        except RequestError as error:
            error.param = field
            raise
        planned.append(PlannedQuestion(EndingTree(tokens, endings), request, 1, model))
    return planned


def _check_room(tokens: array[int], endings: list[array[int]], most: int) -> None:
    longest = max(map(len, endings))
    if len(tokens) + longest > most:
        raise ContextTooLong(len(tokens), longest, most)
