"""Measure KV on disk: after a restart, with a working set larger than the pool, and with prompts that never recur.

    export PYTHONPATH=tests
    python -m benchmarks.kv_tiers [--model M] [--prompts 5] [--documents 8] [--tokens 1000] [--rounds 3] [--out FILE]
    python -m benchmarks.kv_tiers --parts "hit rates" --documents 64 --tokens 2000 --rounds 10
    python -m benchmarks.kv_tiers --parts "distinct,distinct after some pools" --distinct 60
    python -m benchmarks.kv_tiers --parts "restart,llama.cpp" --llama-server PATH --gguf FILE

Each figure is of pairs: the same prompts, in turn, in an engine with ``--kv-disk`` and in one without, in this process.
The ratio of processor time counts all threads, the writer's and the reader's too, and holds on a busy machine; that of
seconds is the median over the pairs, with its interval of 95 %. Prompts that never come again are asked without a pause
in turns of four, as an engine writes in its pauses what it holds back: ``writer_share`` is the part of the processor
time of the turns that the writing thread takes, and ``pause_seconds`` the time for which it writes between them. *Hit
rates* are counted over the tests' device of integers, as they depend on no model:
a pool for a quarter of the documents, the same with a disk, and a pool for all. *llama.cpp* saves and restores a slot.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import threading
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from support.engine.core_hooks import cache_of, core_of, tiers_of
from support.engine.fake_worker import FakeWorker

from benchmarks.slot_restore import slot_restore
from rootgraft import LLM, SamplingParams
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.kv_cache.write_admission import WRITTEN_POOLS
from rootgraft.engine.messages import Done, Submit
from rootgraft.engine.types import SamplingParams as EngineParams

_TOKEN_BYTES = 23_040  # Bytes of a token's KV in SmolLM2-135M.
_TURN = 4  # prompts that an engine is asked without a pause
_POOL = 8  # prompts for which the pool has room, where none comes again
_VOCAB = 64  # Vocabulary of the fake device, which computes with integers.


@dataclass(frozen=True)
class Cost:
    """Cost of one prompt: seconds, processor seconds, and tokens that were cached."""

    seconds: float
    processor: float
    cached: int


class Engine:
    """An engine with or without KV on disk."""

    def __init__(self, model: str | None, pool_tokens: int, disk: str | None = None, disk_gib: float = 16.0) -> None:
        options: dict[str, Any] = {"kv_disk": disk, "kv_disk_gib": disk_gib} if disk else {}
        pool = pool_tokens * _TOKEN_BYTES / 2**30
        speculation = '{"method": "off"}'
        self._llm = LLM(model, kv_cache_memory=pool, speculative_config=speculation, max_num_seqs=1, **options)

    def ask(self, *asked: list[int], answer: int = 1) -> Cost:
        """Ask for answers to prompts, one after another without a pause."""
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        began, processor = time.perf_counter(), time.process_time()
        outputs = self._llm.generate([*asked], params, use_tqdm=False)
        cached = sum(output.num_cached_tokens or 0 for output in outputs)
        return Cost(time.perf_counter() - began, time.process_time() - processor, cached)

    def settle(self) -> float:
        """Wait until the pages are written for which the engine has a pause now. Returns the seconds that it took."""
        core, began = core_of(self._llm), time.perf_counter()
        if cache_of(core).tiers is not None:
            tiers_of(core).flush()
        return time.perf_counter() - began

    def close(self) -> None:
        self._llm.close()


def prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(1000, 40_000) for _ in range(length)] for _ in range(count)]


def writer_seconds() -> float:
    """Return the processor time of the threads that write pages behind the steps of this process."""
    writers = {thread.native_id for thread in threading.enumerate() if thread.name == "kv-write-behind"}
    return float(sum(each.user_time + each.system_time for each in psutil.Process().threads() if each.id in writers))


def middle(values: Iterable[float]) -> list[float]:
    """Return the interval that holds the median of what these values are drawn from with 95 %, by their order."""
    ordered = sorted(values)
    half = 0.98 * math.sqrt(len(ordered))
    first, last = math.floor(len(ordered) / 2 - half), math.ceil(len(ordered) / 2 + half)
    return [ordered[max(0, first)], ordered[min(len(ordered) - 1, last)]]


def compare(without: Iterable[Cost], with_disk: Iterable[Cost], num_tokens: int) -> dict[str, Any]:
    """Return ratios of what the disk's engine took and what the other one did."""
    pairs = list(zip(without, with_disk, strict=True))
    return {
        "pairs": len(pairs),
        "seconds_ratio_median": statistics.median(b.seconds / a.seconds for a, b in pairs),
        "seconds_ratio_95": middle(b.seconds / a.seconds for a, b in pairs),
        "processor_ratio": sum(b.processor for _, b in pairs) / sum(a.processor for a, _ in pairs),
        "cached_share_without": sum(a.cached for a, _ in pairs) / num_tokens,
        "cached_share_with": sum(b.cached for _, b in pairs) / num_tokens,
    }


