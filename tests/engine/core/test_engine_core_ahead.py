"""Steps that are planned and launched while the one before is computed bring what steps one after the other bring.

The device of integers computes as late as it can: what the engine changes too early under a step changes its tokens.
"""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import scheduler_of, watch_preemptions, worker_of
from support.engine.fake_worker import FakeWorker, expected_tokens
from support.machine.thoroughness import repeats

from rootgraft.engine.batch import RowResult
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Abort, Done, Failed, Submit, TokenOut
from rootgraft.engine.types import FinishReason, Priority, SamplingParams

VOCAB, STOP = 11, 7


def make_core(*, overlaps: bool = True, num_pages=64, page_size=4, rows=4, budget=16, sharing=True, drafts=False):
    config = EngineConfig(
        block_size=page_size,
        max_num_seqs=rows,
        max_num_batched_tokens=budget,
        enable_prefix_caching=sharing,
        speculative_config="{}" if drafts else '{"method": "off"}',
    )
    return EngineCore(config, FakeWorker(num_pages, page_size, vocab_size=VOCAB, eos=(STOP,), overlaps=overlaps))


class Client:
    """Collects what an engine says of each sequence; checks that it ends once, and all equations after each step."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.submits: list[Submit] = []
        self.tokens: dict[int, list[int]] = {}
        self.scored: dict[int, list[int]] = {}
        self.ends: dict[int, Done | Failed] = {}

    def submit(self, prompt: list[int], priority: Priority = Priority.INTERACTIVE, **params: object) -> int:
        number = len(self.submits)
        fields = SamplingParams(**params)  # type: ignore[arg-type]
        self.submits.append(Submit(number, array("i", prompt), fields, priority=priority))
        self.tokens[number], self.scored[number] = [], []
        self.core.handle(self.submits[-1:])
        return number

    def abort(self, number: int) -> None:
        self.core.handle([Abort((number,))])

    def step(self) -> None:
        for message in self.core.step():
            assert message.id not in self.ends, "something comes after the end"
            if isinstance(message, TokenOut):
                self.tokens[message.id] += message.tokens
                self.scored[message.id] += [entry.token for entry in message.prompt_logprobs]
            else:
                assert isinstance(message, (Done, Failed))
                self.ends[message.id] = message
        self.core.check()
        stats = self.core.stats()
        assert stats["pages_free"] + stats["pages_cached"] + stats["pages_private"] == stats["pages"]

    def run(self) -> None:
        limit = 20_000
        while self.core.has_work:
            self.step()
            limit -= 1
            assert limit, "does not come to an end"
        assert len(self.ends) == len(self.submits)
        assert self.core.stats()["pages_private"] == 0 and self.core.stats()["running"] == 0

    @property
    def batches(self):
        return worker_of(self.core).batches

    def expected(self, number: int) -> list[int]:
        """All that a sequence would say if nobody aborted it."""
        submit = self.submits[number]
        params = submit.params
        tokens = expected_tokens(submit.tokens, params.max_tokens, VOCAB)
        stops = [at for at, token in enumerate(tokens) if token == STOP and at >= params.min_tokens]
        return tokens if params.ignore_eos or not stops else tokens[: stops[0]]


def ending(end: Done | Failed) -> tuple[object, ...]:
    assert isinstance(end, Done)
    return end.reason, end.stop_token, end.usage.completion


def logged(core: EngineCore) -> dict[tuple[str, int], int]:
    """When the device was asked for what, by the number of the step."""
    return {event: at for at, event in enumerate(worker_of(core).log)}


@pytest.mark.parametrize("rows", [1, 128])
def test_the_next_step_is_launched_before_this_one_is_waited_for(rows):
    core = make_core(num_pages=2000, rows=rows, budget=512)
    client = Client(core)
    for number in range(rows):
        client.submit([number % VOCAB, 3], max_tokens=12, ignore_eos=True)
    client.run()
    at, steps = logged(core), len(client.batches)
    assert steps == 12
    for step in range(steps - 1):
        assert at["draw", step] < at["launch", step + 1] < at["read", step] < at["draw", step + 1]
    assert all(client.tokens[number] == client.expected(number) for number in range(rows))


def test_a_device_that_does_not_compute_alone_is_asked_step_by_step():
    core = make_core(overlaps=False)
    client = Client(core)
    client.submit([1, 2], max_tokens=5, ignore_eos=True)
    client.run()
    assert worker_of(core).log == [(what, step) for step in range(5) for what in ("launch", "draw", "read")]


def test_an_end_that_is_known_before_takes_no_further_step():
    client = Client(make_core())
    client.submit([1, 2], max_tokens=3, ignore_eos=True)
    client.submit([1, 3], max_tokens=5, ignore_eos=True)
    client.run()
    assert [len(batch.rows) for batch in client.batches] == [2, 2, 2, 1, 1]


def test_the_last_step_of_a_stopped_sequence_is_forgotten():
    """It was launched before the stop token was known; whoever comes next does not wait for it."""
    client = Client(make_core())
    prompt = next([1, i] for i in range(VOCAB) if STOP in expected_tokens([1, i], 9, VOCAB)[2:])
    client.submit(prompt, max_tokens=9, min_tokens=2)
    client.run()
    assert client.ends[0].reason is FinishReason.STOP and client.tokens[0] == client.expected(0)
    drawn = len(client.tokens[0]) + 1
    assert worker_of(client.core).num_launched == drawn + 1
    client.submit([5, 6], max_tokens=2, ignore_eos=True)
    client.run()
    assert client.tokens[1] == client.expected(1)
    assert ("read", drawn) not in worker_of(client.core).log
    assert client.core.stats()["generation_tokens"] == drawn + 2
    assert client.core.stats()["steps"] == drawn + 2


def test_chunks_of_a_prompt_are_planned_ahead():
    core = make_core(budget=16)
    client = Client(core)
    client.submit(list(range(50)), max_tokens=3, ignore_eos=True, prompt_logprobs=0)
    client.run()
    assert [batch.num_tokens for batch in client.batches] == [16, 16, 16, 2, 1, 1]
    at = logged(core)
    assert all(at["launch", step + 1] < at["read", step] for step in range(5))
    assert client.scored[0] == list(range(1, 50)) and client.tokens[0] == client.expected(0)


def test_somebody_new_joins_a_step_that_is_planned_ahead():
    core = make_core()
    client = Client(core)
    client.submit([1, 2], max_tokens=20, ignore_eos=True)
    client.step()
    client.submit([3, 4], max_tokens=5, ignore_eos=True)
    client.run()
    at = logged(core)
    first = next(step for step, batch in enumerate(client.batches) if len(batch.rows) == 2)
    assert at["launch", first] < at["read", first - 1]
    assert all(client.tokens[number] == client.expected(number) for number in range(2))


def test_a_row_that_changes_hands_under_a_step_keeps_them_apart():
    """Two rows, one of a long answer: the other's sequence is aborted under a step, and its row and pages taken."""
    client = Client(make_core(num_pages=24, rows=2))
    client.submit([9, 9], max_tokens=60, ignore_eos=True)
    for number in range(1, 7):
        client.submit([number, 1, 2], max_tokens=9, ignore_eos=True)
    for number in range(1, 7):
        for _ in range(3):
            client.step()
        client.abort(number)
    client.run()
    assert client.tokens[0] == client.expected(0)
    for number in range(1, 7):
        assert 0 < len(client.tokens[number]) < 9
        assert client.tokens[number] == client.expected(number)[: len(client.tokens[number])]
        assert client.ends[number].usage.completion == len(client.tokens[number])


