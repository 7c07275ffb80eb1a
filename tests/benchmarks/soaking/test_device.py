"""The device of ``benchmarks/soak.py``: what it remembers of a step would look like a leak of the engine."""

from __future__ import annotations

import gc
import sys
from array import array

import pytest

from benchmarks.soaking import device
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.messages import Done, Submit
from rootgraft.engine.speculation import proposer
from rootgraft.engine.speculation.output_lookup import OutputLookup
from rootgraft.engine.types import SamplingParams


def steps_of_sequences(core: device.CheckedCore, first_id: int, count: int) -> int:
    """Run so many sequences of 40 tokens, one after the other, each on its own prompt. Returns the steps."""
    steps = 0
    for number in range(first_id, first_id + count):
        prompt = array("i", [number % 90, number // 90, 1])
        core.handle([Submit(id=number, tokens=prompt, params=SamplingParams(max_tokens=40))])
        ended = False
        while not ended:
            ended = any(isinstance(message, Done) for message in core.step())
            steps += 1
    return steps


def test_nothing_is_remembered_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "STEP_SECONDS", 0)
    monkeypatch.setattr(proposer, "OutputLookup", lambda: OutputLookup(most=1000))  # soon full, as the pool is
    worker = device.Device(device.PAGES, device.PAGE, vocab_size=device.VOCAB, max_model_len=device.MAX_LEN)
    core = device.CheckedCore(EngineConfig(max_num_seqs=4, block_size=device.PAGE), worker)
    steps_of_sequences(core, 1, 60)  # until both are
    assert min(growth(core, 61 + 104 * part) for part in range(3)) < 0.25  # other threads allocate too, at times


def growth(core: device.CheckedCore, first_id: int) -> float:
    """Blocks of memory that are kept of a step."""
    gc.collect()
    blocks = sys.getallocatedblocks()
    steps = steps_of_sequences(core, first_id, 104)  # now and then a draft stands, and saves one
    assert steps >= 4000
    gc.collect()
    return (sys.getallocatedblocks() - blocks) / steps
