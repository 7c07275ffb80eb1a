"""What the engine measures of a sequence: intervals, the rows it ran beside, its pages; once, with its end."""

from __future__ import annotations

import time
from array import array
from dataclasses import astuple
from pathlib import Path

import pytest
from support.engine.adapter_engine import Engine, write
from support.engine.fake_worker import FakeWorker

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core import adapter_manager
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.engine_stats import EngineStats
from rootgraft.engine.messages import Abort, Done, Heartbeat, Message, Submit, TokenOut, decode, encode
from rootgraft.engine.scheduling.sequence_meter import SequenceMeter
from rootgraft.engine.sequence.sequence import Sequence, SequenceSpec
from rootgraft.engine.types import FinishReason, SamplingParams, SequenceStats
from rootgraft.radix.namespace import Namespace
from rootgraft.radix.namespace import Path as PrefixPath

PAGE = 4
PATH = PrefixPath(Namespace("base", None, "", ""))


def core_of(num_pages: int = 200, rows: int = 4, budget: int = 16) -> EngineCore:
    options = {"speculative_config": '{"method": "off"}'}
    config = EngineConfig(block_size=PAGE, max_num_seqs=rows, max_num_batched_tokens=budget, **options)
    return EngineCore(config, FakeWorker(num_pages, PAGE))


def submit(core: EngineCore, number: int, num_prompt: int, num_answer: int) -> None:
    """Prompts that share nothing."""
    prompt = array("i", [number, *range(2, num_prompt + 1)])
    core.handle([Submit(number, prompt, SamplingParams(max_tokens=num_answer, ignore_eos=True))])


def run(core: EngineCore) -> list[Message]:
    messages: list[Message] = []
    while core.has_work:
        messages += decode(encode(core.step()))
    return messages


def measured(messages: list[Message]) -> dict[int, SequenceStats | None]:
    return {message.id: message.stats for message in messages if isinstance(message, Done)}


def test_the_intervals_of_a_sequence_add_up() -> None:
    now = iter((107.0, 110.0, 118.0))
    stats = EngineStats()
    meter = SequenceMeter(stats, PAGE, lambda: next(now))
    sequence = Sequence(
        1, array("i", range(9)), SamplingParams(), PATH, SequenceSpec(frozenset(), 0, arrival=100.0, max_model_len=99)
    )
    meter.admit(sequence)
    for num_rows in (4, 2, 3):
        stats.count_step(9, num_rows)
    meter.draw(sequence)
    meter.draw(sequence)
    sequence.num_computed = 9
    assert meter.end(sequence) == SequenceStats(7.0, 3.0, 8.0, preemptions=0, batch_size=3.0, kv_pages=3)


def test_a_prompt_takes_steps_before_its_first_token() -> None:
    core, before = core_of(), time.monotonic()
    submit(core, 1, num_prompt=40, num_answer=5)
    stats = measured(run(core))[1]
    assert stats is not None and min(stats.queued, stats.prefill, stats.decode) > 0
    assert stats.queued + stats.prefill + stats.decode <= time.monotonic() - before
    assert (stats.preemptions, stats.batch_size) == (0, 1.0)
    assert stats.kv_pages == -(-44 // PAGE)  # the last token has no KV


def test_the_first_token_of_a_replayed_sequence_is_the_first_that_is_drawn_here() -> None:
    core = core_of()
    prompt, params = array("i", range(1, 9)), SamplingParams(max_tokens=9, ignore_eos=True)
    core.handle([Submit(1, prompt, params, generated=array("i", [3, 4, 5]))])
    stats = measured(run(core))[1]
    assert stats is not None and min(stats.prefill, stats.decode) > 0


def test_the_batch_size_is_the_mean_over_the_steps_that_it_lived_through() -> None:
    core = core_of(budget=64)
    submit(core, 1, num_prompt=4, num_answer=8)
    submit(core, 2, num_prompt=4, num_answer=4)
    stats = measured(run(core))
    assert stats[2] is not None and stats[2].batch_size == 2.0
    assert stats[1] is not None and stats[1].batch_size == (4 * 2 + 4 * 1) / 8


def test_preemptions_are_counted_and_times_go_on() -> None:
    core = core_of(num_pages=9, rows=2)
    submit(core, 1, num_prompt=8, num_answer=20)
    submit(core, 2, num_prompt=8, num_answer=20)
    stats = measured(run(core))
    assert sorted(each.preemptions for each in stats.values() if each)[0] == 0
    assert sum(each.preemptions for each in stats.values() if each) == core.stats()["preemptions"] > 0


def test_a_sequence_that_never_began_has_no_measures() -> None:
    core = core_of(rows=1)
    submit(core, 1, num_prompt=4, num_answer=50)
    submit(core, 2, num_prompt=4, num_answer=50)
    core.step()
    core.handle([Abort((1, 2))])
    stats = measured(run(core))
    assert stats[2] is None
    assert stats[1] is not None and stats[1].kv_pages == 1 and stats[1].decode >= 0


def test_measures_travel_once_a_request() -> None:
    core = core_of()
    submit(core, 1, num_prompt=6, num_answer=9)
    messages = run(core)
    tokens = [message for message in messages if isinstance(message, TokenOut)]
    [done] = [message for message in messages if isinstance(message, Done)]
    assert len(tokens) == 9 and done.reason is FinishReason.LENGTH and done.stats is not None
    assert all(not hasattr(message, "stats") for message in tokens)
    [again] = decode(encode([done]))
    assert isinstance(again, Done) and again.stats is not None and astuple(again.stats) == astuple(done.stats)


def test_accepted_drafts_are_counted_by_the_length_of_their_run() -> None:
    stats = EngineStats()
    for num_accepted in (0, 3, 3, 1):
        stats.draft_stats.count("ngram", 4, num_accepted)
    counters = stats.counters()
    assert [counters[f"accepted_runs_{length}"] for length in (0, 1, 3)] == [1, 1, 2]
    assert counters["draft_tokens_accepted"] == 7


def test_waiting_sequences_are_told_apart_from_deferred_ones() -> None:
    core = core_of(rows=1)
    for number in (1, 2, 3):
        submit(core, number, num_prompt=4, num_answer=9)
    core.step()
    assert (core.stats()["waiting"], core.stats()["waiting_deferred"]) == (2, 0)


def test_adapters_in_use_are_named_in_order_and_not_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tmp_path)
    assert engine.core.adapters_in_use() == ((), ())
    for seed, name in enumerate(("two", "one", "three")):
        write(tmp_path, name, seed)
        engine.load(name, name)
    for name in ("two", "one", "three", None):
        engine.submit(range(9), name, max_tokens=50)
    for _ in range(6):
        engine.step()
    running, waiting = engine.core.adapters_in_use()
    assert len(running) == 2 and len(waiting) == 1, "there are two slots"
    assert running == tuple(sorted(running)) and {*running, *waiting} == {"one", "two", "three"}
    [beat] = decode(encode([Heartbeat({}, {}, engine.core.adapters_in_use())]))
    assert isinstance(beat, Heartbeat) and beat.adapters == (running, waiting)
    monkeypatch.setattr(adapter_manager, "_MOST_NAMES", 1)
    assert engine.core.adapters_in_use() == (running[:1], waiting)
    engine.core.close()
