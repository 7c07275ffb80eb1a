"""Rerank reads: how probable "yes" is beside "no" where a model judges whether a document meets a query.

The conversation is the one that Qwen3-Reranker was trained on. Its tokens before the document are the same for all
documents, so they are computed once.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

from ...engine.errors import ContextTooLong, RequestError
from ...engine.serving.ending_tree import EndingTree
from ...engine.serving.request import TextRequest
from ..access.caller import Caller
from ..protocol.pooled import RerankRequest
from .label_reads import AskedModel, LabelReader, PlannedQuestion
from .model_directory import ModelTarget
from .pooled_reads import pooled_request

ANSWERS = ("yes", "no")
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)


async def plan_rerank(target: ModelTarget, body: RerankRequest, caller: Caller) -> LabelReader:
    """Return the reader of the two answers for each document.

    Raises:
        RequestError: the model has no chat template, by which it could be asked, or no language head.
        ContextTooLong: a document does not fit.
    """
    engine = target.engine
    if not engine.pooler.generates:
        raise RequestError("This model has no language head, so it cannot be asked for 'yes' or 'no'.", param="model")
    if not engine.tokenizer.has_chat_template:
        raise RequestError("This model has no chat template, by which it could be asked.", param="model")
    base = pooled_request(body, target.adapter, caller, "")
    planned = await asyncio.to_thread(lambda: _planned(target, body, base))
    return LabelReader(planned, caller)


def _planned(target: ModelTarget, body: RerankRequest, base: TextRequest) -> list[PlannedQuestion]:
    engine, model = target.engine, AskedModel(target.adapter, target.engine)
    endings = [engine.tokenizer.encode(answer, False) for answer in ANSWERS]
    instruction = body.instruction or DEFAULT_INSTRUCTION
    kwargs = {**target.dialect.defaults, "enable_thinking": False, "thinking": False}
    planned = []
    for index, document in enumerate(body.texts):
        asked = f"<Instruct>: {instruction}\n<Query>: {body.query}\n<Document>: {document}"
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}]
        text = engine.tokenizer.render_chat(messages, add_generation_prompt=True, kwargs=kwargs)
        field = f"documents[{index}]"
        try:
            engine.check_length(text)
            tokens = engine.tokenizer.encode(text, False)
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
