"""From messages to text: stop strings, usage, logprobs, reasons."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.api.observe.token_usage import UsageCount
from rootgraft.engine import errors
from rootgraft.engine.messages import Done, Failed, TokenOut
from rootgraft.engine.serving.output_processor import OutputProcessor, TextDelta, error_of
from rootgraft.engine.serving.request import TextRequest
from rootgraft.engine.text.stop_strings import StopStrings
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.types import FinishReason, Logprob, SamplingParams, Usage

REQUEST = TextRequest(array("i", [5, 6, 7]), SamplingParams(max_tokens=100))


def make(tokenizer: Tokenizer, request: TextRequest) -> OutputProcessor:
    return OutputProcessor(tokenizer, request, StopStrings(request.stop) if request.stop else None)


def run(tokenizer: Tokenizer, request: TextRequest, portions: list[list[int]], done: Done) -> list[TextDelta]:
    """The deltas of portions of tokens and a Done; after a stop string the engine ends the sequence late."""
    generation = make(tokenizer, request)
    deltas = [generation.push(TokenOut(1, tuple(portion))) for portion in portions]
    if generation.stopped:
        done = replace(done, reason=FinishReason.ABORT)
    return [delta for delta in [*deltas, generation.push(done)] if delta is not None]


def done(completion: int = 50, **values: Any) -> Done:
    return Done(1, values.pop("reason", FinishReason.LENGTH), Usage(3, 2, completion), **values)


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@given(
    text=st.text(alphabet="abé🎉", max_size=30),
    stops=st.lists(st.text(alphabet="abé🎉", min_size=1, max_size=4), max_size=3).map(tuple),
    size=st.integers(1, 4),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_stop_strings_against_whole_texts(
    tiny: Tokenizer, text: str, stops: tuple[str, ...], size: int, include: bool, min_tokens: int
) -> None:
    tokens = tiny.encode(text, False).tolist()
    portions = [tokens[start : start + size] for start in range(0, len(tokens), size)]
    params = replace(REQUEST.params, min_tokens=min_tokens)
    request = replace(REQUEST, stop=stops, include_stop=include, params=params)
    deltas = run(tiny, request, portions, done(len(tokens)))
    finish = deltas[-1].finish
    assert finish is not None

    shown, stop, count = text, None, len(tokens)
    for taken in range(min_tokens + 1, len(tokens) + 1):
        before = tiny.join_bytes(tokens[: taken - 1], True).decode(errors="ignore")
        now = tiny.join_bytes(tokens[:taken], True).decode(errors="ignore")
        ends = [
            (end, -len(candidate), candidate)
            for candidate in stops
            for end in range(len(before) + 1, len(now) + 1)
            if now[:end].endswith(candidate)
        ]
        if ends:
            end, _, stop = min(ends)
            shown, count = now[: end if include else end - len(stop)], taken
            break
    assert text_of(deltas) == shown
    assert finish.stop_reason == stop
    assert finish.usage == Usage(3, 2, count)
    assert finish.reason == (FinishReason.STOP if stop else FinishReason.LENGTH)
    assert [token for delta in deltas for token in delta.tokens] == tokens[:count]


def test_messages_after_a_stop_string_are_ignored(tiny: Tokenizer) -> None:
    generation = make(tiny, replace(REQUEST, stop=("b",)))
    tokens = tiny.encode("abc", False).tolist()
    delta = generation.push(TokenOut(1, tuple(tokens)))
    assert delta is not None
    assert (delta.text, delta.tokens, delta.finish) == ("a", tuple(tokens[:2]), None)
    assert generation.stopped
    assert generation.push(TokenOut(1, (tokens[0],))) is None
    last = generation.push(done(9, reason=FinishReason.ABORT))
    assert last is not None and last.finish is not None
    assert (last.text, last.finish.reason, last.finish.stop_reason) == ("", FinishReason.STOP, "b")
    assert last.finish.usage == Usage(3, 2, 2)


@given(portions=st.lists(st.integers(1, 17), min_size=1, max_size=6), at=st.integers(0, 40), n=st.integers(1, 3))
def test_drafts_behind_a_stop_string_do_not_count(tiny: Tokenizer, portions: list[int], at: int, n: int) -> None:
    """All but one token of a step were drafted, all were forced: of the answer's never more than it has."""
    total = sum(portions)
    a, b = (tiny.encode(letter, False)[0] for letter in "ab")
    tokens = [b if index == at else a for index in range(total)]
    starts = [sum(portions[:index]) for index in range(len(portions))]
    steps = [tokens[start : start + size] for start, size in zip(starts, portions, strict=True)]
    usage = Usage(3, 2, total, drafted=total - len(portions), forced=total)
    count = UsageCount()
    for _ in range(n):
        finish = run(tiny, replace(REQUEST, stop=("b",)), steps, Done(1, FinishReason.LENGTH, usage))[-1].finish
        assert finish is not None and finish.usage.completion == min(at + 1, total)
        assert max(finish.usage.drafted, finish.usage.forced) <= finish.usage.completion
        assert finish.usage.drafted == min(usage.drafted, finish.usage.completion)
        count.add(0, finish.usage)
    told = count.body()
    assert max(told["completion_tokens_details"].values()) <= told["completion_tokens"] == count.counts().completion


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize(
    ("stop_token", "stop_token_ids", "reason"), [(2, (), None), (2, (2,), 2), (9, (2, 9), 9), (None, (2,), None)]
)
def test_stop_tokens(
    tiny: Tokenizer, stop_token: int | None, stop_token_ids: tuple[int, ...], reason: Any, ignores: bool
) -> None:
    """The model's own end token, 2, is a reason only if it ends an answer by the request alone."""
    assert 2 in tiny.eos_ids and 9 not in tiny.eos_ids
    reason = None if reason == 2 and not ignores else reason
    request = replace(REQUEST, params=replace(REQUEST.params, stop_token_ids=stop_token_ids, ignore_eos=ignores))
    end = done(reason=FinishReason.STOP, stop_token=stop_token)
    finish = run(tiny, request, [[50]], end)[-1].finish
    assert finish is not None
    assert (finish.reason, finish.stop_reason, finish.usage) == (FinishReason.STOP, reason, Usage(3, 2, 50))


