"""Wrong arguments of programs: a ``ProgramError`` that names branch, step and argument, and nothing is asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from support.api.api_live import Live

from rootgraft.programs import Branch, ProgramError, Session

WRONG: dict[str, tuple[Callable[[Branch], Any], str]] = {
    "user None": (lambda b: b.user(None), "user: text must be a string, not NoneType"),  # type: ignore[arg-type]
    "system bytes": (lambda b: b.system(b"x"), "system: text must be a string, not bytes"),  # type: ignore[arg-type]
    "assistant None": (lambda b: b.assistant(None), "assistant: text must be a string"),  # type: ignore[arg-type]
    "surrogate": (lambda b: b.user("a\ud800"), "user: text holds half of a surrogate pair, at position 1"),
    "no conversation": (lambda b: b.gen("x"), "gen 'x': the conversation is empty"),
    "select of none": (lambda b: b.user("?").select("x", []), "select 'x': choices must have at least one string"),
    "select of a string": (lambda b: b.user("?").select("x", "yes"), "choices must be a list of strings, not str"),
    "select of numbers": (lambda b: b.user("?").select("x", [1]), r"choices\[0\] must be a string, not int"),  # type: ignore[list-item]
    "gen of a string": (lambda b: b.user("?").gen("x", choices="yes"), "choices must be a list of strings, not str"),
    "gen of an empty choice": (lambda b: b.user("?").gen("x", choices=["a", ""]), r"choices\[1\] must not be empty"),
    "regex": (lambda b: b.user("?").gen("x", regex=3), "regex must be a string, not int"),
    "stop": (lambda b: b.user("?").gen("x", stop=3), "stop must be a list of strings, not int"),
    "empty stop": (lambda b: b.user("?").gen("x", stop=""), r"stop\[0\] must not be empty"),
    "temperature": (lambda b: b.user("?").gen("x", temperature=float("nan")), "temperature must be at least 0 and"),
    "adapter": (lambda b: b.user("?").gen("x", adapter=""), "adapter must be the name of an adapter, or None"),
    "schema text": (lambda b: b.user("?").gen("x", schema='{"type": "object"}'), "or a JSON Schema as a dict, not str"),
    "schema instance": (lambda b: b.user("?").gen("x", schema=object()), "schema must be a type that pydantic"),
    "schema set": (lambda b: b.user("?").gen("x", schema={"enum": {1, 2}}), "schema is not JSON: .*set"),
    "schema nan": (lambda b: b.user("?").gen("x", schema={"const": float("nan")}), "schema is not JSON"),
    "schema callable": (lambda b: b.user("?").gen("x", schema=Callable[[int], int]), "schema must be a type"),
    "pin below": (
        lambda b: b.user("?").warm(pin=-1),
        "warm: pin must be a whole number of seconds from 0 to 86400, not -1",
    ),
    "pin above": (lambda b: b.user("?").warm(pin=86401), "warm: pin must be a whole number of seconds from 0 to 86400"),
    "pin half": (lambda b: b.user("?").warm(pin=1.5), "pin must be a whole number of seconds from 0 to"),  # type: ignore[arg-type]
    "fork below": (lambda b: b.fork(-1), "fork: count must be an integer of at least 0, not -1"),
    "fork half": (lambda b: b.fork(2.5), "fork: count must be an integer"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_named(live: Live, case: str) -> None:
    call, message = WRONG[case]
    with Session(live.url) as session, pytest.raises(ProgramError, match=f"branch root, .*{message}"):
        call(session)
    assert live.async_engine.seen == []


def test_a_schema_text_is_not_evaluated(live: Live) -> None:
    """Pydantic takes a string for an annotation, which it evaluates."""
    with Session(live.url) as session, pytest.raises(ProgramError, match="schema must be"):
        session.user("?").gen("x", schema="__import__('os').environ.__setitem__('EVALUATED', '1') or int")
    assert "EVALUATED" not in os.environ


@pytest.mark.parametrize("option", [{"max_tokens": object()}, {"temperature": {1}}, {"seed": b"x"}])
def test_what_is_no_json_is_an_error_of_the_step(live: Live, option: dict[str, Any]) -> None:
    with Session(live.url) as session, pytest.raises(ProgramError, match="gen 'x': an argument is not a JSON value"):
        session.user("?").gen("x", **option)


@pytest.mark.parametrize("pin", [1, 86400])
def test_the_least_and_the_longest_pin_are_taken(live: Live, pin: int) -> None:
    with Session(live.url) as session:
        session.user("?").warm(pin=pin)
    assert live.async_engine.seen[0].pin_seconds == pin


def test_choices_may_be_any_iterable(live: Live) -> None:
    live.async_engine.say = lambda request, index: "b"
    with Session(live.url) as session:
        assert session.user("?").gen("x", choices=iter("ab")) == "b"
        assert session.select("y", (each for each in ("a", "one"))) == "a"  # type: ignore[arg-type]


def test_items_are_as_many_as_branches(live: Live) -> None:
    with Session(live.url) as session, pytest.raises(ValueError, match="items must be 3, one for each branch"):
        session.fork(3).map(lambda branch, item: item, [1, 2])


def test_arguments_are_named_without_a_server_too(offline: Session) -> None:
    for option, message in (
        ({"max_tokens": "x"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"seed": 1.5}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": "x" * 300}, "stop"),
    ):
        with pytest.raises(ProgramError, match=f"gen 'x': .*{message}"):
            offline.begin().user("?").gen("x", **option)
    assert offline.user("?").gen("x", max_tokens=2) is not None
