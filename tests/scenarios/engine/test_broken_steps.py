"""A step that raises, wherever it does, fails its sequences and leaves an engine that works and has lost nothing."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.adapter_engine import write
from support.engine.core_hooks import adapter_pins, free_rows, scheduler_of, set_structured_output, worker_of
from support.engine.core_hooks import structured_output_in_process as in_process
from support.engine.draft_engine import EOS, GRAMMARS, VOCAB, VOCABULARY, compiled
from support.engine.fake_worker import FakeStep, FakeWorker, adapter_code, expected_tokens
from support.engine.injected_faults import POINTS, Fault
from support.machine.thoroughness import repeats
from support.models.lora_folders import small_reader

from rootgraft.engine.batch import Batch, StepHandle
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.core.structured_output import StructuredOutputManager
from rootgraft.engine.messages import Abort, Done, Failed, LoadAdapter, Message, Reply, Submit, TokenOut
from rootgraft.engine.types import Priority, SamplingParams
from rootgraft.lora.adapter_pool import AdapterPool
from rootgraft.lora.lora_step import AdapterBank

ROWS, NAMES = 4, ("one", "two", "three")
ERRORS = (RuntimeError("a bug"), MemoryError(), KeyboardInterrupt())


class Client:
    """A core with adapters, grammars and drafts, and what becomes of each request."""

    def __init__(self, root: Path, *, overlaps: bool, drafts: bool, page_size: int = 4, num_pages: int = 40) -> None:
        self.pool = AdapterPool(small_reader(root), max_loras=2, max_adapters=9, max_cpu_bytes=1 << 20, patience=3)
        worker = FakeWorker(num_pages, page_size, vocab_size=VOCAB, eos=(EOS,), adapters=self.pool, overlaps=overlaps)
        method = "auto" if drafts else "off"
        config = EngineConfig(
            block_size=page_size,
            max_num_seqs=ROWS,
            max_num_batched_tokens=16,
            enable_lora=True,
            lora_dir=str(root),
            speculative_config=f'{{"method": "{method}"}}',
        )
        self.core = EngineCore(config, worker)
        set_structured_output(self.core, in_process(ROWS + config.max_drafts, VOCABULARY))
        self.submits: dict[int, Submit] = {}
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Done | Failed] = {}
        self.replies: dict[int, Reply] = {}

    def submit(self, prompt: list[int], adapter: str | None = None, grammar: int | None = None, **fields: Any) -> int:
        number, priority = len(self.submits), fields.pop("priority", Priority.INTERACTIVE)
        spec = None if grammar is None else (GRAMMARS[grammar].kind.value, GRAMMARS[grammar].content)
        submit = Submit(
            number, array("i", prompt), SamplingParams(**fields), adapter, grammar=spec, priority=priority,
            session=f"s{number % 3}", pin_seconds=float(number % 2),
        )  # fmt: skip
        self.submits[number], self.tokens[number] = submit, []
        self.core.handle([submit])
        return number

    def submit_any(self, rng: random.Random) -> None:
        stem = [rng.randrange(3)] * rng.randint(0, 30)
        self.submit(
            [*stem, *(rng.randrange(VOCAB - 2) for _ in range(rng.randint(1, 12)))],
            rng.choice([None, None, *NAMES]),
            rng.choice([None, None, 0, 1, 2]),
            max_tokens=rng.randint(1, 30),
            ignore_eos=rng.random() < 0.5,
            priority=rng.choice(list(Priority)),
        )

    def step(self) -> None:
        for message in self.core.step():
            self.take(message)

    def take(self, message: Message) -> None:
        if isinstance(message, TokenOut):
            assert message.id not in self.ends, "something comes after the end"
            self.tokens[message.id] += message.tokens
        elif isinstance(message, (Done, Failed)):
            assert message.id not in self.ends, "ends twice"
            self.ends[message.id] = message
        elif isinstance(message, Reply):
            self.replies[message.id] = message

    def check(self) -> None:
        """All that must hold between two steps."""
        self.core.check()
        stats, scheduler = self.core.stats(), scheduler_of(self.core)
        assert stats["pages_free"] + stats["pages_cached"] + stats["pages_private"] == stats["pages"]
        assert len(free_rows(self.core)) + scheduler.num_running == ROWS
        finished = sum(count for name, count in stats.items() if name.startswith("finished_"))
        assert stats["accepted"] == finished + scheduler.num_running + scheduler.num_waiting
        assert self.pool.slots.num_pinned <= scheduler.num_running

    def run(self) -> None:
        """Run until nothing is left, then check that nothing of any request is."""
        limit = 5_000
        while self.core.has_work:
            self.step()
            self.check()
            limit -= 1
            assert limit, "does not come to an end"
        assert self.ends.keys() == self.submits.keys()
        stats = self.core.stats()
        assert stats["running"] == stats["waiting"] == stats["pages_private"] == 0
        assert not adapter_pins(self.core) and self.pool.slots.num_pinned == 0
        assert all(version.pins == 0 for version in self.pool.registry)
        for number, submit in self.submits.items():
            self.check_tokens(number, submit)

    def check_tokens(self, number: int, submit: Submit) -> None:
        """The tokens of a free text are those that the sequence has alone, as far as they go."""
        said = self.tokens[number]
        if submit.grammar is None:
            version = self.pool.registry.get(submit.adapter) if submit.adapter else None
            code = adapter_code(version.digest) if version else 0
            if said:
                assert said == expected_tokens(submit.tokens, len(said), VOCAB, code)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write(folder, name, seed)
    return folder


class Ready:
    """A compile that is done at once."""

    def __init__(self, content: bytes) -> None:
        self._number = [spec.content for spec in GRAMMARS].index(content)

    def poll(self) -> Any:
        return compiled(self._number).matcher()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("rootgraft.engine.core.engine_core._PAUSE", 0.0)
    monkeypatch.setattr(StructuredOutputManager, "compile", lambda _self, grammar, *_: Ready(grammar[1]))
    yield


@settings(max_examples=20, deadline=None)
@given(
    point=st.sampled_from(POINTS),
    calls=st.integers(0, 40),
    error=st.sampled_from(ERRORS),
    late=st.booleans(),
    overlaps=st.booleans(),
    drafts=st.booleans(),
    page_size=st.sampled_from([1, 4]),
    seed=st.integers(0, 2**32),
)
def test_an_exception_at_any_point_leaves_a_core_that_works(
    root: Path, point: Any, calls: int, error: BaseException, late: bool, overlaps: bool, drafts: bool, page_size: int,
    seed: int,
) -> None:  # fmt: skip
    rng = random.Random(seed)
    client = Client(root, overlaps=overlaps, drafts=drafts, page_size=page_size, num_pages=160 // page_size)
    # Messages that the last part of a step has returned are the client's.
    fault = Fault(point, calls, error, late=late and point != (EngineCore, "_take_outbox"))
    with fault.injected():
        for _ in range(60):
            try:
                for _ in range(rng.choice([0, 0, 1, 2])):
                    client.submit_any(rng)
                if client.submits and rng.random() < 0.1:
                    client.core.handle([Abort((rng.randrange(len(client.submits)),))])
                client.step()
            except BaseException as caught:
                assert caught is error
            client.check()
    client.run()
    before = len(client.submits)
    for name in (None, *NAMES):
        client.submit([5, 6, 7, 8, 9], name, max_tokens=9, ignore_eos=True)
    client.submit([1, 2], grammar=2, max_tokens=40)
    client.run()
    assert all(isinstance(client.ends[number], Done) for number in range(before, len(client.submits)))
    assert all(len(client.tokens[number]) == 9 for number in range(before, before + 4))
    client.core.close()


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_broken_step_fails_all_sequences_and_says_why(root: Path, overlaps: bool) -> None:
    client = Client(root, overlaps=overlaps, drafts=False)
    for number in range(6):  # two of them wait
        client.submit([number, 1], max_tokens=9, ignore_eos=True)
    client.step()
    said = {number: list(tokens) for number, tokens in client.tokens.items()}
    scheduler, error = scheduler_of(client.core), RuntimeError("a bug")
    with Fault((type(scheduler), "_commit_row"), 2, error, late=True).injected(), pytest.raises(RuntimeError) as caught:
        client.step()
    assert caught.value is error and client.core.has_work
    client.run()
    assert client.tokens == said, "tokens of a step that was not returned"
    assert {type(end) for end in client.ends.values()} == {Failed}
    assert client.ends[0].message == "A step of the engine failed (RuntimeError), and so did all its requests."
    assert client.core.stats()["pages_cached"] == 0, "what the broken step has left in the tree is not trusted"
    client.core.close()


def test_a_copy_that_was_never_made_is_not_found_in_the_cache(root: Path) -> None:
    """A prompt that begins inside a cached page counts its copy as computed before the step has made it."""
    client = Client(root, overlaps=False, drafts=False)
    first = client.submit([1, 2, 3, 4, 5, 6], max_tokens=1)
    client.run()
    worker = worker_of(client.core)
    client.submit([1, 2, 3, 4, 5, 9, 9, 9], max_tokens=5, ignore_eos=True)
    with Fault((type(worker), "launch"), 0, RuntimeError(), late=False).injected(), pytest.raises(RuntimeError):
        client.step()
    again = client.submit([1, 2, 3, 4, 5, 9, 9, 9, 7], max_tokens=5, ignore_eos=True)
    client.run()
    assert isinstance(client.ends[first], Done) and len(client.tokens[again]) == 5
    client.core.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_load_whose_result_is_lost_is_replied_to(root: Path, late: bool) -> None:
    client = Client(root, overlaps=False, drafts=False)
    client.core.handle([LoadAdapter(7, "one", "one"), LoadAdapter(8, "two", "two")])
    fault = Fault((AdapterPool, "_finish_load"), 0, RuntimeError(), late=late)
    with fault.injected():
        while not fault.was_raised:
            try:
                client.step()
            except RuntimeError:
                assert fault.was_raised
    client.run()
    # They load side by side, and the first one that is done loses its result.
    failed = {number: failure for number in (7, 8) if (failure := client.replies[number].failure) is not None}
    assert [("'one'" if number == 7 else "'two'") in failure.message for number, failure in failed.items()] == [True]
    client.core.close()


DEVICE_CALLS = ((FakeWorker, "launch"), (FakeStep, "draw"), (FakeStep, "result"))


@settings(max_examples=repeats(30), deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(DEVICE_CALLS), st.integers(0, 30), st.booleans()), max_size=3),
    overlaps=st.booleans(),
    drafts=st.booleans(),
    page_size=st.sampled_from([1, 4]),
    seed=st.integers(0, 2**32),
)
def test_a_device_without_memory_costs_requests_nothing_but_time(
    root: Path, calls: list[Any], overlaps: bool, drafts: bool, page_size: int, seed: int
) -> None:
    """Wherever in a step it happens, adapters, grammars and copies of pages included: tokens stay what they were."""
    rng = random.Random(seed)
    client = Client(root, overlaps=overlaps, drafts=drafts, page_size=page_size, num_pages=160 // page_size)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    with ExitStack() as faults:
        for point, count, late in calls:
            faults.enter_context(Fault(point, count, error, late=late).injected())
        for _ in range(40):
            if len(client.submits) < 12:
                client.submit_any(rng)
            client.step()
            client.check()
        client.run()
    # Only a step of one token cannot be halved: each error fails one request at most.
    kinds = [end.kind for end in client.ends.values() if isinstance(end, Failed)]
    assert kinds.count("CapacityError") <= len(calls)
    assert set(kinds) <= {"CapacityError", "ContextTooLong", "RequestError"}, "the others were wrong at any rate"
    client.core.close()


def test_an_adapter_for_which_the_device_has_no_memory_fails_alone(root: Path) -> None:
    client = Client(root, overlaps=True, drafts=False)
    free = client.submit([1, 2, 3], max_tokens=4, ignore_eos=True)
    error = torch.OutOfMemoryError("CUDA out of memory.")
    with Fault((AdapterBank, "install"), 0, error, late=False).injected():
        adapted = client.submit([1, 2, 3], "one", max_tokens=4, ignore_eos=True)
        client.run()
    assert isinstance(client.ends[free], Done)
    failed = client.ends[adapted]
    assert isinstance(failed, Failed) and "no memory for the adapter" in failed.message
    again = client.submit([1, 2, 3], "one", max_tokens=4, ignore_eos=True)
    client.run()
    assert isinstance(client.ends[again], Done)
    client.core.close()


class SmallDevice(FakeWorker):
    """A device that has memory for steps of so many tokens."""

    capacity = 1 << 30

    def launch(self, batch: Batch) -> StepHandle:
        if batch.num_tokens > self.capacity:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {batch.num_tokens} bytes.")
        return super().launch(batch)


def small_core(
    *, overlaps: bool, capacity: int, kind: type[SmallDevice] = SmallDevice
) -> tuple[EngineCore, SmallDevice]:
    config = EngineConfig(
        block_size=4, max_num_seqs=4, max_num_batched_tokens=64, speculative_config='{"method": "off"}'
    )
    worker = kind(64, 4, vocab_size=VOCAB, overlaps=overlaps)
    worker.capacity = capacity
    return EngineCore(config, worker), worker


def answers(core: EngineCore, prompts: list[list[int]]) -> tuple[dict[int, list[int]], dict[int, Done | Failed]]:
    core.handle(
        Submit(number, array("i", prompt), SamplingParams(max_tokens=6)) for number, prompt in enumerate(prompts)
    )
    tokens: dict[int, list[int]] = {number: [] for number in range(len(prompts))}
    ends: dict[int, Done | Failed] = {}
    for _ in range(500):
        for message in core.step():
            if isinstance(message, TokenOut):
                tokens[message.id] += message.tokens
            else:
                assert isinstance(message, (Done, Failed)) and message.id not in ends
                ends[message.id] = message
        core.check()
        if len(ends) == len(prompts):
            break
    return tokens, ends


@pytest.mark.parametrize("overlaps", [False, True])
def test_steps_become_as_small_as_the_device_has_memory_for(overlaps: bool) -> None:
    core, worker = small_core(overlaps=overlaps, capacity=20)
    prompts = [[number, *range(9)] * 6 for number in range(4)]
    tokens, ends = answers(core, prompts)
    assert {type(end) for end in ends.values()} == {Done}
    assert all(tokens[n] == expected_tokens(prompt, 6, VOCAB) for n, prompt in enumerate(prompts))
    assert scheduler_of(core).max_tokens <= 20 and 1 <= worker.num_freed <= 2
    core.close()


@pytest.mark.parametrize("overlaps", [False, True])
def test_fewer_tokens_than_rows_are_served_too(overlaps: bool) -> None:
    core, _ = small_core(overlaps=overlaps, capacity=1)
    prompts = [[1, 2], [3, 4, 5, 6, 7, 8, 9, 1, 2], [4, 5], [6, 7]]
    tokens, ends = answers(core, prompts)
    assert {type(end) for end in ends.values()} == {Done} and scheduler_of(core).max_tokens == 1
    assert all(tokens[n] == expected_tokens(prompts[n], 6, VOCAB) for n in range(4))
    core.close()


class ShortDevice(SmallDevice):
    """A device that has memory for rows of so many tokens."""

    def launch(self, batch: Batch) -> StepHandle:
        longest = max(row.start + len(row.tokens) for row in batch.rows)
        if longest > self.capacity:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return FakeWorker.launch(self, batch)


@pytest.mark.parametrize("overlaps", [False, True])
def test_where_a_step_cannot_be_smaller_the_largest_request_fails_alone(overlaps: bool) -> None:
    core, _ = small_core(overlaps=overlaps, capacity=12, kind=ShortDevice)
    prompts = [[1, 2], [3, 4, 5, 6, 7, 8, 9, 1, 2], [4, 5], [6, 7]]
    tokens, ends = answers(core, prompts)
    assert [type(ends[number]) for number in range(4)] == [Done, Failed, Done, Done]
    failed = ends[1]
    assert isinstance(failed, Failed) and failed.kind == "CapacityError" and "no memory" in failed.message
    assert all(tokens[n] == expected_tokens(prompts[n], len(tokens[n]), VOCAB) for n in range(4))
    assert not core.has_work and core.stats()["pages_private"] == 0
    core.close()


def test_a_device_with_no_memory_at_all_fails_each_request_and_lives() -> None:
    core, worker = small_core(overlaps=True, capacity=0)
    _, ends = answers(core, [[1, 2, 3]] * 6)
    assert {type(end) for end in ends.values()} == {Failed} and len(ends) == 6
    worker.capacity = 1 << 30
    core.handle([Submit(9, array("i", [1, 2]), SamplingParams(max_tokens=2))])
    assert any(isinstance(message, Done) for _ in range(9) for message in core.step())
    core.close()
