"""Test hook: private parts of `EngineCore`, its scheduler and prefix cache, for checks, clocks and faults.

Only this module reads them; `tests/test_house.py` checks that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.core.structured_output import StructuredOutputManager
from rootgraft.engine.kv_cache.kv_tiers import KvTiers
from rootgraft.engine.kv_cache.prefix_cache import PrefixCache
from rootgraft.engine.messages import Submit, TokenTexts
from rootgraft.engine.offline.llm import LLM
from rootgraft.engine.scheduling.scheduler import Scheduler
from rootgraft.engine.scheduling.step_plan import StepPlan
from rootgraft.engine.sequence.sequence import Sequence
from rootgraft.engine.serving.request import TextRequest
from rootgraft.grammar.compile.compile_service import CompileStats
from rootgraft.grammar.compile.compiled_grammar import CompiledGrammar
from rootgraft.grammar.compile.compiler import compile
from rootgraft.grammar.match.mask_buffer import MaskBuffer
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.grammar.thought_rules import ThoughtRules
from rootgraft.grammar.vocabulary import Vocabulary
from rootgraft.radix.tree import RadixTree


def scheduler_of(core: EngineCore) -> Scheduler:
    return core._scheduler


def worker_of(core: EngineCore) -> Any:
    """Return the core's worker: the fake one, or `Worker`."""
    return core._worker


def drawn_seed(core: EngineCore) -> int:
    """Draw the seed that the next request without one would get."""
    return core._seeds.getrandbits(63)


def wait_for_vocabulary(core: EngineCore) -> None:
    """Wait until the core's vocabulary for grammars is built, on another thread."""
    core._grammars._managers[""]._built.result()


def cache_of(core: EngineCore) -> PrefixCache:
    return core._cache


def tree_of(core: EngineCore) -> RadixTree:
    return core._cache._tree


def num_matched(core: EngineCore, submit: Submit) -> int:
    """Return how many prompt tokens of a request the cache holds. Counts as a use of none of them."""
    adaptation = core._adapt(submit)
    assert adaptation is not None
    return core._cache.match(adaptation.path, submit.tokens, len(submit.tokens))


def evict_all(core: EngineCore) -> None:
    """Evict every page that no running sequence holds."""
    cache = core._cache
    cache._free(cache._tree.evict(cache._tree.num_pages - cache._tree.num_locked))


def check_adapters(core: EngineCore) -> None:
    """Check names, versions, slots and pins of adapters against each other."""
    assert core._adapters is not None
    core._adapters.check()


def adapter_pins(core: EngineCore) -> Mapping[int, Any]:
    """Return the adapter versions that requests in flight pin, by sequence id."""
    assert core._adapters is not None
    return core._adapters._pins


def known_vocabularies(core: EngineCore) -> tuple[set[str], set[str]]:
    """Return the vocabularies of which the core has the bytes, and those whose grammars it keeps."""
    return set(core._grammars._texts), set(core._grammars._managers)


def core_of(llm: LLM) -> EngineCore:
    return llm._engine._core


@contextmanager
def thinking(llm: LLM, rules: Iterable[ThoughtRules | None]) -> Iterator[None]:
    """Have the requests of an `LLM`, in their order, think by these rules, for which it has no parameter."""
    maker, each = llm._requests, iter(rules)
    make = maker.request

    def request(*args: Any) -> TextRequest:
        return replace(make(*args), reasoning=next(each))

    maker.request = request  # type: ignore[method-assign]
    try:
        yield
    finally:
        maker.request = make  # type: ignore[method-assign]


class InProcessCompiles:
    """Compiles grammars in this process: ``CompileService`` starts child processes, which takes seconds."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.stats = CompileStats()
        self._vocabulary = vocabulary
        self._compiled: dict[GrammarSpec, Future[CompiledGrammar]] = {}

    def compile(self, spec: GrammarSpec, tenant: str = "") -> Future[CompiledGrammar]:
        if spec not in self._compiled:
            self._compiled[spec] = Future()
            self._compiled[spec].set_result(compile(spec, self._vocabulary))
        return self._compiled[spec]

    def close(self) -> None:
        pass


def structured_output_in_process(max_lines: int, vocabulary: Vocabulary) -> StructuredOutputManager:
    """Return a manager that compiles in this process."""
    manager = object.__new__(StructuredOutputManager)
    manager._mask_seconds = []
    manager._eos_ids = vocabulary.eos
    manager._thread = ThreadPoolExecutor(1)
    manager._built = Future()
    service: Any = InProcessCompiles(vocabulary)
    manager._built.set_result((service, MaskBuffer(max_lines, vocabulary), vocabulary))
    return manager


def set_structured_output(core: EngineCore, manager: Any) -> None:
    """Put a manager of a test's own in place of that of the model's vocabulary."""
    core._grammars._texts[""] = TokenTexts(array("i", [0]), b"", (), "", (0,))
    core._grammars._managers[""] = manager


def set_clock(core: EngineCore, clock: Callable[[], float]) -> None:
    """Set the clock of the scheduler's step lengths."""
    core._scheduler._clock = clock


def set_queue_clock(core: EngineCore, clock: Callable[[], float]) -> None:
    """Set the clock by which waiting sequences grow urgent."""
    core._scheduler._queue._clock = clock


def set_pins_clock(core: EngineCore, clock: Callable[[], float]) -> None:
    """Set the clock by which sessions and pins expire."""
    core._scheduler.session_pins._clock = clock


def session_keys(core: EngineCore) -> list[tuple[str, str]]:
    """Return (tenant, session) of the sessions held, the least recently used first."""
    return list(core._scheduler.session_pins._sessions)


def set_slow_mask_thread(core: EngineCore, thread: Any) -> None:
    core._scheduler.slow_masks._thread = thread


def alive_sequences(core: EngineCore) -> Collection[Sequence]:
    """Return all sequences that wait or run."""
    return core._scheduler._alive.values()


def free_rows(core: EngineCore) -> list[int]:
    return core._scheduler._rows.free


def draft_states(core: EngineCore) -> Mapping[int, Any]:
    """Return the proposer's record of each sequence that may draft."""
    return core._scheduler._drafts._proposer._sequences


def num_followed(core: EngineCore) -> int:
    """Return the number of sequences that the draft model follows."""
    return len(core._scheduler._drafts._drafter._followers)


def preempt(core: EngineCore, sequence: Sequence) -> None:
    core._scheduler._preempt(sequence, StepPlan(0, 0.0))


def watch_preemptions(core: EngineCore) -> list[int]:
    """Return a list to which each preemption appends the number of steps in flight."""
    scheduler, seen = core._scheduler, []
    inner = scheduler._preempt

    def watched(*args: Any) -> None:
        seen.append(len(scheduler._in_flight))
        inner(*args)

    scheduler._preempt = watched  # type: ignore[method-assign]
    return seen


def set_tiers(core: EngineCore, tiers: KvTiers) -> None:
    """Give a core without tiers some."""
    core._kept.tiers = core._cache.tiers = tiers


def tiers_of(core: EngineCore) -> KvTiers:
    assert core._kept.tiers is not None
    return core._kept.tiers
