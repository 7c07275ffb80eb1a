from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import alive_sequences, scheduler_of, worker_of
from support.engine.fake_worker import FakeWorker, expected_tokens
from support.machine.thoroughness import repeats

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Abort, Done, Failed, Submit, TokenOut
from rootgraft.engine.types import FinishReason, Priority, SamplingParams


def make_core(num_pages=64, page_size=4, max_num_seqs=4, budget=16, sharing=True, **worker):
    config = EngineConfig(
        block_size=page_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, enable_prefix_caching=sharing
    )
    return EngineCore(config, FakeWorker(num_pages, page_size, **worker))


class Client:
    """Collects what an engine says of each sequence and checks that it ends once."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.prompts: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Done | Failed] = {}

    def submit(self, prompt, **params) -> int:
        number = len(self.prompts)
        self.prompts[number], self.tokens[number] = list(prompt), []
        self.core.handle([Submit(number, array("i", prompt), SamplingParams(**params))])
        return number

    def step(self) -> None:
        for message in self.core.step():
            if isinstance(message, TokenOut):
                assert message.id not in self.ends
                self.tokens[message.id] += message.tokens
            else:
                assert message.id not in self.ends, "ends twice"
                self.ends[message.id] = message
        self.core.check()

    def run(self, limit: int = 10_000) -> None:
        while self.core.has_work and limit:
            self.step()
            limit -= 1
        assert limit, "does not come to an end"
        assert self.ends.keys() == self.prompts.keys()

    def expected(self, number: int) -> list[int]:
        return expected_tokens(self.prompts[number], len(self.tokens[number]), worker_of(self.core).vocab_size)


def test_a_prompt_longer_than_the_budget_comes_in_chunks():
    core = make_core(budget=16)
    client = Client(core)
    client.submit(range(50), max_tokens=3)
    client.run()
    assert [batch.num_tokens for batch in worker_of(core).batches] == [16, 16, 16, 2, 1, 1]
    assert client.tokens[0] == client.expected(0) and len(client.tokens[0]) == 3


def test_a_long_prompt_never_stops_running_streams():
    core = make_core(num_pages=200, budget=8)
    client = Client(core)
    client.submit([1, 2, 3], max_tokens=40)
    client.step()
    client.submit(range(200), max_tokens=1)
    for _ in range(20):
        before = len(client.tokens[0])
        client.step()
        assert len(client.tokens[0]) == before + 1
        assert worker_of(core).batches[-1].num_tokens <= 8


def test_sequences_that_arrive_together_compute_their_common_prompt_once():
    core = make_core(num_pages=200, max_num_seqs=8, budget=64)
    client = Client(core)
    common = list(range(100))
    for i in range(8):
        client.submit([*common, i], max_tokens=2)
    client.run()
    computed = sum(batch.num_tokens for batch in worker_of(core).batches)
    assert computed <= 101 + 7 * 2 + 8 * 2
    assert all(client.tokens[i] == client.expected(i) for i in range(8))
    assert [client.ends[i].usage.cached for i in range(8)] == [0] + [100] * 7


def test_the_second_turn_reuses_prompt_and_answer_to_the_token():
    core = make_core()
    client = Client(core)
    first = client.submit(range(10), max_tokens=7)
    client.run()
    client.submit([*range(10), *client.tokens[first], 3, 4], max_tokens=2)
    client.run()
    assert client.ends[1].usage.cached == 16  # 10 + 7 - 1: the last drawn token was never computed
    assert client.tokens[1] == client.expected(1)


def test_without_sharing_nothing_is_cached():
    core = make_core(sharing=False)
    client = Client(core)
    for _ in range(3):
        client.submit(range(10), max_tokens=2)
        client.run()
    assert [end.usage.cached for end in client.ends.values()] == [0, 0, 0]


def test_preempted_sequences_come_back_and_end_the_same():
    core = make_core(num_pages=10, page_size=4, max_num_seqs=4, budget=16)
    client = Client(core)
    for i in range(4):
        client.submit([i, 1, 2, 3, 4], max_tokens=25)
    client.run()
    assert core.stats()["preemptions"] > 0
    for i in range(4):
        assert client.tokens[i] == client.expected(i) and len(client.tokens[i]) == 25


def test_stop_tokens_end_a_sequence_after_min_tokens_and_are_not_sent():
    core = make_core(eos=tuple(range(11)))
    client = Client(core)
    client.submit([5, 6], max_tokens=9)
    client.submit([5, 6], max_tokens=9, ignore_eos=True)
    client.submit([5, 6], max_tokens=9, min_tokens=4)
    client.submit([5, 6], max_tokens=9, min_tokens=4, ignore_eos=True, stop_token_ids=(3,))
    client.run()
    starts = [start for batch in worker_of(core).batches for start in batch.starts]
    # As in vLLM, an end token is not drawn before min_tokens even if it would not end the sequence.
    assert [set(start.late_ids) for start in starts] == [set(range(11))] * 4
    expected = expected_tokens([5, 6], 9, 11)
    assert client.ends[0].reason is FinishReason.STOP and client.ends[0].stop_token == expected[0]
    assert client.tokens[0] == [] and client.ends[0].usage.completion == 1
    assert client.tokens[1] == expected and client.ends[1].reason is FinishReason.LENGTH
    assert client.tokens[2] == expected[:4] and client.ends[2].usage.completion == 5


def test_a_sequence_ends_at_the_context_length():
    core = make_core(max_model_len=12)
    client = Client(core)
    client.submit(range(10), max_tokens=50)
    client.run()
    assert len(client.tokens[0]) == 2 and client.ends[0].reason is FinishReason.LENGTH


def test_a_row_that_fails_ends_alone():
    core = make_core()
    client = Client(core)
    client.submit([1, 2], max_tokens=5)
    client.submit([3, 4], max_tokens=5)
    client.step()
    worker_of(core).failing_rows = {scheduler_of(core).running[0].row}
    client.step()
    worker_of(core).failing_rows = set()
    client.run()
    assert isinstance(client.ends[0], Failed)
    assert client.tokens[1] == client.expected(1) and len(client.tokens[1]) == 5


def test_an_abort_frees_everything_at_once_in_every_state():
    core = make_core(num_pages=20, max_num_seqs=2, budget=8)
    client = Client(core)
    waiting = [client.submit(range(i, i + 30), max_tokens=5) for i in range(4)]
    client.step()  # 0 in prefill, the others in the queue
    core.handle([Abort(tuple(waiting)), Abort((99,))])
    client.run()
    assert all(end.reason is FinishReason.ABORT for end in client.ends.values())
    assert core.stats()["pages_private"] == 0 and core.stats()["running"] == 0


def test_prompt_logprobs_cover_the_whole_prompt_though_it_is_cached():
    core = make_core(budget=8)
    client = Client(core)
    scored = []
    for wanted in (None, 0):
        client.submit(range(30), max_tokens=1, prompt_logprobs=wanted)
        while core.has_work:
            for message in core.step():
                if isinstance(message, TokenOut):
                    scored += [entry.token for entry in message.prompt_logprobs]
    assert scored == list(range(1, 30))


def test_a_name_that_is_alive_is_not_taken_twice():
    core = make_core()
    core.handle([Submit(1, array("i", [1]), SamplingParams())])
    with pytest.raises(ValueError, match="alive"):
        core.handle([Submit(1, array("i", [1]), SamplingParams())])


@settings(max_examples=repeats(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 2, 4, 16]),
    budget=st.integers(4, 40),
    max_num_seqs=st.integers(1, 4),
    num_pages=st.integers(6, 60),
    sharing=st.booleans(),
)
def test_any_traffic_gives_what_each_sequence_gives_alone(seed, page_size, budget, max_num_seqs, num_pages, sharing):
    """Random prompts with common prefixes, aborts and preemptions, all equations checked after every step."""
    rng = random.Random(seed)
    core = make_core(num_pages, page_size, max_num_seqs, budget, sharing, eos=(7,))
    client = Client(core)
    longest = worker_of(core).max_model_len
    stems = [[rng.randrange(11) for _ in range(longest)] for _ in range(3)]
    for _ in range(60):
        if rng.random() < 0.4:
            cut = rng.randint(0, longest - 2)
            tail = [rng.randrange(11) for _ in range(rng.randint(1, longest - 1 - cut))][:12]
            client.submit([*rng.choice(stems)[:cut], *tail], max_tokens=rng.randint(1, 20))
        if client.prompts and rng.random() < 0.1:
            core.handle([Abort((rng.randrange(len(client.prompts)),))])
        client.step()
        assert worker_of(core).batches == [] or worker_of(core).batches[-1].num_tokens <= budget
    client.run()
    for number, end in client.ends.items():
        assert client.tokens[number] == client.expected(number)
        assert isinstance(end, Done)
        if end.reason is FinishReason.STOP:
            assert end.stop_token == 7
    assert core.stats()["pages_private"] == 0


def test_a_prompt_is_scored_from_where_it_was_asked_to_and_cached_before():
    core = make_core(budget=8)
    client = Client(core)
    client.submit(range(30), max_tokens=1)
    client.run()
    for start, cached in ((17, 16), (29, 28), (1, 0)):
        scored = []
        number = client.submit(range(30), max_tokens=1, prompt_logprobs=0, logprob_start_len=start)
        while core.has_work:
            for message in core.step():
                if isinstance(message, TokenOut):
                    scored += [entry.token for entry in message.prompt_logprobs]
                elif isinstance(message, Done):
                    assert message.id == number and message.usage.cached == cached
        assert scored == list(range(start, 30))


@pytest.mark.parametrize("num_pages", [16, 18, 20, 22])
def test_a_scored_prompt_that_is_preempted_is_scored_once(num_pages):
    core = make_core(num_pages=num_pages, budget=4)
    client = Client(core)
    for number in range(3):
        client.submit(range(100 * number, 100 * number + 4), max_tokens=40)
    client.step()
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    core.handle([Submit(9, array("i", range(1000, 1030)), params, priority=Priority.BATCH)])
    scored, waits = [], []
    while core.has_work:
        for message in core.step():
            if isinstance(message, TokenOut) and message.id == 9:
                scored += [entry.token for entry in message.prompt_logprobs]
        waits += [each.counts.num_preempted for each in alive_sequences(core) if each.id == 9]
    assert scored == list(range(1001, 1030)) and waits[-1] > 0
