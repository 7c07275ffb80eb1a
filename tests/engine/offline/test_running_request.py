"""The offline face with requests that run: interrupts, broken steps, callbacks that raise, calls beside them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.engine.adapter_engine import Engine, write
from support.engine.core_hooks import core_of, scheduler_of
from support.engine.fake_worker import FakeStep, FakeWorker, expected_tokens
from support.engine.injected_faults import Fault
from support.machine.waits import HANG_SECONDS

from rootgraft import LLM, SamplingParams
from rootgraft.engine.checkpoint.locate import ModelFiles
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.errors import EngineDead, EngineError, RequestError, UnknownModel
from rootgraft.engine.offline.running_request import RunningRequest
from rootgraft.engine.serving.output_processor import OutputProcessor, TextDelta

VOCAB = 420
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
Make = Callable[..., LLM]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> Iterator[Make]:
    """Make an ``LLM`` on a core, by default the real one over a device of integers."""
    made: list[LLM] = []
    monkeypatch.setattr(
        "rootgraft.engine.offline.offline_model.resolve_served_model", lambda config: ModelFiles(tiny_folder, "tiny")
    )

    def make(core: EngineCore | None = None, *, overlaps: bool = False, num_pages: int = 300) -> LLM:
        config = EngineConfig(block_size=4, max_num_seqs=8, max_num_batched_tokens=64)
        worker = FakeWorker(num_pages, 4, vocab_size=VOCAB, eos=(2,), overlaps=overlaps)
        monkeypatch.setattr(EngineCore, "load", lambda *_: core or EngineCore(config, worker))
        made.append(LLM())
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def tokens_of(running: RunningRequest) -> list[int]:
    return running.output().outputs[0].token_ids


def finish(llm: LLM, *requests: RunningRequest) -> None:
    limit = 1_000
    while not all(each.is_done for each in requests):
        llm.step()
        limit -= 1
        assert limit, "does not come to an end"


def check_idle(llm: LLM) -> None:
    """Nothing runs, and nothing is left of what ran."""
    core = core_of(llm)
    while core.has_work:
        llm.step()
    core.check()
    stats = core.stats()
    assert stats["running"] == stats["waiting"] == stats["pages_private"] == 0
    assert llm.step() is False


def test_calls_about_adapters_lose_nothing_of_running_requests(make: Make, tmp_path: Path) -> None:
    llm = make(Engine(tmp_path).core)
    write(tmp_path, "one", 1)
    seen: list[int] = []
    requests = [
        llm.begin([1, 2, 3], SamplingParams(max_tokens=count), on_delta=lambda delta: seen.extend(delta.tokens))
        for count in (4, 30)
    ]
    for _ in range(2):
        llm.step()
    with pytest.raises(UnknownModel):
        llm.unload_adapter("nobody")
    llm.load_adapter("one", str(tmp_path / "one"))
    llm.unload_adapter("one")
    finish(llm, *requests)
    for running, count in zip(requests, (4, 30), strict=True):
        assert tokens_of(running) == expected_tokens([1, 2, 3], count, 11)
    assert sorted(seen) == sorted(token for running in requests for token in tokens_of(running))
    check_idle(llm)


def test_what_a_callback_raises_reaches_the_caller_and_no_other_request(make: Make) -> None:
    llm = make()
    seen: list[int] = []

    def raise_sometimes(delta: TextDelta) -> None:
        calls.append(delta)
        if len(calls) % 3 == 0:
            raise ValueError(f"call {len(calls)}")

    calls: list[TextDelta] = []
    broken = llm.begin([5, 6], PARAMS, on_delta=raise_sometimes)
    good = llm.begin([7, 8], PARAMS, on_delta=lambda delta: seen.extend(delta.tokens))
    raised = 0
    while not (broken.is_done and good.is_done):
        try:
            llm.step()
        except ValueError as error:
            assert str(error) == f"call {len(calls)}"
            raised += 1
    assert raised == len(calls) // 3 > 5
    assert tokens_of(good) == seen == expected_tokens([7, 8], 40, VOCAB)
    assert tokens_of(broken) == expected_tokens([5, 6], 40, VOCAB)
    check_idle(llm)


def test_callbacks_that_raise_in_one_step_are_all_told(make: Make) -> None:
    llm = make()

    def fail(delta: TextDelta) -> None:
        if delta.tokens:
            raise ValueError(f"of {delta.tokens[0]}")

    for first in (5, 7):
        llm.begin([first, 1], SamplingParams(max_tokens=1, ignore_eos=True), on_delta=fail)
    with pytest.raises(ValueError) as caught:
        llm.step()
    tokens = [expected_tokens([first, 1], 1, VOCAB)[0] for first in (5, 7)]
    assert str(caught.value) == f"of {tokens[0]}"
    assert caught.value.__notes__[0] == f"and: ValueError('of {tokens[1]}')"


def test_generate_beside_a_callback_that_raises_answers_and_the_next_step_raises(make: Make) -> None:
    llm = make()

    def fail(delta: TextDelta) -> None:
        raise ValueError("mine")

    running = llm.begin([5, 6], PARAMS, on_delta=fail)
    [output] = llm.generate([[7, 8]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].token_ids == expected_tokens([7, 8], 3, VOCAB)
    with pytest.raises(ValueError, match="mine"):
        llm.step()
    llm.abort(running)
    check_idle(llm)


def test_a_callback_may_abort_another_request_and_begin_one(make: Make) -> None:
    llm = make()
    seen: list[int] = []
    begun: list[RunningRequest] = []

    def meddle(delta: TextDelta) -> None:
        if not begun:
            llm.abort(second)
            begun.append(llm.begin([9, 9], PARAMS))

    first = llm.begin([5, 6], PARAMS, on_delta=meddle)
    second = llm.begin([7, 8], PARAMS, on_delta=lambda delta: seen.extend(delta.tokens))
    finish(llm, first, second, *begun)
    finish(llm, *begun)
    assert not seen, "a delta after the abort"
    assert tokens_of(begun[0]) == expected_tokens([9, 9], 40, VOCAB)
    with pytest.raises(RequestError, match="was aborted"):
        second.output()
    check_idle(llm)


def test_an_output_before_the_end_is_a_clear_error(make: Make) -> None:
    llm = make()
    running = llm.begin([5, 6], PARAMS)
    with pytest.raises(EngineError, match=r"has not ended: call step\(\) until is_done"):
        running.output()
    finish(llm, running)
    llm.abort(running)  # which had ended: nothing changes
    assert len(tokens_of(running)) == 40


def test_a_bug_in_the_text_of_a_request_ends_it_alone(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make()
    bad, good = llm.begin([5, 6], PARAMS), llm.begin([7, 8], PARAMS)
    llm.step()
    push, [processor] = OutputProcessor.push, bad.running.values()

    def broken(self: OutputProcessor, message: Any) -> TextDelta | None:
        if self is processor:
            raise RuntimeError("a bug in the tokenizer")
        return push(self, message)

    monkeypatch.setattr(OutputProcessor, "push", broken)
    llm.step()
    assert bad.is_done and not bad.running
    llm.step()
    assert scheduler_of(core_of(llm)).num_running == 1, "it goes on without a reader"
    finish(llm, good)
    assert tokens_of(good) == expected_tokens([7, 8], 40, VOCAB)
    with pytest.raises(RuntimeError, match="a bug in the tokenizer"):
        bad.output()


def test_a_closed_llm_says_so(make: Make) -> None:
    llm = make()
    running = llm.begin([5, 6], PARAMS)
    llm.close()
    with pytest.raises(EngineDead, match="shutting down"):
        running.output()
    llm.close()
    for call in (llm.step, lambda: llm.generate("a", use_tqdm=False), lambda: llm.begin([1])):
        with pytest.raises(EngineDead, match="was closed"):
            call()


def test_an_llm_that_nobody_has_any_more_ends_its_thread(make: Make) -> None:
    before = set(threading.enumerate())
    config = EngineConfig(block_size=4, max_num_seqs=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineCore, "load", lambda *_: EngineCore(config, FakeWorker(50, 4, vocab_size=VOCAB)))
        llm = LLM()
        llm.generate([[1, 2]], SamplingParams(max_tokens=2), use_tqdm=False)
        [thread] = [each for each in threading.enumerate() if each.name == "engine" and each not in before]
        gone = weakref.ref(llm)
        del llm
    gc.collect()  # which also ends the threads of executors that earlier tests left in cycles
    thread.join(HANG_SECONDS)
    assert gone() is None and not thread.is_alive()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_is_told_that_the_engine_is_elsewhere(make: Make) -> None:
    """Threads do not fork: a call would wait for the engine's for ever."""
    llm = make()
    running = llm.begin([5, 6], PARAMS)
    ours, theirs = multiprocessing.Pipe()
    if (child := os.fork()) == 0:
        told = []
        for call in (llm.step, lambda: llm.generate([[7]], PARAMS, use_tqdm=False), llm.close, llm.step):
            try:
                told.append(str(call()))
            except EngineDead as error:
                told.append(str(error))
        theirs.send(told)
        os._exit(0)
    has_ended = ours.poll(120)
    if not has_ended:
        os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == 0 and has_ended
    step, generate, closed, after = ours.recv()
    assert step == generate and step.startswith(f"The engine of this LLM runs in process {os.getpid()}, and process")
    assert closed == "None" and "was closed" in after
    finish(llm, running)
    assert tokens_of(running) == expected_tokens([5, 6], 40, VOCAB)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(
    "point",
    [(EngineCore, "launch"), (FakeWorker, "launch"), (FakeStep, "draw"), (FakeStep, "result"), (EngineCore, "_submit")],
)
def test_the_call_after_a_broken_step_answers(make: Make, point: Any, overlaps: bool) -> None:
    llm = make(overlaps=overlaps)
    beside = llm.begin([3, 4], PARAMS)
    error = RuntimeError("a broken step")
    with Fault(point, 2, error, late=False).injected(), pytest.raises(RuntimeError) as caught:
        llm.generate([[5, 6], [7, 8]] * 20, PARAMS, use_tqdm=False)
        llm.generate([[5, 6], [7, 8]] * 20, PARAMS, use_tqdm=False)
    assert caught.value is error
    [output] = llm.generate([[7, 8]], PARAMS, use_tqdm=False)
    assert output.outputs[0].token_ids == expected_tokens([7, 8], 40, VOCAB)
    finish(llm, beside)
    with pytest.raises(EngineError, match=r"A step of the engine failed \(RuntimeError\)"):
        beside.output()
    check_idle(llm)


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_interrupt_at_any_time_loses_nothing(make: Make, alarm: Callable[[float], None], overlaps: bool) -> None:
    """``generate`` aborts its requests; one that was begun before goes on with the same tokens."""
    llm, rng = make(overlaps=overlaps), random.Random(5)
    beside = llm.begin([3, 4], SamplingParams(max_tokens=300, ignore_eos=True))
    interrupts = 0
    for number in range(60):
        if beside.is_done:
            assert tokens_of(beside) == expected_tokens([3, 4], 300, VOCAB)
            beside = llm.begin([3, 4], SamplingParams(max_tokens=300, ignore_eos=True))
        prompts = [[number, each, 1] for each in range(20)]
        try:
            alarm(1e-5 + rng.random() * 0.05)
            if number % 3:
                outputs = llm.generate(prompts, SamplingParams(max_tokens=9, ignore_eos=True), use_tqdm=False)
                assert [len(output.outputs[0].token_ids) for output in outputs] == [9] * 20
            else:
                llm.chat([{"role": "user", "content": "the fox"}], PARAMS, use_tqdm=False)
            alarm(0)
        except KeyboardInterrupt:
            interrupts += 1
        alarm(0)
        core_of(llm).check()
        [output] = llm.generate([[number, 2]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert output.outputs[0].token_ids == expected_tokens([number, 2], 4, VOCAB)
        assert scheduler_of(core_of(llm)).num_running + scheduler_of(core_of(llm)).num_waiting <= 1
    assert interrupts > 5, "otherwise the test has shown less than it says"
    finish(llm, beside)
    assert tokens_of(beside) == expected_tokens([3, 4], 300, VOCAB)
    check_idle(llm)


def test_a_step_that_was_interrupted_is_not_lost(make: Make, alarm: Callable[[float], None]) -> None:
    llm, rng = make(), random.Random(7)
    deltas: list[int] = []
    running = llm.begin(
        [3, 4], SamplingParams(max_tokens=800, ignore_eos=True), on_delta=lambda delta: deltas.extend(delta.tokens)
    )
    interrupts = 0
    while not running.is_done:
        try:
            alarm(1e-5 + rng.random() * 0.004)
            while not running.is_done:
                llm.step()
            alarm(0)  # within the block: one that comes meanwhile ends nothing but it
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts > 5
    assert tokens_of(running) == expected_tokens([3, 4], 800, VOCAB)
    check_idle(llm)


def lines_of(call: Callable[[], object]) -> int:
    """Count the lines of the offline face that a call executes, on all threads."""
    lines: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if "engine/offline" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        lines[event] += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return lines["line"]


@pytest.mark.parametrize("steps", [20, 10**9], ids=["given up", "finished"])
def test_a_large_generate_is_linear(make: Make, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight times as many prompts take eight times as many lines, not more, answered or given up."""
    counts = []
    for number in (50, 400):
        llm = make()
        core, left = core_of(llm), [steps]
        step = core.step

        def counted(step: Callable[[], Any] = step, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("given up")
            return step()

        monkeypatch.setattr(core, "step", counted)

        def generate(llm: LLM = llm, number: int = number) -> None:
            try:
                llm.generate([[each, 1] for each in range(number)], SamplingParams(max_tokens=2), use_tqdm=False)
            except RuntimeError:
                assert steps == 20

        counts.append(lines_of(generate))
    assert counts[1] <= 8 * counts[0] * 1.1


# A pool of 40 pages of 4 tokens: a conversation of 10 pages and two more prompts of 12 fit, a third one does not.
CHAT, OTHERS = [5] * 40, [[10 + each, *[7] * 46] for each in range(3)]
BRIEF = SamplingParams(max_tokens=1, ignore_eos=True)


def cached_after(llm: LLM, *others: list[int]) -> int:
    """Ask others, then the conversation. Returns how many of its tokens were cached."""
    for prompt in others:
        finish(llm, llm.begin(prompt, BRIEF))
    running = llm.begin(CHAT, BRIEF)
    finish(llm, running)
    return running.output().num_cached_tokens or 0


@pytest.mark.parametrize(
    ("session", "seconds", "kept"),
    [("", None, False), ("chat", None, True), ("chat", 900.0, True), ("chat", 0.0, False)],
)
def test_a_session_is_evicted_after_other_pages(make: Make, session: str, seconds: float | None, kept: bool) -> None:
    llm = make(num_pages=41)
    finish(llm, llm.begin(CHAT, BRIEF, session=session, session_seconds=seconds))
    assert (cached_after(llm, *OTHERS) > 30) == kept
    check_idle(llm)


def test_a_session_that_is_kept_for_no_time_goes_before_older_pages(make: Make) -> None:
    llm = make(num_pages=41)
    older = OTHERS[0]
    finish(llm, llm.begin(older, BRIEF))
    finish(llm, llm.begin(CHAT, BRIEF, session="chat", session_seconds=0.0))
    for prompt in OTHERS[1:]:
        finish(llm, llm.begin(prompt, BRIEF))
    running = llm.begin(older, BRIEF)
    finish(llm, running)
    assert (running.output().num_cached_tokens or 0) > 40
    assert cached_after(llm) < 30, "the older prompt is whole, and pages of the session made room"


def test_a_session_that_is_released_is_evicted_first(make: Make) -> None:
    llm = make(num_pages=41)
    finish(llm, llm.begin(CHAT, BRIEF, session="chat", session_seconds=900.0))
    assert not llm.release_session("another")
    assert llm.release_session("chat") and not llm.release_session("chat")
    assert cached_after(llm, *OTHERS) < 30
    check_idle(llm)


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 86_401.0])
def test_seconds_of_a_session_have_bounds(make: Make, seconds: float) -> None:
    with pytest.raises(RequestError, match="session_seconds"):
        make().begin(CHAT, BRIEF, session="chat", session_seconds=seconds)


def test_a_prompt_that_was_prefetched_is_cached(make: Make) -> None:
    llm = make()
    prompts = [{"prompt_token_ids": prompt} for prompt in (CHAT, OTHERS[0])]
    assert llm.prefetch(prompts) == [0, 0]
    assert llm.prefetch(prompts[0])[0] >= 36
    assert cached_after(llm) >= 36
    with pytest.raises(RequestError):
        llm.prefetch({"prompt_token_ids": [VOCAB + 5]})
    check_idle(llm)