def restart(model: str | None, count: int, length: int, seed: int) -> dict[str, Any]:
    """Time to the first token of prompts that an engine before this one has computed, against cold ones."""
    asked = prompts(random.Random(seed), count, length)
    warm_up = prompts(random.Random(seed + 1), 1, 64)[0]
    with tempfile.TemporaryDirectory() as disk:
        costs = []
        for _ in range(2):
            engine = Engine(model, 2 * count * length, disk)
            engine.ask(warm_up)
            costs.append([engine.ask(each) for each in asked])
            engine.close()
    found = compare(costs[0], costs[1], count * length)
    return found | {"least_cached": min(cost.cached for cost in costs[1]), "tokens": length}


def working_set(model: str | None, count: int, length: int, rounds: int, seed: int, order: str) -> dict[str, Any]:
    """Documents asked in turn or by Zipf's law, of which the pool holds a quarter."""
    rng = random.Random(seed)
    documents = prompts(rng, count, length)
    weights = [1 / (rank + 1) for rank in range(count)]
    asked = [
        [*range(count)] if order == "round robin" else rng.choices(range(count), weights, k=count)
        for _ in range(rounds)
    ]
    pool = count * length // 4 + length // 8
    with tempfile.TemporaryDirectory() as disk:
        off, on = Engine(model, pool), Engine(model, pool, disk)
        for number in range(count):  # the first round is cold in both
            off.ask(documents[number])
            on.ask(documents[number])
        pairs = [(off.ask(documents[each]), on.ask(documents[each])) for line in asked for each in line]
        off.close()
        on.close()
    return compare([a for a, _ in pairs], [b for _, b in pairs], len(pairs) * length)


def nothing_to_gain(
    model: str | None, count: int, length: int, seed: int, filled_by: int, disk_gib: float = 16.0
) -> dict[str, Any]:
    """Prompts that all differ, each with an answer of 32 tokens. A turn of some of them is a pair.

    Args:
        filled_by: number of other prompts that are asked before these.
    """
    asked = prompts(random.Random(seed), count + 1, length)
    with tempfile.TemporaryDirectory() as disk:
        off, on = Engine(model, _POOL * length), Engine(model, _POOL * length, disk, disk_gib)
        off.ask(asked[-1], answer=32)
        on.ask(asked[-1], *prompts(random.Random(seed + 1), filled_by, length), answer=32)
        on.settle()
        pairs, written, pauses = [], 0.0, 0.0
        for number in range(0, count, _TURN):  # in turns, so that neither is always the first
            costs = {}
            for engine in [off, on] if number // _TURN % 2 else [on, off]:
                before = writer_seconds()
                costs[engine] = engine.ask(*asked[number : min(number + _TURN, count)], answer=32)
                written += writer_seconds() - before
                pauses += engine.settle()
            pairs.append((costs[off], costs[on]))
        off.close()
        on.close()
    found = compare([a for a, _ in pairs], [b for _, b in pairs], count * length)
    processor, seconds = (sum(each) for each in zip(*((on.processor, on.seconds) for _, on in pairs), strict=True))
    return found | {"writer_share": written / processor, "pause_seconds": pauses, "seconds": seconds}


