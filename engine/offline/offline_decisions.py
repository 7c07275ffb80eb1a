"""Offline decisions: the questions and answers of ``LLM.decide`` as in ``POST /v1/decisions``, and ``LLM.score``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ContextTooLong, RequestError
from ..serving.calibration import content_digest, question_digest
from ..serving.calibration_folder import CalibrationFolder
from ..serving.ending_tree import EndingTree
from ..serving.label_shares import LabelShares, label_logprobs
from ..serving.request import token_array
from ..text.answer_opening import NO_THOUGHT, AnswerOpening
from ..text.questions import YES_NO, Labels, Option, QuestionEncoder, QuestionKind, TypedQuestion, asking
from ..text.reasoning_formats import reasoning_format_of
from ..types import CALIBRATION_NAME
from .ending_logprobs import Run, read_trees
from .request_inputs import Input, PromptAdapter

_OPTIONS = {QuestionKind.CHOICE: ("choices", "value", 255), QuestionKind.SCORE: ("levels", "label", 100)}
MAX_QUESTIONS = 400


@dataclass(frozen=True, slots=True)
class AskedQuestion:
    """A question with the name of its answer and the name of its calibration; None for no name."""

    question: TypedQuestion
    name: str | None
    calibration: str | None


@dataclass(frozen=True, slots=True)
class DecisionAnswer:
    """The answer to a question.

    Attributes:
        type: ``predicate``, ``choice`` or ``score``.
        probabilities: probability of each option, in the order of the options; they sum to 1. A predicate has ``Yes``
            and ``No``.
        confidence: probability of the likeliest option among all texts that the model might generate.
        label_mass: total probability of all options among all texts that the model might generate.
        probability: probability that a predicate is true; None for other questions.
        choice: the likeliest value of a choice; None for other questions.
        score: the expected index of the level, counted from 0, for a ``score`` question; None for other questions.
        calibration: name of the calibration that was applied; None if absent.
        digest: digest of the question and of the model's content.
    """

    type: str
    name: str | None
    probabilities: dict[str, float]
    confidence: float
    label_mass: float
    probability: float | None = None
    choice: str | None = None
    score: float | None = None
    calibration: str | None = None
    digest: str | None = None

    @classmethod
    def of(cls, asked: AskedQuestion, found: LabelShares, digest: str | None) -> DecisionAnswer:
        """Return the answer to a question from the shares of its labels.

        ``found`` is calibrated if the question requests it.
        """
        question, name = asked.question, asked.name
        texts = [option.text for option in question.options]
        return cls(
            question.kind.value,
            name,
            dict(zip(texts, found.shares, strict=True)),
            found.confidence,
            found.mass,
            probability=found.shares[0] if question.kind is QuestionKind.PREDICATE else None,
            choice=texts[found.best] if question.kind is QuestionKind.CHOICE else None,
            score=found.mean if question.kind is QuestionKind.SCORE else None,
            calibration=asked.calibration,
            digest=digest,
        )


def read_questions(questions: Any, answer_with: str) -> list[AskedQuestion]:
    """Read and check questions. Raises RequestError, which names the field that is wrong."""
    if answer_with not in list(Labels):
        raise RequestError(f"answer_with must be 'letters' or 'values', not {answer_with!r}.", param="answer_with")
    if isinstance(questions, (str, Mapping)) or not isinstance(questions, Sequence):
        raise RequestError(f"questions must be a list of dicts, not {type(questions).__name__}.", param="questions")
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise RequestError(
            f"questions must have 1 to {MAX_QUESTIONS} entries, not {len(questions)}.", param="questions"
        )
    return [_question(f"questions[{index}]", each, Labels(answer_with)) for index, each in enumerate(questions)]


def _question(place: str, given: Any, labels_by: Labels) -> AskedQuestion:
    if not isinstance(given, Mapping):
        raise RequestError(f"{place} must be a dict, not {type(given).__name__}.", param=place)
    if given.get("type") not in list(QuestionKind):
        raise RequestError(f"{place}.type must be one of predicate, choice and score.", param=f"{place}.type")
    kind = QuestionKind(given["type"])
    listed = _OPTIONS.get(kind, ("",))[0]
    for name in given.keys() - {"type", "instructions", "name", "calibration", listed}:
        raise RequestError(f"{place}.{name} is not a field of a {kind}.", param=f"{place}.{name}")
    instructions = _text(f"{place}.instructions", given.get("instructions"))
    name = None if given.get("name") is None else _text(f"{place}.name", given["name"])
    options = tuple(map(Option, YES_NO)) if kind is QuestionKind.PREDICATE else _options(place, kind, given)
    calibration = given.get("calibration")
    if calibration is not None and not re.fullmatch(CALIBRATION_NAME, _text(f"{place}.calibration", calibration)):
        raise RequestError(f"{place}.calibration must be a name: {CALIBRATION_NAME}.", param=f"{place}.calibration")
    question = TypedQuestion(kind, instructions, options, labels_by, f"{place}.{listed}" if listed else place)
    return AskedQuestion(question, name, calibration)


def _options(place: str, kind: QuestionKind, given: Mapping[str, Any]) -> tuple[Option, ...]:
    """Return the choices or levels of a question, given as texts, or as dicts with a description."""
    listed, field, most = _OPTIONS[kind]
    place = f"{place}.{listed}"
    values = given.get(listed)
    if isinstance(values, str) or not isinstance(values, Sequence) or not 2 <= len(values) <= most:
        raise RequestError(f"{place} must be a list of 2 to {most} entries.", param=place)
    found: dict[str, Option] = {}
    for index, each in enumerate(values):
        at = f"{place}[{index}]"
        option = each if isinstance(each, Mapping) else {field: each}
        text = _text(f"{at}.{field}", option.get(field))
        if not text.strip() or text in found:
            raise RequestError(f"{at}.{field} must be a text that is not empty and is given only once.", param=at)
        described = option.get("description")
        found[text] = Option(text, "" if described is None else _text(f"{at}.description", described))
    return tuple(found.values())


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{place} must be a text, not {type(value).__name__}.", param=place)
    return value


@dataclass(frozen=True, slots=True)
class TokenisedQuestion:
    """A question in tokens: its prompt, the tree of its labels' endings, and the number of endings of each label."""

    prompt: Input
    tree: EndingTree
    num_ends: int


