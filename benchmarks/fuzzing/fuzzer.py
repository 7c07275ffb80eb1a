"""The fuzzer: runs the requests of a world together and each alone, and compares what they said."""

from __future__ import annotations

import random
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache, partial
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

from benchmarks.fuzzing.worlds import ADAPTERS, MAX_LEN, Model, Request, draw_request, draw_world
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.executor.worker import Worker
from rootgraft.engine.messages import Abort, Done, Failed, Reply, Submit, TokenOut
from rootgraft.engine.types import Logprob
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.match import matcher
from rootgraft.grammar.spec import GrammarKind, GrammarSpec
from rootgraft.grammar.vocabulary import Vocabulary

OF_A_WORLD = 125  # requests
PREEMPTED = 0.1
MOST_STEPS = 1_000_000  # Largest number of steps of a world. Steps that wait for an adapter take a millisecond each.
EOS = 2
# Tokens 3 to 97 are the printable characters; the first three are special, the last three bytes of their own.
TEXTS = (b"<pad>", b"<bos>", b"<eos>", *(bytes([32 + i]) for i in range(95)), b"\n", b"\t", b"\x80")
VOCABULARY = Vocabulary(TEXTS, frozenset((0, 1, EOS)), (EOS,), VOCAB)


@dataclass
class Said:
    """Messages about a sequence."""

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
        """Return the messages after its first ``count`` tokens. The prompt's logprobs come before the first one."""
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
    return compile_in_process(EngineCore(config, worker), config)


def compile_in_process(core: EngineCore, config: EngineConfig) -> EngineCore:
    """Have a core take grammars that are compiled here, each once."""
    grammars: Any = structured_output_in_process(config.most_seqs + config.max_drafts, VOCABULARY)
    grammars.compile = lambda grammar, reasoning, tenant: Ready(_compiled(*grammar))
    set_structured_output(core, grammars)
    return core


class Run:
    """Requests in an engine, and what they have said; everything is checked after each step."""

    def __init__(self, core: EngineCore, requests: Sequence[Request]) -> None:
        self.core = core
        self.said = {submit.id: Said() for request in requests for submit in request.submits}
        self.replied: set[int] = set()  # ids of calls that were answered
        self._num_steps = 0

    def step(self) -> None:
        for message in self.core.step():
            if isinstance(message, (TokenOut, Done, Failed)):
                self.said[message.id].take(message)
            elif isinstance(message, Reply):
                assert message.failure is None, message.failure
                self.replied.add(message.id)
        self.core.check()
        self._num_steps += 1
        assert self._num_steps < MOST_STEPS, "it does not come to an end"


