"""Steps without a model: processor time of planning and committing, by sequences that run and that wait."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from array import array

from benchmarks.computed_step import ComputedStep
from benchmarks.growth.curve import Curve
from rootgraft.engine.batch import Batch, RowResult, StepHandle, StepResult
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.kv_cache.state_cache import StateSlots
from rootgraft.engine.messages import Done, Submit
from rootgraft.engine.types import Pooler, SamplingParams
from rootgraft.lora.adapter_pool import AdapterPool
from rootgraft.radix.namespace import ENDLESS

RUNNING = (1, 4, 16, 64, 256)
WAITING = (1, 10, 100, 1000, 10_000)
_ROWS, _PROMPT, _ANSWER, _STEPS = 16, 64, 16, 300
_VOCABULARY = 50_000


class InstantWorker:
    """A device that draws a random token for each row in no time."""

    num_pages, max_model_len, vocab_size = 16_384, 8192, _VOCABULARY
    eos_ids: tuple[int, ...] = ()
    summary: tuple[str, ...] = ("instant",)
    base_digest = "instant"
    adapters: AdapterPool | None = None
    states: StateSlots | None = None
    draft = kv_pages = None
    pooler = Pooler()
    rope_switch = ENDLESS
    overlaps = False

    def __init__(self) -> None:
        self._random = random.Random(0)

    def close(self) -> None:
        """Nothing computes beside it."""

    def free_memory(self) -> None:
        pass

    def launch(self, batch: Batch) -> StepHandle:
        draw = self._random.randrange
        rows = (RowResult((draw(_VOCABULARY),) if row.draws else ()) for row in batch.rows)
        return ComputedStep(batch, StepResult(tuple(rows)))


class _Load:
    """An engine core, and how many sequences it is to have: one that ends is followed by another."""

    def __init__(self, rows: int) -> None:
        config = EngineConfig(max_num_seqs=rows, speculative_config='{"method": "off"}')
        self._core = EngineCore(config, InstantWorker())
        self._random, self._ids = random.Random(0), itertools.count(1)
        self._size = 0

    def fill(self, size: int) -> None:
        self._submit(size - self._size)
        self._size = size

    def step_seconds(self) -> float:
        """Return the mean processor time of a step, with the messages from and to the API process."""
        times = []
        for at in range(2 * _STEPS):
            begin = time.thread_time()
            ended = sum(isinstance(message, Done) for message in self._core.step())
            self._submit(ended)
            if at >= _STEPS:
                times.append(time.thread_time() - begin)
        return statistics.fmean(sorted(times)[: -_STEPS // 20])  # without the few in which the machine did other things

    def close(self) -> None:
        self._core.close()

    def _submit(self, count: int) -> None:
        params = SamplingParams(max_tokens=_ANSWER, temperature=1.0, ignore_eos=True)
        self._core.handle([Submit(next(self._ids), self._prompt(), params) for _ in range(count)])

    def _prompt(self) -> array[int]:
        return array("i", self._random.choices(range(_VOCABULARY), k=_PROMPT))


def measure(quick: bool) -> list[Curve]:
    """Measure the curves of the scheduler."""
    running, waiting = ((1, 4), (1, 10)) if quick else (RUNNING, WAITING)
    of_running = []
    for rows in running:
        load = _Load(rows)
        load.fill(rows)
        of_running.append(1e6 * load.step_seconds())
        load.close()
    load, of_waiting = _Load(_ROWS), []
    for count in waiting:
        load.fill(_ROWS + count)
        of_waiting.append(1e6 * load.step_seconds())
    load.close()
    each, ahead = "each row is planned and committed", "the first of the queue are looked at"
    return [
        Curve("scheduler-running", "Step without model, us", "sequences running", running, of_running, 1.0, each),
        Curve("scheduler-waiting", "Step without model, us", "sequences waiting", waiting, of_waiting, 0.0, ahead),
    ]
