"""Label reads: computes the logprobs of the labels of many questions about one input.

The prompts of all questions begin with the input. The labels of a question are endings of its prompt. In tokens they
form a prefix tree (``EndingTree``), which is computed as several short sequences. ``LabelReader`` sends these sequences
to the engine, at most ``WINDOW`` at a time and parents before children. So a request with many labels takes turns with
other requests, and keeps few prompts in memory.

For admission, a reader counts as one sequence (``LabelReader.request``). Its number of tokens is that of all prompts
and trees together, where a token that several of them share counts once.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...engine.errors import ContextTooLong, RequestError, UnknownModel
from ...engine.serving.ending_tree import EndingRead, EndingTree, num_distinct_tokens
from ...engine.serving.label_shares import label_logprobs
from ...engine.serving.output_processor import Finish, SequenceOutput, TextDelta
from ...engine.serving.request import TextRequest
from ...engine.serving.request_threads import on_request_thread
from ...engine.text.answer_opening import NO_THOUGHT, AnswerOpening
from ...engine.text.questions import QuestionEncoder, TypedQuestion, asking
from ...engine.types import FinishReason, Priority, SamplingParams, Usage
from ..access.caller import Caller
from ..protocol.chat_messages import ChatMessage, for_template
from ..structured.tool_dialects import for_dialect, without_second_end
from .chat_prompt import with_known_roles
from .sequence_windows import WINDOW, deadline_of, run_window, usage_of
from .server_state import ServerState

if TYPE_CHECKING:
    from ...engine.serving.async_engine import AsyncEngine

MAX_LABEL_TOKENS = 1 << 18
"""Largest number of tokens of all labels of a request together."""


@dataclass(frozen=True, slots=True)
class AskedModel:
    """A model that answers questions of a request.

    Attributes:
        adapter: name of the model's adapter; None for the base model.
        engine: the engine, with the tokenizer that the model uses.
        field: the field of the request that names the model, for error messages.
    """

    adapter: str | None
    engine: AsyncEngine
    field: str = "model"


@dataclass(frozen=True, slots=True)
class PlannedQuestion:
    """A question in tokens, as a tree of endings.

    Attributes:
        request: request with the prompt, from which the requests of all sequences of the tree are derived.
        num_ends: number of endings of each label. The endings of a label differ in the token that ends it.
    """

    tree: EndingTree
    request: TextRequest
    num_ends: int
    model: AskedModel

    @property
    def engine(self) -> AsyncEngine:
        return self.model.engine


async def asked_models(
    state: ServerState,
    caller: Caller,
    model: str | None,
    session: str | None,
    named: Sequence[str | None],
    fields: Sequence[str],
) -> tuple[str, list[AskedModel]]:
    """Find the models of a request. Returns the name of the request's model, and the model of each question.

    Args:
        named: the models that the questions name; None for a question that uses the request's model.
        fields: names of the fields in which the questions name their models, for error messages.

    Raises:
        UnknownModel: the request's model or a question's model is not served; the error names the field.
    """
    target = await state.models.find(model, caller, None, session)
    version = caller.facts.version
    found: dict[str | None, AskedModel] = {None: AskedModel(target.adapter, target.engine)}
    for index, each in enumerate(named):
        if each not in found:
            try:
                own = await state.models.find(each, caller, None, session)
                found[each] = AskedModel(own.adapter, own.engine, fields[index])
            except RequestError as error:
                error.param = fields[index]
                raise
    caller.facts.version = version
    return target.name, [found[each] for each in named]


class QuestionPlanner:
    """Builds the prefix trees of questions about one conversation. ``plan`` runs on a separate thread.

    Args:
        messages: the conversation; a question is added to its last user turn.
        base: request with the fields that all sequences have in common.
        template_kwargs: variables of the chat template.
        input_field: field of the request with the conversation, for error messages.
    """

    def __init__(
        self,
        state: ServerState,
        messages: Sequence[ChatMessage],
        base: TextRequest,
        template_kwargs: dict[str, Any],
        input_field: str,
    ) -> None:
        self._state = state
        self._messages = for_template(messages)
        self._base = base
        self._input_field = input_field
        self._kwargs = {**NO_THOUGHT, **template_kwargs}
        self._encoders: dict[int, QuestionEncoder] = {}
        self._openings: dict[int, AnswerOpening] = {}

    def plan(self, questions: Sequence[TypedQuestion], models: Sequence[AskedModel]) -> list[PlannedQuestion]:
        """Encode the questions, and build their trees.

        Raises:
            RequestError: the model has no chat template, or begins every answer with reasoning; two labels of a
                question have the same tokens; or all labels together have too many tokens.
            ContextTooLong: a prompt with its longest label does not fit.
        """
        planned, num_label_tokens = [], 0
        for question, model in zip(questions, models, strict=True):
            each = self._plan(question, model)
            planned.append(each)
            num_label_tokens += each.tree.num_label_tokens
            if num_label_tokens > MAX_LABEL_TOKENS:
                raise RequestError(
                    f"'questions': all labels together must have at most {MAX_LABEL_TOKENS} tokens: split them into "
                    "several requests.",
                    param="questions",
                )
        return planned

    def _plan(self, question: TypedQuestion, model: AskedModel) -> PlannedQuestion:
        engine = model.engine
        encoder = self._encoders.get(id(engine.tokenizer))
        if encoder is None:
            ends = [token for token in engine.tokenizer.eos_ids if token < engine.vocab_size]
            encoder = self._encoders[id(engine.tokenizer)] = QuestionEncoder(engine.tokenizer, ends)
        text = self._render(question, engine)
        try:
            engine.check_length(text)
        except RequestError as error:
            error.param = self._input_field
            raise
        tokens = encoder.encode(text, question)
        longest = max(map(len, tokens.endings))
        if len(tokens.prompt) + longest > engine.max_model_len:
            too_long = ContextTooLong(len(tokens.prompt), longest, engine.max_model_len)
            # Either the labels of the question are too long, or the prompt before them is too long.
            too_long.param = question.field if len(tokens.prompt) < engine.max_model_len else self._input_field
            raise too_long
        request = replace(self._base, tokens=tokens.prompt, adapter=model.adapter)
        engine.limits.check(request)
        return PlannedQuestion(EndingTree(tokens.prompt, tokens.endings), request, tokens.num_ends, model)

    def _render(self, question: TypedQuestion, engine: AsyncEngine) -> str:
        """Render the prompt with the question at its end, up to the beginning of the answer."""
        tokenizer, dialect = engine.tokenizer, self._state.engine.dialect(engine)
        if not tokenizer.has_chat_template:
            raise RequestError("This model has no chat template, which this request needs.", param="model")
        messages = with_known_roles(asking(self._messages, question), tokenizer)
        kwargs = {**dialect.defaults, **self._kwargs}
        opening = self._openings.get(id(tokenizer))
        if opening is None:
            thoughts = self._state.engine.reasoning_format(engine)
            opening = self._openings[id(tokenizer)] = AnswerOpening(tokenizer, thoughts, kwargs)
        text = tokenizer.render_chat(for_dialect(messages, [], dialect), add_generation_prompt=True, kwargs=kwargs)
        text = without_second_end(text, dialect)
        return opening.complete(text)


class LabelReader:
    """Computes the logprobs of the labels of planned questions.

    ``generate`` uses its ``stream`` instead of an engine's.

    Attributes:
        request: the request that represents all reads for admission.
        logprobs: logprobs of each question's labels; set when the stream has ended.
        by_token: logprobs of the tokens of each ending of each question.
        cached: number of tokens whose KV was in the prefix cache.
    """

    def __init__(self, planned: Sequence[PlannedQuestion], caller: Caller) -> None:
        self._planned = planned
        self._caller = caller
        prompts: defaultdict[str | None, list[array[int]]] = defaultdict(list)
        for each in planned:
            prompts[each.request.adapter].append(each.request.tokens)
        shared = sum(map(num_distinct_tokens, prompts.values()))
        self._num_tokens = shared + sum(each.tree.num_path_tokens for each in planned)
        self.request = replace(
            planned[0].request,
            tokens=array("i", bytes(array("i").itemsize * self._num_tokens)),
            params=SamplingParams(max_tokens=1),
        )
        self.logprobs: list[list[float]] = []
        self.by_token: list[list[list[float]]] = []
        self.cached = 0

    async def stream(self, *_requests: TextRequest) -> AsyncGenerator[list[TextDelta], None]:
        """Compute all labels, and yield one delta at the end. Raises like ``AsyncEngine.stream``."""
        deadline = deadline_of(self._caller)
        reads = [(question, read) for question in self._planned for read in question.tree.reads]
        # Parents have shorter paths than their children, so this order puts them first.
        order = sorted(range(len(reads)), key=lambda index: (id(reads[index][0].engine), len(reads[index][1].path)))
        values: dict[int, list[float]] = {}
        num_computed = 0
        for _, group in groupby(order, key=lambda index: id(reads[index][0].engine)):
            members = list(group)
            for begin in range(0, len(members), WINDOW):
                window = members[begin : begin + WINDOW]
                outputs = await self._read([reads[index] for index in window], deadline)
                for index, output in zip(window, outputs, strict=True):
                    values[index] = reads[index][1].logprobs(output)
                    num_computed += usage_of(output).prompt - usage_of(output).cached
        found = iter([values[index] for index in range(len(reads))])
        for question in self._planned:
            # A hundred thousand labels take about 0.2 s. This lets other streams proceed between two questions.
            await asyncio.sleep(0)
            tokens = question.tree.by_token([next(found) for _ in question.tree.reads])
            self.by_token.append(tokens)
            self.logprobs.append(label_logprobs(tokens, question.num_ends))
        self.cached = max(0, self._num_tokens - num_computed)
        usage = Usage(self._num_tokens, self.cached, 0)
        yield [TextDelta(0, "", finish=Finish(FinishReason.STOP, usage))]

    async def _read(
        self, window: Sequence[tuple[PlannedQuestion, EndingRead]], deadline: float | None
    ) -> list[SequenceOutput]:
        """Return the outputs of reads whose sequences have the same tokenizer."""
        requests = [read.request(question.request) for question, read in window]
        try:
            return await run_window(window[0][0].engine, requests, deadline)
        except UnknownModel as error:
            # Only the engine could detect that the adapter is missing, so the error is completed here.
            models = [question.model for question, _ in window if question.model.adapter is not None]
            error.param = next((m.field for m in models if str(UnknownModel(str(m.adapter))) == str(error)), "model")
            raise


async def plan_reads(
    state: ServerState,
    caller: Caller,
    messages: Sequence[ChatMessage],
    questions: Sequence[TypedQuestion],
    models: Sequence[AskedModel],
    *,
    salt: str,
    session: str,
    priority: Priority | None,
    template_kwargs: dict[str, Any],
    input_field: str,
) -> LabelReader:
    """Build the reader for questions about a conversation. Raises like ``QuestionPlanner.plan``."""
    base = TextRequest(
        tokens=array("i"),
        params=SamplingParams(max_tokens=1),
        salt=salt,
        tenant=caller.key.tenant,
        cache_tenant=caller.cache_tenant,
        priority=caller.priority(priority),
        session=session,
    )
    planner = QuestionPlanner(state, messages, base, template_kwargs, input_field)
    # Hundreds of prompts are rendered and encoded. On the event loop this would block other streams.
    return await on_request_thread(lambda: LabelReader(planner.plan(questions, models), caller))
