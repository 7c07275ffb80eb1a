"""Programs against the server: what is sent, what comes back, and what is said when something goes wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse
from typing import Any

import pytest
from pydantic import BaseModel
from support.api.api_live import Live
from support.engine.interrupts import wait_for_branches
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.engine.errors import CapacityError
from rootgraft.engine.types import AdapterInfo
from rootgraft.programs import Branch, ProgramError, Session


class City(BaseModel):
    name: str
    people: int


def prompts(live: Live) -> list[str]:
    return [bytes(token for token in request.tokens if token < 256).decode() for request in live.async_engine.seen]


def test_a_conversation_goes_on_from_what_was_generated(live: Live, remote: Session) -> None:
    live.async_engine.say = lambda request, index: "Paris"
    assert remote.system("Be brief.").user("Capital of France?").gen("city", max_tokens=9) == "Paris"
    remote.user("And of Italy?").assistant("It is").gen("other", stop=[";"], seed=3, temperature=0.5)
    assert prompts(live)[0] == "<system>Be brief.\n<user>Capital of France?\n<assistant>"
    assert remote.messages[-1] == {"role": "assistant", "content": "It isParis"}
    assert remote.values == {"city": "Paris", "other": "Paris"} and remote["city"] == "Paris"
    assert live.async_engine.tokenizer.rendered[-1]["continue_final_message"]
    second = live.async_engine.seen[1]
    assert (second.stop, second.params.seed, second.params.temperature, second.params.max_tokens) == (
        (";",),
        3,
        0.5,
        256,
    )


def test_forms_are_asked_for_and_come_back_as_values(live: Live, remote: Session) -> None:
    live.async_engine.say = lambda request, index: {
        "json_schema": '{"name": "Paris", "people": 2}', "regex": "12", "choice": "no"
    }[request.grammar.kind]  # fmt: skip
    remote.user("?")
    assert remote.gen("a", schema=City) == City(name="Paris", people=2)
    assert remote.gen("b", schema=City.model_json_schema()) == {"name": "Paris", "people": 2}
    assert remote.gen("c", regex="[0-9]+") == "12"
    assert remote.gen("d", choices=["yes", "no"]) == "no"
    with pytest.raises(ProgramError, match="schema and regex contradict each other"):
        remote.gen("e", schema=City, regex="x")


def test_a_stream_comes_in_pieces_and_may_be_left(live: Live, remote: Session) -> None:
    live.async_engine.say = lambda request, index: "one two"
    remote.user("?")
    assert list(remote.stream("left", max_tokens=7))[:3] == ["o", "n", "e"]
    for _ in remote.stream("half"):
        break
    assert remote["left"] == "one two" and "half" not in remote.values
    assert remote.messages[-1]["content"] == "one two"


def test_branches_run_beside_each_other_and_join(live: Live, remote: Session) -> None:
    live.async_engine.say = lambda request, index: f"about {request.params.seed}"
    remote.user("Topic?").gen("topic", seed=0)

    def write(branch: Branch, seed: int) -> str:
        branch.user(f"Take {seed}.")
        return branch.gen("draft", seed=seed)

    fork = remote.fork(3)
    assert fork.map(write, [3, 1, 2]) == ["about 3", "about 1", "about 2"]
    assert [branch.path for branch in fork] == ["root/0", "root/1", "root/2"]
    assert len(remote.messages) == 2 and fork[1].messages[:2] == remote.messages
    assert fork.join() == {"draft": ["about 3", "about 1", "about 2"]}
    assert remote["draft"] == ["about 3", "about 1", "about 2"] and remote["topic"] == "about 0"
    assert remote.map(lambda branch, item: branch.path + item, "ab") == ["root/3a", "root/4b"]
    assert remote.map(write, []) == []
    assert remote.begin().messages == []


def test_the_report_adds_up_all_branches(live: Live, remote: Session) -> None:
    remote.user("?")
    remote.map(lambda branch, item: branch.gen("x"), range(4))
    report = remote.report()
    sizes = [len(request.tokens) for request in live.async_engine.seen]
    assert (report.calls, report.prompt, report.cached) == (4, sum(sizes), sum(size // 2 for size in sizes))
    assert report.completion == 4 * len("answer 0") and report.computed == report.prompt - report.cached
    assert str(report).startswith("4 calls: ")


def test_select_sums_what_the_server_scores(live: Live, remote: Session) -> None:
    remote.user("?").assistant("It is ")
    assert remote.select("x", ["long one", "no"]) == "no"
    # A token of the fake has one byte. Of the tokens that are named at a position the second one has 1 less.
    assert remote.scores["x"] == {"long one": -0.25 * 8, "no": -0.25 * 2 - 1}
    assert remote.messages[-1]["content"] == "It is no"
    # Each choice is a branch of the tree behind the prompt, whose children are its first tokens.
    root, *branches = live.async_engine.seen
    assert root.params.logprob_token_ids == (ord("l"), ord("n"))
    assert {len(each.tokens) - len(root.tokens) for each in branches} == {1, 7}
    assert remote.select("y", ["ab", "abcd"], normalise=True) == "ab" and set(remote.scores["y"].values()) == {-0.25}
    assert remote.report().completion == 0
    for choices in ([], ["a", ""]):
        with pytest.raises(ProgramError, match=r"root, select 'z': choices.* must"):
            remote.select("z", choices)


def test_warm_computes_the_prompt_alone(live: Live, remote: Session) -> None:
    remote.user("?").warm()
    assert prompts(live) == ["<user>?\n<assistant>"] and live.async_engine.seen[0].params.max_tokens == 1
    remote.warm(pin=90)
    assert [request.pin_seconds for request in live.async_engine.seen] == [0, 90]


def test_each_branch_is_a_session(live: Live, remote: Session) -> None:
    remote.user("?").gen("x")
    remote.map(lambda branch, _: branch.gen("x"), range(2))
    remote.select("y", ["a", "b"])
    names = [request.session for request in live.async_engine.seen]
    root = names[0].removesuffix("/root")
    assert {*names[1:3]} == {f"{root}/root/0", f"{root}/root/1"} and {*names[3:]} == {f"{root}/root"}
    with Session(live.url) as other:
        other.user("?").gen("x")
    assert not live.async_engine.seen[-1].session.startswith(root)
    deep = remote
    for _ in range(90):
        deep = deep.fork(1)[0]
    deep.gen("x")
    assert len(deep.path) > 128 and len(live.async_engine.seen[-1].session) <= 128


def test_an_adapter_is_a_model(live: Live, remote: Session) -> None:
    live.client.adapters = {"pirate": AdapterInfo("pirate", "", 8, 0, False, "device", 0, 0, 0)}
    remote.user("?").gen("x", adapter="pirate")
    remote.warm(adapter="pirate").select("y", ["a", "b"], adapter="pirate")
    assert {request.adapter for request in live.async_engine.seen} == {"pirate"}


def test_errors_name_branch_and_step(live: Live, remote: Session) -> None:
    def ask(branch: Branch, model: Any) -> str:
        return branch.user("?").gen("score", adapter=model)

    with pytest.raises(
        ProgramError, match=r"branch root/1, gen 'score': the server answers HTTP 404: .*'nobody'"
    ) as told:
        remote.map(ask, [None, "nobody", "no one"])
    assert (told.value.branch, told.value.step) == ("root/1", "gen 'score'")
    assert "root/2" in told.value.__notes__[0]
    live.async_engine.fail_after = (2, CapacityError("Broken off."))
    with pytest.raises(ProgramError, match="Broken off"):
        remote.user("?").gen("x")
    live.async_engine.fail_after = None
    live.async_engine.shortest = 12
    with pytest.raises(ProgramError, match=r"max_tokens=3 is too small .* the shortest takes 12 tokens"):
        remote.gen("x", schema=City, max_tokens=3)
    live.async_engine.say = lambda request, index: "no JSON"
    with pytest.raises(ProgramError, match="ended with 'error'"):
        remote.gen("x", schema=City)


def test_a_stop_string_that_cuts_an_answer_of_a_form_is_an_error(live: Live, remote: Session) -> None:
    live.async_engine.say = lambda request, index: "12"  # of which the fake says that the stop string ended it
    remote.user("?")
    with pytest.raises(ProgramError, match="gen 'x': the stop string '3' cut off the answer: '12'"):
        remote.gen("x", regex="[0-9]{3}", stop="3")
    assert remote.gen("x", stop="3") == "12" and "x" in remote.values


def test_an_empty_answer_leaves_nothing_to_continue(live: Live, remote: Session) -> None:
    remote.user("?")
    answers = iter(["", "", "now"])
    live.async_engine.say = lambda request, index: next(answers)
    assert [remote.gen("x") for _ in range(3)] == ["", "", "now"]
    assert set(prompts(live)) == {"<user>?\n<assistant>"}
    assert remote.messages[1:] == [{"role": "assistant", "content": "now"}]


def test_a_busy_server_is_asked_again(live: Live, remote: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[int] = []

    def pause(response: HTTPResponse, attempt: int) -> float:
        pauses.append(attempt)
        live.state.engine.draining = len(pauses) < 2
        return 0

    monkeypatch.setattr("rootgraft.programs.http_backend._pause", pause)
    live.state.engine.draining = True
    assert Session(live.url, model="tiny").user("?").gen("x") == "answer 0"
    assert pauses == [1, 2]


def ask(branch: Branch, number: int) -> str:
    return branch.user(f"{number}?").gen("x")


def test_closing_the_session_ends_the_calls_that_run(live: Live) -> None:
    live.async_engine.gate = asyncio.Event()  # never set
    session = Session(live.url, model="tiny")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(session.map, ask, range(3))
        wait_until(lambda: len(live.async_engine.seen) == 3)
        session.close()
        with pytest.raises(ProgramError, match="gen 'x': the session is closed"):
            asked.result(HANG_SECONDS)
    wait_until(lambda: len(live.async_engine.aborted) == 3)
    with pytest.raises(ProgramError, match="the session is closed"):
        session.user("?").gen("y")


def test_closing_the_session_ends_the_wait_for_a_busy_server(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = threading.Event()

    def pause(response: HTTPResponse, attempt: int) -> float:
        waits.set()
        return 1000

    monkeypatch.setattr("rootgraft.programs.http_backend._pause", pause)
    live.state.engine.draining = True
    session = Session(live.url, model="tiny")
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, session, 1)
        assert waits.wait(HANG_SECONDS)
        session.close()
        with pytest.raises(ProgramError, match="the session is closed"):
            asked.result(HANG_SECONDS)


def test_an_interrupt_ends_the_calls_of_all_branches(live: Live, alarm: Callable[[float], None]) -> None:
    live.async_engine.gate = asyncio.Event()  # never set
    with pytest.raises(KeyboardInterrupt), Session(live.url, model="tiny") as session:
        alarm(0.2)
        session.map(ask, range(4))
    wait_for_branches()
    wait_until(lambda: len(live.async_engine.aborted) == len(live.async_engine.seen))


def test_addresses_and_targets(closed_port: int) -> None:
    with pytest.raises(ValueError, match="must be a URL such as http"):
        Session("localhost:8000")
    with pytest.raises(ProgramError, match="no answer from"):
        Session(f"http://127.0.0.1:{closed_port}").user("?").gen("x")
    for url in ("http://user:secret@127.0.0.1:8000/v1", "http://127.0.0.1:8000/v1?key=secret"):
        with pytest.raises(ValueError, match="must not contain a user or a query: give a key as api_key"):
            Session(url)
    with pytest.raises(ValueError, match="the address of a server, or an LLM, not NoneType"):
        Session(None)  # type: ignore[arg-type]
