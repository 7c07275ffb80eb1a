"""Decision answers: answers typed questions from the logprobs of their labels, in OpenAI's and System One's formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...engine.serving.label_shares import LabelShares
from ..protocol.decisions import ChoiceQuestion, DecisionRequest, PredicateQuestion, ScoreQuestion
from ..protocol.system_one import ChoiceAsked, NoulAsked, ScoreAsked, SystemOneRequest


def decision_body(
    body: DecisionRequest,
    model: str,
    found: Sequence[LabelShares],
    digests: Sequence[str | None],
    usage: dict[str, Any],
) -> Any:
    """Return the body of OpenAI's ``Decision``.

    Args:
        found: the shares of each question's labels, calibrated if the question names a calibration.
        digests: digests of the model and of the question; None if they are not known.
        usage: the result of ``decision_usage``.
    """
    answers = []
    for question, shares, digest in zip(body.questions, found, digests, strict=True):
        calibration = {} if question.calibration is None else {"calibration": question.calibration}
        answers.append({**_answer(question, shares), **calibration, "digest": digest})
    return {"model": model, "answers": answers, "usage": usage}


def decision_usage(num_input: int, num_cached: int) -> dict[str, Any]:
    """Return OpenAI's usage of a decision. A token that several sequences share counts once; no token is generated."""
    return {
        "input_tokens": num_input,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": num_input - num_cached},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_input,
    }


def _answer(question: Any, found: LabelShares) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": question.type, "name": question.name, "label_mass": found.mass}
    match question:
        case PredicateQuestion():
            return {**fields, "probability": found.shares[0]}
        case ChoiceQuestion():
            values = [choice.value for choice in question.choices]
            shares = [{"value": value, "probability": p} for value, p in zip(values, found.shares, strict=True)]
            chosen = values[found.best]
            return {**fields, "choice": chosen, "confidence": found.confidence, "probabilities": shares}
        case ScoreQuestion():
            shares = [
                {"value": value, "label": level.label, "probability": p}
                for value, (level, p) in enumerate(zip(question.levels, found.shares, strict=True))
            ]
            return {**fields, "score": found.mean, "confidence": found.confidence, "probabilities": shares}
    raise AssertionError(question)


def system_one_body(
    body: SystemOneRequest,
    model: str,
    response_id: str,
    found: Sequence[LabelShares],
    digests: Sequence[str | None],
    num_input: int,
) -> Any:
    """Return the answers by the questions' names, with the fields that open-source engines add.

    Args:
        found, digests: see ``decision_body``.
        num_input: number of tokens of all prompts and labels; tokens that several of them share count once.
    """
    answers, diagnostics = {}, {}
    for (name, question), shares, digest in zip(body.questions.items(), found, digests, strict=True):
        answers[name] = _system_one_answer(question, shares)
        calibration = {} if question.calibration is None else {"calibration": question.calibration}
        diagnostics[name] = {"label_mass": shares.mass, **calibration, "digest": digest}
    return {
        "id": response_id,
        "object": "structured_decision",
        "model": model,
        "answers": answers,
        "diagnostics": diagnostics,
        "usage": {"input_tokens": num_input, "output_tokens": 0},
    }


def _system_one_answer(question: Any, found: LabelShares) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": question.type, "confidence": found.confidence, "x_label_mass": found.mass}
    match question:
        case NoulAsked():
            yes, no = found.shares
            return {**fields, "noul": yes, "probabilities": {"yes": yes, "no": no}}
        case ChoiceAsked():
            names = list(question.criteria)
            shares = dict(zip(names, found.shares, strict=True))
            return {**fields, "choice": names[found.best], "probabilities": shares}
        case ScoreAsked():
            shares = {str(level): share for level, share in enumerate(found.shares)}
            legend = {str(level): text for level, text in enumerate(question.criteria)}
            return {**fields, "score": found.mean, "legend": legend, "probabilities": shares}
    raise AssertionError(question)
