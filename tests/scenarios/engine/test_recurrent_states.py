"""Recurrent states in the engine: whatever is shared, preempted or aborted, a row reads the state of its own tokens.

The device of integers keeps in a state what stands for all tokens before it, and compares it with the KV of the same
sequence whenever a row begins a step.
"""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import worker_of
from support.engine.fake_worker import FakeWorker, expected_tokens
from support.machine.thoroughness import repeats

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.kv_cache.state_cache import StateCache, StateSlots
from rootgraft.engine.messages import Abort, Done, Failed, Message, Submit, TokenOut
from rootgraft.engine.types import Priority, SamplingParams
from rootgraft.radix.invariants import BrokenInvariant

PAGE, ROWS, VOCAB = 4, 4, 11


def make_core(
    *,
    pages: int = 64,
    checkpoints: int = 20,
    interval: int = PAGE,
    budget: int = 16,
    overlaps: bool = False,
    drafts: int = 0,
) -> EngineCore:
    config = EngineConfig(block_size=PAGE, max_num_seqs=ROWS, max_num_batched_tokens=budget)
    slots = StateSlots(ROWS, checkpoints, interval, drafts)
    return EngineCore(config, FakeWorker(pages, PAGE, vocab_size=VOCAB, overlaps=overlaps, states=slots))


