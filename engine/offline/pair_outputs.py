"""Pair outputs: computes the scores of pairs of texts for ``LLM.score``, in vLLM's form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..errors import ContextTooLong, RequestError
from ..serving.ending_tree import EndingTree
from ..serving.label_shares import LabelShares, label_logprobs
from ..serving.pair_scoring import DOCUMENT_PROMPTS, QUERY_PROMPTS, head_score, pair_scoring, prompt_name_of
from ..text.answer_opening import NO_THOUGHT, AnswerOpening
from ..text.reasoning_formats import reasoning_format_of
from ..text.rerank_prompt import ANSWERS, DEFAULT_INSTRUCTION, rerank_messages
from ..types import Pooler
from .ending_logprobs import Run, read_trees
from .pooled_output import EmbeddingOutput, PooledRequestOutput
from .request_inputs import Input, PromptAdapter

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


PairOutputs = list[PooledRequestOutput[ScoringOutput]]


class PairTools(NamedTuple):
    """Functions that run a model.

    Attributes:
        embed: embeds texts with the checkpoint's prompt of the given name; returns vectors of length 1.
        classify: runs the classification head on inputs, and converts the pooled bytes with the given function.
        run: computes requests.
    """

    embed: Callable[[list[str], str | None], list[PooledRequestOutput[EmbeddingOutput]]]
    classify: Callable[[Sequence[Input], Callable[[bytes], ScoringOutput]], PairOutputs]
    run: Run


def text_pairs(query: Any, items: Any) -> list[Pair]:
    """Return pairs of texts: one query with all items, or one query for each item.

    Raises RequestError for other arguments.
    """
    texts = [[each] if isinstance(each, str) else each for each in (query, items)]
    for name, each in zip(("query", "items"), texts, strict=True):
        if not isinstance(each, Sequence) or not each or not all(isinstance(one, str) and one for one in each):
            raise RequestError(f"{name} must be a text or a list of texts, none of them empty.", param=name)
    queries, documents = texts
    if len(queries) not in (1, len(documents)):
        raise RequestError(f"query must be one text, or {len(documents)} as items are.", param="query")
    return list(zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True))


def score_pairs(pairs: Sequence[Pair], pooler: Pooler, model: PromptAdapter, tools: PairTools) -> PairOutputs:
    """Return the scores of pairs, computed as ``serving.pair_scoring`` describes.

    Raises:
        RequestError: the model cannot score pairs, or a pair is out of bounds.
    """
    match pair_scoring(pooler):
        case "embeddings":
            names = [prompt_name_of(pooler, names) for names in (QUERY_PROMPTS, DOCUMENT_PROMPTS)]
            texts = [list(dict.fromkeys(each)) for each in zip(*pairs, strict=True)]
            found = [tools.embed(each, name) for each, name in zip(texts, names, strict=True)]
            by_text = [dict(zip(each, outputs, strict=True)) for each, outputs in zip(texts, found, strict=True)]
            return [_cosine(by_text[0][query], by_text[1][document]) for query, document in pairs]
        case "words":
            return _score_in_words(pairs, model, tools.run)
        case "head":
            encode = model.model.served.tokenizer.encode_pair
            inputs = [Input(encode(*pair), None, "", model) for pair in pairs]
            return tools.classify(inputs, lambda pooled: ScoringOutput(head_score(pooled, pooler)))


def _cosine(
    query: PooledRequestOutput[EmbeddingOutput], document: PooledRequestOutput[EmbeddingOutput]
) -> PooledRequestOutput[ScoringOutput]:
    """Return the score of a pair: the cosine of the embeddings of its two texts, which have length 1."""
    vectors = [np.array(each.outputs.embedding, np.float64) for each in (query, document)]
    tokens = [*query.prompt_token_ids, *document.prompt_token_ids]
    num_cached = query.num_cached_tokens + document.num_cached_tokens
    return PooledRequestOutput(query.request_id, ScoringOutput(float(vectors[0] @ vectors[1])), tokens, num_cached)


def _score_in_words(pairs: Sequence[Pair], adapter: PromptAdapter, run: Run) -> PairOutputs:
    """Return the probability of "yes" against "no" for each pair. Raises RequestError or ContextTooLong."""
    tokenizer, most = adapter.model.served.tokenizer, adapter.model.limits.max_model_len
    if not tokenizer.has_chat_template:
        raise RequestError("This model has no chat template, which this call needs.", param="model")
    endings = [tokenizer.encode(answer, False) for answer in ANSWERS]
    longest = max(map(len, endings))
    kwargs = dict(NO_THOUGHT)
    opening = AnswerOpening(tokenizer, reasoning_format_of(tokenizer, "auto"), kwargs)
    inputs = []
    for query, document in pairs:
        messages = rerank_messages(query, document, DEFAULT_INSTRUCTION)
        text = tokenizer.render_chat(messages, add_generation_prompt=True, kwargs=kwargs)
        tokens = tokenizer.encode(opening.complete(text), False)
        if len(tokens) + longest > most:
            raise ContextTooLong(len(tokens), longest, most)
        inputs.append(Input(tokens, None, "", adapter))
    found = read_trees([EndingTree(each.tokens, endings) for each in inputs], inputs, run)
    shares = [LabelShares.of(label_logprobs(by_token)).shares[0] for by_token in found]
    return [
        PooledRequestOutput(str(index), ScoringOutput(share), given.tokens.tolist(), 0)
        for index, (share, given) in enumerate(zip(shares, inputs, strict=True))
    ]
