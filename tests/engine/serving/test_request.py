"""Bounds of requests, each refused with field, value and bound."""

from __future__ import annotations

import itertools
import math
from array import array
from dataclasses import fields, replace
from typing import Any

import pytest

from rootgraft.engine.errors import ContextTooLong, RequestError
from rootgraft.engine.messages import Submit
from rootgraft.engine.serving.request import RequestLimits, TextRequest, token_array
from rootgraft.engine.types import MAX_SEED, MIN_SEED, Priority, SamplingParams
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.thought_rules import ThoughtRules

LIMITS = RequestLimits(max_model_len=100, vocab_size=50)
REQUEST = TextRequest(array("i", [1, 2, 3]), SamplingParams(max_tokens=10))


def with_params(**values: Any) -> TextRequest:
    return replace(REQUEST, params=replace(REQUEST.params, **values))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0},
        {"temperature": 2.0},
        {"top_p": 1e-9},
        {"top_k": 0},
        {"top_k": 1 << 20},
        {"min_p": 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 2},
        {"min_tokens": 10},
        {"logprobs": 0, "prompt_logprobs": 20},
        {"seed": 0},
        {"seed": -1},
        {"seed": MAX_SEED},
        {"seed": MIN_SEED},
        {"logit_bias": tuple((token % 50, -100.0) for token in range(300))},
        {"logprobs": 0, "logprob_token_ids": tuple(token % 50 for token in range(512))},
        {"allowed_token_ids": tuple(token % 50 for token in range(4096))},
        {"bad_words": ((1, 49),) * 512},
        {"stop_token_ids": tuple(token % 50 for token in range(128))},
        {"max_tokens": 97},
    ],
)
def test_bounds_are_inclusive(values: dict[str, Any]) -> None:
    request = with_params(**values)
    assert LIMITS.check(request) is request


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0 and at most 2, not -0.1"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": math.nan}, "temperature must be at least 0 and at most 2, not nan"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": True}, "temperature must be a number"),
        ({"temperature": "1"}, "temperature must be a number"),
        ({"temperature": None}, "temperature must be a number"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, not 0"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"top_k": (1 << 20) + 1}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": -2.5}, "presence_penalty"),
        ({"frequency_penalty": -math.inf}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": 2.5}, "repetition_penalty"),
        ({"min_tokens": 11}, r"min_tokens must be at most max_tokens \(10\), not 11"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logprobs": 21}, "logprobs must be at least 0 and at most 20, not 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"seed": MIN_SEED - 1}, f"seed must be at least {MIN_SEED} and at most {MAX_SEED}, not {MIN_SEED - 1}"),
        ({"seed": MAX_SEED + 1}, "seed"),
        ({"seed": -1.0}, "seed must be an integer"),
        ({"seed": 10**400}, "seed"),
        ({"max_tokens": 0}, "max_tokens must be at least 1 and at most 9223372036854775807, not 0"),
        ({"logit_bias": ((50, 1.0),)}, "logit_bias must be a token id from 0 to 49, not 50"),
        ({"logit_bias": ((1, 100.5),)}, "logit_bias"),
        ({"logit_bias": ((1, math.nan),)}, "logit_bias"),
        ({"logit_bias": ((1, 0.0),) * 301}, "logit_bias must be at most 300 entries, not 301 entries"),
        ({"logprob_token_ids": (1,) * 513, "logprobs": 0}, "logprob_token_ids must be at most 512 entries"),
        ({"logprob_token_ids": (50,), "logprobs": 0}, "logprob_token_ids must be a token id from 0 to 49, not 50"),
        ({"logprob_token_ids": (1,)}, "logprob_token_ids needs logprobs"),
        ({"allowed_token_ids": (1,) * 4097}, "allowed_token_ids must be at most 4096 entries"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids must be a token id from 0 to 49, not -1"),
        ({"bad_words": ((1,),) * 513}, "bad_words must be at most 512 entries"),
        ({"bad_words": ((1, 50),)}, "bad_words must be a token id from 0 to 49, not 50"),
        ({"bad_words": ((1,), ())}, "bad_words must hold words of at least one token"),
        ({"bad_words": ((1,),), "allowed_token_ids": (1,)}, "bad_words and allowed_token_ids"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"stop_token_ids": (1,) * 129}, "stop_token_ids"),
    ],
)
def test_parameters_out_of_bounds(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        LIMITS.check(with_params(**values))
    assert caught.value.param == next(iter(values))


def test_a_long_value_is_quoted_shortened() -> None:
    for values in ({"temperature": "x" * 1_000_000}, {"seed": 10**4000}):
        with pytest.raises(RequestError, match=r"\.\.\.") as caught:
            LIMITS.check(with_params(**values))
        assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"stop": ("a",) * 17}, "stop"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("a" * 257,)}, "stop"),
        ({"tokens": array("i")}, "prompt"),
        ({"tokens": array("i", [1, 50])}, "prompt"),
        ({"tokens": array("i", [1, -1])}, "prompt"),
    ],
)
def test_requests_out_of_bounds(values: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        LIMITS.check(replace(REQUEST, **values))
    assert caught.value.param == param


def test_top_k_of_minus_one_is_off() -> None:
    assert LIMITS.check(with_params(top_k=-1)).params.top_k == 0


def test_context_length() -> None:
    assert LIMITS.default_max_tokens(3) == 97
    assert LIMITS.default_max_tokens(99) == 1
    assert [LIMITS.default_max_tokens(3, most) for most in (1, 96, 97, 98, None)] == [1, 96, 97, 97, 97]
    LIMITS.check(with_params(max_tokens=97))
    with pytest.raises(RequestError, match="max_tokens must be at least 1 and at most 9223372036854775807, not 0"):
        LIMITS.check(with_params(max_tokens=0))
    for num_prompt in (100, 101):
        with pytest.raises(ContextTooLong, match="maximum context length is 100 tokens") as caught:
            LIMITS.default_max_tokens(num_prompt)
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(ContextTooLong, match="maximum context length is 100 tokens"):
            LIMITS.check(replace(REQUEST, tokens=array("i", [1] * num_prompt)))
    with pytest.raises(RequestError, match="'max_tokens' must be at most 97, not 98: this model's maximum") as strict:
        LIMITS.check(with_params(max_tokens=98))
    assert (strict.value.param, strict.value.code) == ("max_tokens", None)


def test_one_submit_for_each_sequence() -> None:
    request = replace(REQUEST, n=3, adapter="sql", salt="t", params=replace(REQUEST.params, seed=MAX_SEED - 1))
    submits = request.submits(itertools.count(7))
    assert [submit.id for submit in submits] == [7, 8, 9]
    assert [submit.params.seed for submit in submits] == [MAX_SEED - 1, MAX_SEED, MIN_SEED]
    below = replace(request, params=replace(request.params, seed=-2)).submits(itertools.count())
    assert [submit.params.seed for submit in below] == [-2, -1, 0]
    assert {(submit.adapter, submit.salt) for submit in submits} == {("sql", "t")}
    assert [submit.params.seed for submit in replace(REQUEST, n=2).submits(itertools.count())] == [None, None]


def test_each_sequence_has_every_field_of_its_request() -> None:
    """Of the same name, and unlike the default: one that is forgotten is a tenant's KV for all, or a lost priority."""
    common = {each.name for each in fields(TextRequest)} & {each.name for each in fields(Submit)}
    values: dict[str, Any] = {
        "tokens": array("i", [4, 5]),
        "params": SamplingParams(max_tokens=3, seed=None),
        "adapter": "sql",
        "salt": "salt",
        "grammar": GrammarSpec.regex("a+"),
        "tenant": "tenant",
        "cache_tenant": "cache tenant",
        "priority": Priority.BATCH,
        "session": "session",
        "session_seconds": 7.0,
        "pin_seconds": 5.0,
        "prefix_pins": ((1, 2.0),),
        "reasoning": ThoughtRules("<think>", "</think>", is_open=True),
        "generated": array("i", [6]),
    }
    assert values.keys() == common
    submits = TextRequest(n=2, **values).submits(itertools.count())
    expected = values | {"grammar": (values["grammar"].kind.value, values["grammar"].content)}
    assert [{name: getattr(submit, name) for name in common} for submit in submits] == [expected] * 2


def test_prompts_of_token_ids() -> None:
    assert token_array([1, 2]) == array("i", [1, 2])
    for wrong in ([1 << 31], ["a"], [1.5], [None]):
        with pytest.raises(RequestError, match="list of token ids"):
            token_array(wrong)


@pytest.mark.parametrize("token", [-1, -(1 << 31), 50, 51, 1 << 30])
def test_no_id_outside_of_the_vocabulary_comes_further_than_the_check(token: int) -> None:
    """Not in front of or behind right ones either: ids are trusted below."""
    params = [{"stop_token_ids": (1, token)}, {"logit_bias": ((1, 1.0), (token, 1.0))}]
    for request in (*(with_params(**each) for each in params), replace(REQUEST, tokens=array("i", [1, token, 2]))):
        with pytest.raises(RequestError, match="49"):
            LIMITS.check(request)


def test_pins_of_beginnings_lie_within_the_prompt() -> None:
    for pins in ((), ((0, 0.0), (3, 86400.0)), ((1, 5.0),) * 4):
        request = replace(REQUEST, prefix_pins=pins)
        assert LIMITS.check(request) is request
    for wrong in (((4, 5.0),), ((-1, 5.0),), ((3, 86401.0),), ((3, -1.0),), ((1, 5.0),) * 5):
        with pytest.raises(RequestError, match="prefix_pins"):
            LIMITS.check(replace(REQUEST, prefix_pins=wrong))
