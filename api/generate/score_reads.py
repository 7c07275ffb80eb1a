"""Score reads: computes the logprobs of labels after a query joined with each of several items."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...engine.errors import ContextTooLong, RequestError
from ...engine.serving.ending_tree import EndingTree
from ...engine.serving.request import TextRequest
from ...engine.serving.request_threads import on_request_thread
from ...engine.types import SamplingParams
from ..access.caller import Caller
from ..protocol.scores import ScoreRequest
from .build_request import token_array
from .label_reads import MAX_LABEL_TOKENS, AskedModel, LabelReader, PlannedQuestion

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine


async def plan_scores(body: ScoreRequest, model: AskedModel, caller: Caller) -> LabelReader:
    """Build the reader of a request's labels.

    Raises:
        RequestError: a prompt or a label has no token, or there are too many labels for all items.
        ContextTooLong: a prompt with its longest label does not fit.
    """
    base = TextRequest(
        tokens=array("i"),
        params=SamplingParams(max_tokens=1),
        adapter=model.adapter,
        salt=body.cache_salt or "",
        tenant=caller.key.tenant,
        cache_tenant=caller.cache_tenant,
        priority=caller.priority(body.priority_class),
        session=body.prompt_cache_key or "",
    )
    # A thousand prompts are encoded. On the event loop this would block other streams.
    return await on_request_thread(lambda: LabelReader(_planned(body, model, base), caller))


def _planned(body: ScoreRequest, model: AskedModel, base: TextRequest) -> list[PlannedQuestion]:
    engine = model.engine
    endings = _endings(body, engine)
    total = sum(map(len, endings)) * len(body.listed)
    if total > MAX_LABEL_TOKENS:
        raise RequestError(
            f"'{_label_field(body)}': the labels of all items must have at most {MAX_LABEL_TOKENS} tokens together, "
            f"not {total}: split them into several requests.",
            param=_label_field(body),
        )
    return [
        _question(body.item_field(index), prompt, endings, model, base) for index, prompt in enumerate(body.prompts)
    ]


def _question(
    field: str, prompt: str | list[int], endings: Sequence[Sequence[int]], model: AskedModel, base: TextRequest
) -> PlannedQuestion:
    engine = model.engine
    try:
        tokens = _tokens(field, prompt, engine, add_special_tokens=True)
        if not tokens:
            raise RequestError(f"'{field}': the query and this item together have no tokens.")
        longest = max(map(len, endings))
        if len(tokens) + longest > engine.max_model_len:
            raise ContextTooLong(len(tokens), longest, engine.max_model_len)
        request = replace(base, tokens=tokens)
        engine.limits.check(request)
    except RequestError as error:
        error.param = field
        raise
    return PlannedQuestion(EndingTree(tokens, endings), request, 1, model)


def _label_field(body: ScoreRequest) -> str:
    return "label_token_ids" if body.labels is None else "labels"


def _endings(body: ScoreRequest, engine: AsyncEngine) -> list[array[int]]:
    """Return the tokens of each label. A label given as text is encoded alone, without special tokens."""
    field = _label_field(body)
    if body.label_token_ids is not None:
        return [array("i", [token]) for token in token_array(field, body.label_token_ids, engine.vocab_size)]
    endings = []
    for index, label in enumerate(body.endings):
        place = f"{field}[{index}]"
        tokens = _tokens(place, label, engine, add_special_tokens=False)
        if not tokens:
            raise RequestError(f"'{place}' must have at least one token.", param=place)
        endings.append(tokens)
    return endings


def _tokens(field: str, given: str | list[int], engine: AsyncEngine, *, add_special_tokens: bool) -> array[int]:
    if isinstance(given, str):
        engine.check_length(given)
        return engine.tokenizer.encode(given, add_special_tokens)
    # A prompt that is too long is refused before its ids are checked.
    if len(given) > engine.max_model_len:
        raise ContextTooLong(len(given), 1, engine.max_model_len)
    return token_array(field, given, engine.vocab_size)
