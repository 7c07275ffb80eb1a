"""The fuzzer: runs the requests of a world together and each alone, and compares what they said."""

from __future__ import annotations

import random
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from support.engine.core_hooks import (
    cache_of,
    preempt,
    scheduler_of,
    set_structured_output,
    structured_output_in_process,
)
from support.models.lora_models import VOCAB, base, make_adapter

from benchmarks.fuzzing.worlds import ADAPTERS, MAX_LEN, Model, Request, World, draw_request, draw_world
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.messages import Abort, Done, Failed, Submit, TokenOut
from rootgraft.engine.types import Logprob
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.match import matcher
from rootgraft.grammar.spec import GrammarKind, GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

OF_A_WORLD = 125  # requests
PREEMPTED = 0.1
MOST_STEPS = 1_000_000  # of a world; those that wait for an adapter take a millisecond each
EOS = 2
# Tokens 3 to 97 are the printable characters; the first three are special, the last three bytes of their own.
TEXTS = (b"<pad>", b"<bos>", b"<eos>", *(bytes([32 + i]) for i in range(95)), b"\n", b"\t", b"\x80")
VOCABULARY = Vocabulary(TEXTS, frozenset((0, 1, EOS)), (EOS,), VOCAB)


@dataclass
class Said:
    """What became of a sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    end: tuple[Any, ...] | None = None

    def take(self, message: TokenOut | Done | Failed) -> None:
        assert self.end is None, "a message after the end"
        if isinstance(message, TokenOut):
            self.tokens += message.tokens
            self.logprobs += message.logprobs
            self.prompt_logprobs += message.prompt_logprobs
        elif isinstance(message, Done):
            self.end = message.reason.value, message.stop_token, message.usage.completion
        else:
            self.end = message.kind, message.message

    def after(self, count: int) -> Said:
        """What it says after its first ``count`` tokens. The prompt's logprobs come before the first one."""
        return Said(self.tokens[count:], self.logprobs[count:], [] if count else self.prompt_logprobs, self.end)

    def begins(self, other: Said) -> bool:
        """Whether an aborted sequence said what the other says, as far as it came."""
        fields = ("tokens", "logprobs", "prompt_logprobs")
        return all(getattr(other, name)[: len(getattr(self, name))] == getattr(self, name) for name in fields)