def hit_rates(count: int, length: int, rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """Shares of the prompts' tokens that are cached, by order and engine, without the first round."""
    size, rng = 16, random.Random(seed)
    documents = [[rng.randrange(_VOCAB) for _ in range(length)] for _ in range(count)]
    weights = [1 / (rank + 1) for rank in range(count)]
    num_all = count * (length // size + 2)
    orders = {
        "round robin": [*range(count)] * rounds,
        "zipf": rng.choices(range(count), weights, k=count * rounds),
    }
    found: dict[str, dict[str, float]] = {}
    for order, asked in orders.items():
        with tempfile.TemporaryDirectory() as disk:
            engines = {
                "no tier": _counting_core(num_all // 4, size),
                "disk": _counting_core(num_all // 4, size, disk),
                "a pool for all": _counting_core(num_all, size),
            }
            found[order] = {name: _hit_rate(core, documents, asked) for name, core in engines.items()}
            for core in engines.values():
                core.close()
    return found


def _counting_core(num_pages: int, page_size: int, disk: str | None = None) -> EngineCore:
    config = EngineConfig(block_size=page_size, max_num_seqs=1, max_num_batched_tokens=2048, kv_disk=disk)
    return EngineCore(config, FakeWorker(num_pages, page_size, vocab_size=_VOCAB))


def _hit_rate(core: EngineCore, documents: list[list[int]], asked: list[int]) -> float:
    """Ask for each document once, and then in an order. Returns the share of tokens that was cached in that.

    The device computes a page sooner than one is written, unlike a model: after each document all is written.
    """
    cached = 0
    for place, number in enumerate([*range(len(documents)), *asked]):
        core.handle([Submit(place, array("i", documents[number]), EngineParams(max_tokens=1))])
        while core.has_work:
            ended = [each for each in core.step() if isinstance(each, Done)]
            cached += sum(each.usage.cached for each in ended if place >= len(documents))
        if cache_of(core).tiers is not None:
            tiers_of(core).flush()
    return cached / sum(len(documents[number]) for number in asked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="SmolLM2-135M-Instruct by default")
    parser.add_argument("--prompts", type=int, default=5, help="for the restart")
    parser.add_argument("--prompt-tokens", type=int, default=1500)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument(
        "--tokens", type=int, default=1000, help="tokens of a document, and of a prompt that never recurs"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--distinct", type=int, default=32, help="prompts that never recur")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", default="restart,round robin,zipf,distinct,distinct on a full disk")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's llama-server, for the part llama.cpp")
    parser.add_argument("--gguf", type=Path, help="the model's file for llama.cpp")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    options = parser.parse_args()
    found: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}, "load": os.getloadavg()}
    for part in options.parts.split(","):
        if part == "restart":
            found[part] = restart(options.model, options.prompts, options.prompt_tokens, options.seed)
        elif part == "llama.cpp":
            asked = prompts(random.Random(options.seed), options.prompts, options.prompt_tokens)
            found[part] = slot_restore(options.llama_server, options.gguf, asked)
        elif part == "hit rates":
            found[part] = hit_rates(options.documents, options.tokens, options.rounds, options.seed)
        elif part.startswith("distinct"):
            asked_for = options.model, options.distinct, options.tokens, options.seed
            if part == "distinct on a full disk":
                found[part] = nothing_to_gain(*asked_for, 2, 2 * options.tokens * _TOKEN_BYTES / 2**30)
            else:
                found[part] = nothing_to_gain(*asked_for, WRITTEN_POOLS * _POOL if part.endswith("pools") else 0)
        else:
            count, length, rounds = options.documents, options.tokens, options.rounds
            found[part] = working_set(options.model, count, length, rounds, options.seed, part)
        print(part, json.dumps(found[part]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