def plan_questions(
    messages: Sequence[dict[str, Any]],
    questions: Sequence[TypedQuestion],
    adapter: PromptAdapter,
    template_kwargs: Mapping[str, Any],
) -> list[TokenisedQuestion]:
    """Encode questions about a conversation.

    Raises:
        RequestError: the model has no chat template, or begins every answer with reasoning; or the labels of a question
            cannot be distinguished.
        ContextTooLong: a prompt with its longest label does not fit.
    """
    served, limits = adapter.model.served, adapter.model.limits
    ends = [token for token in served.tokenizer.eos_ids if token < served.vocab_size]
    encoder = QuestionEncoder(served.tokenizer, ends)
    kwargs = {**NO_THOUGHT, **template_kwargs}
    if not served.tokenizer.has_chat_template:
        raise RequestError("This model has no chat template, which this call needs.", param="model")
    opening = AnswerOpening(served.tokenizer, reasoning_format_of(served.tokenizer, "auto"), kwargs)
    planned = []
    for question in questions:
        text = opening.complete(served.tokenizer.render_chat(asking(messages, question), kwargs=kwargs))
        tokens = encoder.encode(text, question)
        longest = max(map(len, tokens.endings))
        if len(tokens.prompt) + longest > limits.max_model_len:
            raise ContextTooLong(len(tokens.prompt), longest, limits.max_model_len)
        tree = EndingTree(tokens.prompt, tokens.endings)
        planned.append(TokenisedQuestion(Input(tokens.prompt, None, "", adapter), tree, tokens.num_ends))
    return planned


def read_answers(
    asked: Sequence[AskedQuestion],
    planned: Sequence[TokenisedQuestion],
    digest_of: Callable[[str | None], str],
    calibration_dir: str | Path | None,
    run: Run,
) -> list[DecisionAnswer]:
    """Return the answers to questions.

    Args:
        asked: the questions, from ``read_questions``.
        planned: the same questions in tokens, from ``plan_questions``.
        digest_of: returns the digest of an adapter, or for None that of the base model; "" if it is not known.
        calibration_dir: folder of the calibrations that questions name; None if absent.
        run: computes requests.

    Raises:
        RequestError: a calibration does not exist, or is for another question or model.
    """
    fields = [f"questions[{index}].calibration" for index in range(len(asked))]
    folder = None if calibration_dir is None else Path(calibration_dir)
    named = CalibrationFolder(folder, "calibration_dir").named([each.calibration for each in asked], fields)
    content = content_digest(digest_of(None), planned[0].prompt.adapter.name, digest_of)
    digests = [None if content is None else question_digest(content, each.question) for each in asked]
    for how, digest, each in zip(named, digests, asked, strict=True):
        if how is not None:
            how.check(digest, len(each.question.options))
    found = read_trees([each.tree for each in planned], [each.prompt for each in planned], run)
    answers = []
    for each, plan, by_token, how, digest in zip(asked, planned, found, named, digests, strict=True):
        shares = LabelShares.of(label_logprobs(by_token, plan.num_ends))
        answers.append(DecisionAnswer.of(each, shares if how is None else how.apply(shares, digest), digest))
    return answers


def score_prompts(query: Any, items: Any, *, item_first: bool) -> list[Any]:
    """Return one prompt for each item: the query joined with the item.

    Raises RequestError for texts mixed with token ids.
    """
    is_text = isinstance(query, str)
    listed = [items] if isinstance(items, str) else items
    if not isinstance(listed, Sequence) or not listed:
        raise RequestError("items must be a text, or a list of texts or of lists of token ids.", param="items")
    for index, item in enumerate(listed):
        if isinstance(item, str) != is_text:
            wanted = "a text" if is_text else "a list of token ids"
            raise RequestError(f"items[{index}] must be {wanted}, as query is.", param=f"items[{index}]")
    pairs = [(item, query) if item_first else (query, item) for item in listed]
    return [first + second if is_text else [*first, *second] for first, second in pairs]


def check_labels(label_token_ids: Any, vocab_size: int) -> list[list[int]]:
    """Return the labels as endings of one token each.

    Raises RequestError if there is no label, or if an id is invalid.
    """
    labels = token_array(label_token_ids)
    if not labels:
        raise RequestError("label_token_ids must hold at least one token.", param="label_token_ids")
    for token in labels:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"label_token_ids must hold token ids from 0 to {vocab_size - 1}, not {token}.", param="label_token_ids"
            )
    return [[token] for token in labels]


def score_labels(
    inputs: Sequence[Input], labels: Sequence[Sequence[int]], run: Run, *, apply_softmax: bool
) -> list[list[float]]:
    """Return the probability of each label after each prompt, in the whole vocabulary or, with ``apply_softmax``, among
    the labels.

    Args:
        labels: the labels, from ``check_labels``.
        run: computes requests.
    """
    found = read_trees([EndingTree(each.tokens, labels) for each in inputs], inputs, run)
    logprobs = [label_logprobs(by_token) for by_token in found]
    return [
        list(LabelShares.of(each).shares) if apply_softmax else [math.exp(one) for one in each] for each in logprobs
    ]