class Ready:
    """A compile that is done."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled

    def poll(self) -> matcher.Matcher:
        return self._compiled.matcher()


@cache
def _compiled(kind: str, content: bytes) -> CompiledGrammar:
    return compile(GrammarSpec(GrammarKind(kind), content), VOCABULARY)


def make_core(model: Model, folder: Path, overlaps: bool, **options: Any) -> EngineCore:
    family, dtype, kv, quantization = model
    config = EngineConfig(
        device="cpu", dtype=dtype, kv_cache_dtype=kv, quantization=quantization, max_model_len=MAX_LEN,
        enable_lora=True, lora_dir=str(folder / f"{family}_adapters"), **options,
    )  # fmt: skip
    worker = Worker(config, folder / family)
    worker.overlaps = overlaps
    core = EngineCore(config, worker)
    grammars: Any = structured_output_in_process(config.max_num_seqs + config.max_drafts, VOCABULARY)
    grammars.compile = lambda grammar, reasoning: Ready(_compiled(*grammar))
    set_structured_output(core, grammars)
    return core


class Fuzzer:
    """Runs worlds over models in a folder, which are made as they are needed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self._families: set[str] = set()
        self._alone: dict[Model, EngineCore] = {}
        self._said_alone: dict[int, Said] = {}  # by the sequences of the world that is run

    def prepare(self, family: str) -> None:
        """Save a base and its adapters."""
        if family not in self._families:
            self._families.add(family)
            base(family, self.folder)
            for seed, (name, options) in enumerate(ADAPTERS.items()):
                make_adapter(family, self.folder, self.folder / f"{family}_adapters" / name, seed, **options)

    def check_world(self, seed: str, numbers: Sequence[int]) -> str | None:
        """Run some requests of a world; returns what is wrong, None for nothing."""
        world = draw_world(seed)
        self.prepare(world.family)
        rng, step = random.Random(f"{seed} arrivals"), 0
        requests = []
        for number in range(max(numbers, default=-1) + 1):
            step += rng.choice((0, 0, 0, 0, 1, 3))
            requests.append(draw_request(world, seed, number, step))
        requests = [requests[number] for number in numbers]
        self._said_alone.clear()
        try:
            requests = [self._cut(world, request) for request in requests]
            said = self._together(world, requests)
            differences = (
                self._difference(world, submit, request, said) for request in requests for submit in request.submits
            )
            return next(filter(None, differences), None)
        except Exception:
            self._alone.clear()  # one of them may be in the middle of a request
            return traceback.format_exc()

    def _cut(self, world: World, request: Request) -> Request:
        """The request as it goes on after a part of what it says alone."""
        if request.cut is None:
            return request
        submits = []
        for submit in request.submits:
            said = self._said_alone[submit.id] = self._say_alone(world, submit)
            kept = min(int(request.cut * (len(said.tokens) + 1)), submit.params.max_tokens - 1)
            submits.append(replace(submit, generated=array("i", said.tokens[:kept])))
            self.counts["resumed"] += kept > 0
        return replace(request, submits=tuple(submits))

    def _together(self, world: World, requests: Sequence[Request]) -> dict[int, Said]:
        core = make_core(world.model, self.folder, world.overlaps, **world.options)
        try:
            with patch.object(matcher, "SLOW_SECONDS", 0.0 if world.slow_masks else matcher.SLOW_SECONDS):
                said = _run(core, requests, random.Random(0), 0.0 if world.overlaps else PREEMPTED)
        finally:
            core.close()
        stats = core.stats()
        for name in ("preemptions", "prompt_tokens_cached", "draft_tokens_accepted", "forced_tokens"):
            self.counts[name] += int(stats[name])
        self.counts["pages_evicted"] += cache_of(core).num_evicted
        self.counts["requests"] += len(requests)
        self.counts["aborted"] += sum(each.end is not None and each.end[0] == "abort" for each in said.values())
        return said

    def _difference(self, world: World, submit: Submit, request: Request, said: dict[int, Said]) -> str | None:
        whole = self._said_alone.get(submit.id) or self._say_alone(world, replace(submit, generated=array("i")))
        ours, alone = said[submit.id], whole.after(len(submit.generated))
        was_aborted = request.abort is not None and ours.end is not None and ours.end[0] == "abort"
        if ours.begins(alone) if was_aborted else ours == alone:
            return None
        return f"request {request.number}, {submit}\ntogether {ours}\nalone    {alone}"

    def _say_alone(self, world: World, submit: Submit) -> Said:
        core = self._alone.get(world.model)
        if core is None:
            core = self._alone[world.model] = make_core(
                world.model, self.folder, False, block_size=16, num_gpu_blocks_override=10, max_num_seqs=1,
                max_num_batched_tokens=512, enable_prefix_caching=False, speculative_config='{"method": "off"}',
                max_loras=len(ADAPTERS), enforce_eager=True, threads=1,
            )  # fmt: skip
        return _run(core, [Request(0, (submit,), 0, None)], random.Random(0), 0.0)[submit.id]

    def close(self) -> None:
        for core in self._alone.values():
            core.close()

    def minimised(self, seed: str, numbers: Sequence[int], most_runs: int = 100) -> list[int]:
        """Fewer requests of a world that fails, which still fails with them: parts are left out, ever smaller ones."""
        kept, size, begin = list(numbers), len(numbers) // 2, 0
        for _ in range(most_runs):
            if not size:
                break
            fewer = kept[:begin] + kept[begin + size :]
            if fewer and self.check_world(seed, fewer):
                kept = fewer
            else:
                begin += size
            if begin >= len(kept):
                size, begin = size // 2, 0
        return kept


def _run(core: EngineCore, requests: Sequence[Request], rng: random.Random, preempted: float) -> dict[int, Said]:
    """Run requests to their ends, and check everything after each step.

    Args:
        preempted: share of the steps before which some sequence is preempted, beside those that lack pages.
    """
    said = {submit.id: Said() for request in requests for submit in request.submits}
    coming = sorted(requests, key=lambda request: request.arrival)
    aborts = sorted((each.abort, each.number) for each in requests if each.abort is not None)
    by_number = {request.number: request for request in requests}
    step = 0
    while coming or core.has_work:
        if not core.has_work:
            step = max(step, coming[0].arrival)
        while coming and coming[0].arrival <= step:
            core.handle(coming.pop(0).submits)
        while aborts and aborts[0][0] <= step:
            core.handle([Abort(tuple(submit.id for submit in by_number[aborts.pop(0)[1]].submits))])
        if rng.random() < preempted and (running := list(scheduler_of(core).running)):
            preempt(core, rng.choice(running))
        for message in core.step():
            if isinstance(message, (TokenOut, Done, Failed)):
                said[message.id].take(message)
        core.check()
        step += 1
        assert step < MOST_STEPS, "it does not come to an end"
    assert all(each.end is not None for each in said.values()), "a sequence has no end"
    return said


def fuzz(fuzzer: Fuzzer, seed: int, requests: int, until: float = float("inf")) -> Iterator[tuple[str, str | None]]:
    """Run worlds; yields the seed of each, and what is wrong in it."""
    for number in count():
        if number * OF_A_WORLD >= requests or time.monotonic() > until:
            return
        name = f"{seed}.{number}"
        yield name, fuzzer.check_world(name, range(min(OF_A_WORLD, requests - number * OF_A_WORLD)))


def report(fuzzer: Fuzzer, name: str, wrong: str, requests: int = OF_A_WORLD) -> str:
    """What is wrong in a world, with the fewest requests found that show it."""
    numbers = fuzzer.minimised(name, range(requests))
    shown = ",".join(map(str, numbers))
    again = fuzzer.check_world(name, numbers) or wrong
    return f"world {name}: {draw_world(name)}\n{again}\nAgain: python -m benchmarks.fuzz --world {name} --only {shown}"