class Fuzzer:
    """Runs worlds over models in a folder, which are made as they are needed."""

    option = ""  # Option of the command for this fuzzer.

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self._families: set[str] = set()
        self._alone: dict[Any, EngineCore] = {}
        self._said_alone: dict[int, Said] = {}  # by the sequences of the world that is run

    def prepare(self, family: str) -> None:
        """Save a base and its adapters."""
        if family not in self._families:
            self._families.add(family)
            base(family, self.folder)
            for seed, (name, options) in enumerate(ADAPTERS.items()):
                make_adapter(family, self.folder, self.folder / f"{family}_adapters" / name, seed, **options)

    def draw_world(self, seed: str) -> Any:
        return draw_world(seed)

    def draw_request(self, world: Any, seed: str, number: int, arrival: int) -> Request:
        return draw_request(world, seed, number, arrival)

    def check_world(self, seed: str, numbers: Sequence[int]) -> str | None:
        """Run some requests of a world; returns what is wrong, None for nothing."""
        world = self.draw_world(seed)
        rng, step = random.Random(f"{seed} arrivals"), 0
        requests = []
        for number in range(max(numbers, default=-1) + 1):
            step += rng.choice((0, 0, 0, 0, 1, 3))
            requests.append(self.draw_request(world, seed, number, step))
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

    def _cut(self, world: Any, request: Request) -> Request:
        """The request as it goes on after a part of what it says alone."""
        if request.cut is None:
            return request
        submits = []
        for submit in request.submits:
            said = self._said_alone[submit.id] = self._say_alone(world, submit, request.version)
            kept = min(int(request.cut * (len(said.tokens) + 1)), submit.params.max_tokens - 1)
            submits.append(replace(submit, generated=array("i", said.tokens[:kept])))
            self.counts["resumed"] += kept > 0
        return replace(request, submits=tuple(submits))

    def _together(self, world: Any, requests: Sequence[Request]) -> dict[int, Said]:
        core = self.make_core(world)
        try:
            with self.faults(world):
                said = self._run(Run(core, requests), requests, partial(self.disturb, core, world, random.Random(0)))
        finally:
            core.close()
        stats = core.stats()
        for name in ("preemptions", "prompt_tokens_cached", "draft_tokens_accepted", "forced_tokens"):
            self.counts[name] += int(stats[name])
        self.counts["pages_evicted"] += cache_of(core).num_evicted
        self.counts["requests"] += len(requests)
        self.counts["aborted"] += sum(each.end is not None and each.end[0] == "abort" for each in said.values())
        return said

    def make_core(self, world: Any) -> EngineCore:
        """Return the cramped engine of a world."""
        self.prepare(world.family)
        return make_core(world.model, self.folder, world.overlaps, **world.options)

    def make_alone(self, world: Any) -> EngineCore:
        """Return an engine in which each request of a world is alone."""
        self.prepare(world.family)
        return make_core(
            world.model, self.folder, False, block_size=16, num_gpu_blocks_override=10, max_num_seqs=1,
            max_num_batched_tokens=512, enable_prefix_caching=False, speculative_config='{"method": "off"}',
            max_loras=len(ADAPTERS), enforce_eager=True, threads=1,
        )  # fmt: skip

    def faults(self, world: Any) -> AbstractContextManager[Any]:
        """Return a context in which a world's masks take long, if they are to."""
        return patch.object(matcher, "SLOW_SECONDS", 0.0 if world.slow_masks else matcher.SLOW_SECONDS)

    def disturb(self, core: EngineCore, world: Any, rng: random.Random) -> None:
        """Preempt a sequence before some steps, beside those that lack pages."""
        if not world.overlaps and rng.random() < PREEMPTED:
            running = [each for each in scheduler_of(core).running if each.num_tokens <= each.rope_switch]
            if running:
                preempt(core, rng.choice(running))

    def arrive(self, run: Run, request: Request) -> None:
        run.core.handle(request.submits)

    def _difference(self, world: Any, submit: Submit, request: Request, said: dict[int, Said]) -> str | None:
        whole = self._said_alone.get(submit.id) or self._say_alone(world, submit, request.version)
        ours, alone = said[submit.id], whole.after(len(submit.generated))
        was_aborted = request.abort is not None and ours.end is not None and ours.end[0] == "abort"
        if ours.begins(alone) if was_aborted else ours == alone:
            return None
        return f"request {request.number}, {submit}\ntogether {ours}\nalone    {alone}"

    def _say_alone(self, world: Any, submit: Submit, version: str | None) -> Said:
        """Return what a request says alone, with the adapter for which its name stood."""
        core = self._alone.get(world.model)
        if core is None:
            core = self._alone[world.model] = self.make_alone(world)
        whole = replace(submit, generated=array("i"), adapter=version or submit.adapter)
        requests = [Request(0, (whole,), 0, None)]
        return self._run(Run(core, requests), requests, lambda: None)[submit.id]

    def _run(self, run: Run, requests: Sequence[Request], disturb: Callable[[], None]) -> dict[int, Said]:
        """Run requests to their ends; ``disturb`` is called before each step."""
        coming = sorted(requests, key=lambda request: request.arrival)
        aborts = sorted((each.abort, each.number) for each in requests if each.abort is not None)
        by_number = {request.number: request for request in requests}
        step = 0
        while coming or run.core.has_work:
            if not run.core.has_work:
                step = max(step, coming[0].arrival)
            while coming and coming[0].arrival <= step:
                self.arrive(run, coming.pop(0))
            while aborts and aborts[0][0] <= step:
                run.core.handle([Abort(tuple(submit.id for submit in by_number[aborts.pop(0)[1]].submits))])
            disturb()
            run.step()
            step += 1
        assert all(each.end is not None for each in run.said.values()), "a sequence has no end"
        return run.said

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


def fuzz(fuzzer: Fuzzer, seed: int, requests: int, until: float = float("inf")) -> Iterator[tuple[str, str | None]]:
    """Run worlds; yields the seed of each, and what is wrong in it."""
    for number in count():
        if number * OF_A_WORLD >= requests or time.monotonic() > until:
            return
        name = f"{seed}.{number}"
        yield name, fuzzer.check_world(name, range(min(OF_A_WORLD, requests - number * OF_A_WORLD)))


def report(fuzzer: Fuzzer, name: str, wrong: str, requests: int = OF_A_WORLD) -> str:
    """Return what is wrong in a world, with the fewest requests found that show it."""
    numbers = fuzzer.minimised(name, range(requests))
    shown = ",".join(map(str, numbers))
    again = fuzzer.check_world(name, numbers) or wrong
    command = f"python -m benchmarks.fuzz{fuzzer.option} --world {name} --only {shown}"
    return f"world {name}: {fuzzer.draw_world(name)}\n{again}\nAgain: {command}"