def test_stop_token_is_shown_when_asked_for(tiny: Tokenizer) -> None:
    end = done(reason=FinishReason.STOP, stop_token=2)
    tokens = tiny.encode("the", False).tolist()
    shown = replace(REQUEST, include_stop=True, skip_special_tokens=False)
    assert text_of(run(tiny, REQUEST, [tokens], end)) == "the"
    assert text_of(run(tiny, replace(REQUEST, include_stop=True), [tokens], end)) == "the"
    assert text_of(run(tiny, shown, [tokens], end)) == "the<|im_end|>"
    assert text_of(run(tiny, replace(shown, stop=("zz",)), [tokens], end)) == "the<|im_end|>"


def test_what_was_held_back_comes_with_the_end(tiny: Tokenizer) -> None:
    party = tiny.encode("ok #🎉", False).tolist()[:-1]
    deltas = run(tiny, replace(REQUEST, stop=("##",)), [[token] for token in party], done())
    assert deltas[-1].text.endswith("\ufffd")
    assert text_of(deltas) == "ok #\ufffd"


def test_logprobs(tiny: Tokenizer) -> None:
    [half] = [token for token in range(tiny.vocab_size) if tiny.token_bytes(token) == b"\xc3"]
    [letter] = tiny.encode("a", False)
    engine = (Logprob(half, -0.5, 1, ((half, -0.5), (letter, -2.0))), Logprob(letter, -1.0, 3, ()))
    delta = make(tiny, REQUEST).push(TokenOut(1, (half, letter), engine, engine[1:]))
    assert delta is not None
    first, second = delta.logprobs
    assert (first.text, first.bytes, first.rank, first.logprob) == ("\ufffd", b"\xc3", 1, -0.5)
    assert [(top.token, top.text, top.bytes, top.logprob) for top in first.top] == [
        (half, "\ufffd", b"\xc3", -0.5),
        (letter, "a", b"a", -2.0),
    ]
    assert delta.prompt_logprobs == (second,)
    assert (second.text, second.rank, second.top) == ("a", 3, ())


def test_logprobs_end_with_the_tokens(tiny: Tokenizer) -> None:
    tokens = tuple(tiny.encode("abc", False))
    logprobs = tuple(Logprob(token, -1.0, 1, ()) for token in tokens)
    delta = make(tiny, replace(REQUEST, stop=("b",))).push(TokenOut(1, tokens, logprobs))
    assert delta is not None
    assert [entry.token for entry in delta.logprobs] == list(delta.tokens) == list(tokens[:2])


@pytest.mark.parametrize("kind", ["RequestError", "ContextTooLong", "UnknownModel", "CapacityError", "EngineDead", "?"])
def test_errors_by_name(kind: str) -> None:
    error = error_of(Failed(1, kind, "the text", "field", "the_code"))
    assert type(error) is getattr(errors, kind, errors.EngineError)
    assert str(error) == "the text"
    if isinstance(error, errors.RequestError):
        assert (error.param, error.code) == ("field", "the_code")