def test_nobody_is_preempted_for_a_step_that_is_planned_ahead():
    """Where pages are short the plan waits for the tokens, so that only what is known to be needed is taken."""
    core = make_core(num_pages=10, page_size=4, rows=4)
    client = Client(core)
    for number in range(4):
        client.submit([number, 1, 2, 3, 4], max_tokens=25, ignore_eos=True)
    seen = watch_preemptions(core)
    client.run()
    assert seen and not any(seen)
    assert all(client.tokens[number] == client.expected(number) for number in range(4))


def test_drafts_that_pay_are_waited_for():
    """A text that repeats itself: once the sources are right, a step brings many tokens and is planned when it can."""
    client = Client(make_core(drafts=True, num_pages=400, budget=64))
    client.submit([1, 2, 3], max_tokens=400, ignore_eos=True)
    core, worker = client.core, worker_of(client.core)
    worker._draw = lambda row, contents, line: _periodic(row)
    client.run()
    assert client.tokens[0] == [_letter(position) for position in range(400)]
    stats = core.stats()
    assert stats["draft_tokens_accepted"] > 250
    at = logged(core)
    ahead = [step for step in range(1, len(client.batches)) if at["launch", step] < at["read", step - 1]]
    assert ahead, "the first words, of which there is nothing to guess"
    assert not any(row.num_drafts for step in ahead for row in client.batches[step].rows)