class Client:
    """Collects what the engine says of each sequence, and checks all equations after each step."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.submits: list[Submit] = []
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Message] = {}

    def submit(self, prompt: list[int], count: int, priority: Priority = Priority.INTERACTIVE, tenant: str = "") -> int:
        number = len(self.submits)
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        self.submits.append(Submit(number, array("i", prompt), params, priority=priority, cache_tenant=tenant))
        self.tokens[number] = []
        self.core.handle(self.submits[-1:])
        return number

    def step(self) -> None:
        for message in self.core.step():
            if isinstance(message, TokenOut):
                self.tokens[message.id] += message.tokens
            elif isinstance(message, (Done, Failed)):
                self.ends[message.id] = message
        self.core.check()

    def run(self) -> None:
        for _ in range(5000):
            if not self.core.has_work:
                break
            self.step()
        assert len(self.ends) == len(self.submits)
        for submit in self.submits:
            said = self.tokens[submit.id]
            assert said == expected_tokens(submit.tokens, len(said), VOCAB)

    def cached(self, number: int) -> int:
        end = self.ends[number]
        assert isinstance(end, Done)
        return end.usage.cached


def test_the_same_prompt_and_the_next_turn_are_hits() -> None:
    client = Client(make_core())
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    first = client.submit(prompt, 9)
    client.run()
    again = client.submit(prompt, 3)
    turn = client.submit([*prompt, *client.tokens[first], 7, 7], 3)
    client.run()
    assert client.cached(again) == 8
    assert client.cached(turn) == 16  # of the answer's pages too: the last token of 19 has no KV


def test_answers_to_one_prompt_share_its_checkpoint_and_no_state() -> None:
    client = Client(make_core())
    answers = [client.submit(list(range(10)), 6) for _ in range(3)]
    client.run()
    assert [client.cached(number) for number in answers] == [0, 8, 8]
    starts = [start for batch in worker_of(client.core).batches for start in batch.starts]
    assert len({start.row for start in starts}) == 3
    assert len({start.state for start in starts[1:]}) == 1


def drafted(client: Client) -> list[int]:
    """Numbers of drafts of all rows that had any."""
    rows = [row for batch in worker_of(client.core).batches for row in batch.rows]
    return [row.num_drafts for row in rows if row.num_drafts]


def test_without_slots_before_drafts_none_is_computed() -> None:
    client = Client(make_core(pages=100))
    client.submit([1, 2, 3] * 10, 30)  # what prompt lookup would continue
    client.run()
    assert not drafted(client)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("interval", [PAGE, 40 * PAGE])
def test_drafts_change_no_token_whether_accepted_or_not(interval: int, overlaps: bool) -> None:
    """The device says so: a row reads the state of exactly its tokens."""
    client = Client(make_core(pages=100, interval=interval, overlaps=overlaps, drafts=5))
    prompt = [3, 1, 4, 1, 5, 9]
    said = expected_tokens(prompt, 40, VOCAB)
    first = client.submit(prompt, 40)
    client.run()
    for number in range(3):  # what the first answer says, up to a token that it does not
        client.submit([*prompt, *said[: 9 + number], number], 30)
        client.submit(prompt, 40)
        client.run()
    counts, stats = drafted(client), client.core.stats()
    assert counts and max(counts) <= 5
    assert 0 < stats["draft_tokens_accepted"] < stats["draft_tokens"]
    assert client.cached(first) == 0


def test_no_more_drafts_than_slots() -> None:
    client = Client(make_core(pages=100, interval=40 * PAGE, budget=40, drafts=3))
    for number in range(ROWS):
        client.submit([*[1, 2, 3] * 5, number], 30)
    client.run()
    rows = [sum(row.num_drafts for row in batch.rows) for batch in worker_of(client.core).batches]
    assert 0 < max(rows) <= 3


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_preempted_sequence_resumes_from_its_last_checkpoint(overlaps: bool) -> None:
    client = Client(make_core(pages=12, overlaps=overlaps))
    for number in range(3):
        client.submit([number] * 9, 25)
    client.run()
    assert client.core.stats()["preemptions"] > 0
    resumed = [start for batch in worker_of(client.core).batches for start in batch.starts if start.state >= 0]
    assert resumed


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.just("submit"),
            st.lists(st.integers(0, 1), min_size=1, max_size=14),
            st.integers(1, 9),
            st.sampled_from(Priority),
            st.sampled_from(("", "t")),
        ),
        st.tuples(st.just("again"), st.integers(0, 99), st.integers(1, 9)),
        st.tuples(st.just("abort"), st.integers(0, 99)),
        st.tuples(st.just("step"), st.integers(1, 4)),
    ),
    max_size=25,
)


@settings(max_examples=repeats(150))
@given(
    operations=OPERATIONS,
    pages=st.integers(9, 40),
    checkpoints=st.integers(0, 9),
    interval=st.sampled_from((PAGE, 3 * PAGE, 100 * PAGE)),
    overlaps=st.booleans(),
    drafts=st.integers(0, 6),
)
def test_any_traffic(
    operations: list[tuple], pages: int, checkpoints: int, interval: int, drafts: int, *, overlaps: bool
) -> None:
    slots = {"checkpoints": checkpoints, "interval": interval, "drafts": drafts}
    client = Client(make_core(pages=pages, budget=9, overlaps=overlaps, **slots))
    for kind, *values in operations:
        if kind == "submit":
            client.submit(*values)
        elif kind == "again" and client.submits:
            earlier = client.submits[values[0] % len(client.submits)]
            client.submit([*earlier.tokens, *client.tokens[earlier.id], 1][:20], values[1], tenant=earlier.cache_tenant)
        elif kind == "abort" and client.submits:
            client.core.handle([Abort((values[0] % len(client.submits),))])
        elif kind == "step":
            for _ in range(values[0]):
                client.step()
    client.run()


@pytest.mark.parametrize("fault", ["forget", "drop", "longest"])
def test_the_tests_above_would_notice(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults made on purpose: a checkpoint outlives its page, a hold its reader; a hit has no checkpoint."""
    wrong = {"forget": lambda *_: None, "drop": lambda *_: None, "longest": lambda _, pages: len(pages)}
    monkeypatch.setattr(StateCache, fault, wrong[fault])
    client = Client(make_core(pages=12, interval=3 * PAGE))
    for number in range(6):
        client.submit([number // 3] * 9 + [number % 3] * 9, 8)
    with pytest.raises((BrokenInvariant, AssertionError, KeyError)):
        client.run()
