"""Each row of the table of sampling options is a field of every door, with its bounds, its default and its aliases."""

from __future__ import annotations

from array import array
from dataclasses import fields, replace
from typing import Any

import pytest

from rootgraft.api.anthropic.message_request import MessagesRequest
from rootgraft.api.protocol.chat import ChatRequest
from rootgraft.api.protocol.completions import CompletionRequest
from rootgraft.api.protocol.responses import ResponseRequest
from rootgraft.engine.errors import RequestError
from rootgraft.engine.offline.sampling_params import SamplingParams as OfflineParams
from rootgraft.engine.sampling_options import OPTIONS, SamplingOption
from rootgraft.engine.serving.request import RequestLimits, TextRequest
from rootgraft.engine.types import SamplingDefaults, SamplingParams

LIMITS = RequestLimits(1000, 100)
NAMES = [option.name for option in OPTIONS]
MESSAGES = [{"role": "user", "content": "Hi"}]
DOORS: list[tuple[Any, dict[str, Any]]] = [
    (ChatRequest, {"messages": MESSAGES}),
    (CompletionRequest, {"prompt": "Hi"}),
    (ResponseRequest, {"input": "Hi"}),
    (MessagesRequest, {"model": "m", "messages": MESSAGES, "max_tokens": 1}),
]


def checked(name: str, value: object) -> object:
    request = TextRequest(array("i", [1]), replace(SamplingParams(), **{name: value}))
    return getattr(LIMITS.check(request).params, name)


@pytest.mark.parametrize("option", OPTIONS, ids=NAMES)
def test_bounds_are_checked_on_both_sides(option: SamplingOption) -> None:
    step = 1 if option.kind is int else 1e-6
    inside = (option.low + step if option.is_above_low else option.low, option.neutral, option.high)
    for value in inside:
        assert checked(option.name, option.kind(value)) == option.kind(value)
    below = option.low if option.is_above_low else min((option.low, *option.aliases)) - step
    for value in (option.kind(below), option.kind(option.high + step), True, "1", float("nan")):
        with pytest.raises(RequestError, match=option.name) as refused:
            checked(option.name, value)
        assert refused.value.param == option.name
    for alias in option.aliases:
        assert checked(option.name, alias) == option.neutral


@pytest.mark.parametrize(("model", "body"), DOORS, ids=lambda each: getattr(each, "__name__", ""))
def test_every_door_takes_every_option(model: Any, body: dict[str, Any]) -> None:
    for option in OPTIONS:
        default = getattr(model.model_validate(body), option.name)
        assert default == (None if model.model_fields[option.name].default is None else option.neutral)
        value = option.kind(option.high)
        if (model, option.name) != (MessagesRequest, "temperature"):  # Anthropic's ends at 1
            assert getattr(model.model_validate({**body, option.name: value}), option.name) == value


def test_a_default_of_the_model_counts_where_a_body_names_none() -> None:
    recommended = {option.name: option.kind(option.high) for option in OPTIONS if option.recommended}
    body = ChatRequest.model_validate({"messages": MESSAGES, "top_p": 0.5})
    params = body.sampling(SamplingDefaults(**recommended), max_tokens=1, logprobs=None, prompt_logprobs=None)
    expected = {option.name: recommended.get(option.name, option.neutral) for option in OPTIONS} | {"top_p": 0.5}
    assert {name: getattr(params, name) for name in NAMES} == expected


def test_parameters_by_vllms_names_have_every_option() -> None:
    defaults = {each.name: each.default for each in fields(OfflineParams)}
    assert {option.name: defaults.get(option.name) for option in OPTIONS} == {
        option.name: option.neutral for option in OPTIONS
    }
    values = {option.name: option.kind(option.high) for option in OPTIONS}
    params = OfflineParams(**values).engine_params(1, LIMITS)
    assert {name: getattr(params, name) for name in NAMES} == values