def _letter(position: int) -> int:
    return position * position % 13 % VOCAB


def _periodic(row):
    drawn = []
    for ahead in range(row.num_positions):
        drawn.append(_letter(row.num_generated + ahead))
        if ahead < row.num_drafts and row.drafts[ahead] != drawn[-1]:
            break
    return RowResult(tuple(drawn))


@settings(max_examples=repeats(40), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 2, 4, 16]),
    budget=st.integers(4, 40),
    rows=st.integers(1, 4),
    num_pages=st.integers(6, 80),
    sharing=st.booleans(),
    drafts=st.booleans(),
)
def test_any_traffic_brings_the_same_ahead_or_not(seed, page_size, budget, rows, num_pages, sharing, drafts):
    """Common prefixes, chunks, stops, min_tokens, bands, aborts at any time, pages so few that some are preempted."""
    sizes = {"num_pages": num_pages, "page_size": page_size, "rows": rows, "budget": budget}
    clients = [
        Client(make_core(**sizes, sharing=sharing, drafts=drafts and overlaps, overlaps=overlaps))
        for overlaps in (False, True)
    ]
    aborted: set[int] = set()
    for client in clients:
        rng = random.Random(seed)
        longest = worker_of(client.core).max_model_len
        stems = [[rng.randrange(VOCAB) for _ in range(longest)] for _ in range(3)]
        for _ in range(50):
            if rng.random() < 0.4:
                cut = rng.randint(0, longest - 2)
                tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, longest - 1 - cut))][:12]
                client.submit(
                    [*rng.choice(stems)[:cut], *tail],
                    rng.choice(list(Priority)),
                    max_tokens=rng.randint(1, 20),
                    ignore_eos=rng.random() < 0.3,
                    min_tokens=rng.choice([0, 0, 3]),
                    prompt_logprobs=rng.choice([None, None, 0]),
                )
            if client.submits and rng.random() < 0.15:
                number = rng.randrange(len(client.submits))
                aborted.add(number)
                client.abort(number)
            client.step()
            assert not client.batches or client.batches[-1].num_tokens <= budget
        client.run()
    plain, ahead = clients
    for number, submit in enumerate(plain.submits):
        limit = worker_of(plain.core).max_model_len - len(submit.tokens)
        expected = plain.expected(number)[:limit]
        for client in clients:
            said = client.tokens[number]
            assert said == (expected[: len(said)] if number in aborted else expected)
            end = client.ends[number]
            if end.reason is FinishReason.ABORT:
                assert end.usage.completion == len(said)
        if number not in aborted:
            assert ending(plain.ends[number]) == ending(ahead.ends[number])
            assert plain.scored[number] == ahead.scored[number]


def test_rows_that_fail_end_alone_and_once():
    client = Client(make_core())
    for number in range(3):
        client.submit([number, 2], max_tokens=8, ignore_eos=True)
    client.step()
    worker_of(client.core).failing_rows = {scheduler_of(client.core).running[1].row}
    client.step()
    worker_of(client.core).failing_rows = set()
    client.run()
    assert isinstance(client.ends[1], Failed)
    for number in (0, 2):
        assert client.tokens[number] == client.expected(number) and len(client.tokens[number]) == 8
