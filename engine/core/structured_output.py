"""Structured output: compiles grammars in child processes, and fills token masks on a thread. Needs ``llguidance``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from time import monotonic, perf_counter

import numpy as np
from numpy.typing import NDArray

from ...grammar.compile.compile_service import CompileQueueFull, CompileService
from ...grammar.compile.compiled_grammar import CompiledGrammar
from ...grammar.errors import CompileUnavailable, GrammarError
from ...grammar.match.closing_texts import ranks
from ...grammar.match.mask_buffer import MaskBuffer, MaskFill
from ...grammar.match.matcher import GrammarFailure, Matcher
from ...grammar.match.reasoning_matcher import AnswerMatcher, ReasoningMatcher
from ...grammar.spec import GrammarKind, GrammarSpec
from ...grammar.thought_rules import ThoughtRules
from ...grammar.vocabulary import Vocabulary
from ...kernels.device_memory import is_out_of_memory
from ...tenancy.thread_calls import NoThread, call_on
from ..batch import Masks, TokenCheck
from ..errors import CapacityError, EngineError, GrammarRefused, ModelError
from ..machine import resources
from ..messages import TokenTexts
from ..sequence.mask_jobs import MaskJob

MOST_WAITED = 120.0
"""Longest time in seconds that a request waits for its grammar: for a free worker, and while the grammar is compiled in
parallel with other work. A separate limit applies to the processor time of the compile itself.
"""
MOST_TESTED = 64  # If the end of an answer is postponed, up to this many tokens are tested for an end that fits.
_BUILD_BYTES = 2048  # Bytes for each token of a vocabulary; more than building the vocabulary ever needs.
MOST_THREADS = 8
"""Largest number of threads that fill masks while a device computes."""
MOST_AHEAD = 8
"""If more compiles wait, no grammar is compiled in advance, because compiles for waiting requests come first."""

logger = logging.getLogger("rootgraft.grammar")


class StructuredOutputManager:
    """Compiles grammars, and fills the token masks of a step while the step's forward pass runs.

    Building the library's vocabulary takes a second. The mask thread builds it, so that only the first request with a
    grammar waits for it.

    Args:
        texts: the vocabulary as bytes.
        eos_ids: the model's end tokens, at least one.
        vocab_size: width of the logits, which may be padded beyond the vocabulary.
        max_lines: largest number of sampling positions of a batch.
        overlaps: whether the forward pass leaves the CPU cores free, so that several threads can fill masks.
    """

    def __init__(
        self,
        texts: TokenTexts,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        max_lines: int,
        *,
        overlaps: bool = False,
    ) -> None:
        num_threads = min(MOST_THREADS, resources.cores().usable // 2) if overlaps else 1
        self._eos_ids = eos_ids
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._mask_seconds: list[float] = []
        self._build = partial(_build, texts, eos_ids, vocab_size, max_lines, num_threads)
        self._built = call_on(self._thread, self._build)

    def compile(
        self, grammar: tuple[str, bytes] | None, reasoning: ThoughtRules | None, tenant: str = ""
    ) -> Compilation:
        """Start to compile a grammar, or take it from the cache. ``Compilation.poll`` returns the result.

        Args:
            grammar: kind and content of the answer's grammar; None for free text after the reasoning.
            reasoning: rules of the reasoning before the answer; None if absent.
            tenant: tenant whose share of the compile workers and of their queue the compile uses.
        """
        spec = None if grammar is None else GrammarSpec(GrammarKind(grammar[0]), grammar[1])
        return Compilation(self._vocabulary(), spec, reasoning, tenant)

    def prepare(self, kind: str, content: bytes, tenant: str = "") -> None:
        """Compile a grammar in advance, unless ``MOST_AHEAD`` other compiles wait. A refusal is cached too."""
        spec = GrammarSpec(GrammarKind(kind), content)
        self._vocabulary().add_done_callback(partial(_compile_ahead, spec, tenant))

    def _vocabulary(self) -> Future[tuple[CompileService, MaskBuffer, Vocabulary]]:
        """Return the library's vocabulary. If memory was exhausted before, it is built again."""
        built = self._built
        if built.done() and not built.cancelled() and _lacks_memory(built.exception()):
            self._built = call_on(self._thread, self._build)
        return self._built

    def fill(self, jobs: Sequence[MaskJob]) -> Callable[[], Masks]:
        """Start to fill token masks. Returns a function that waits for them and returns them."""
        filling = self._thread.submit(self._fill, jobs)
        for job in jobs:
            job.matcher.lend(filling)
        return filling.result

    def stats(self) -> dict[str, float]:
        """Return counters and gauges of compiles, for metrics."""
        if (service := self._service) is None:
            return {}
        stats = service.stats
        return {
            "grammar_hits": stats.hits,
            "grammar_compiled": stats.compiled,
            "grammar_refused": stats.refused,
            "grammar_stopped": stats.stopped,
            "grammar_pending": stats.pending,
            "grammar_cached_bytes": stats.cached_bytes,
        }

    def take_observations(self) -> dict[str, list[float]]:
        """Return the seconds of each step's masks and of each compile since the last call."""
        if (service := self._service) is None:
            return {}
        mask_seconds, self._mask_seconds = self._mask_seconds, []
        return {"grammar_mask_seconds": mask_seconds, "grammar_compile_seconds": service.take_seconds()}

    def close(self) -> None:
        """End the thread and the child processes."""
        self._thread.shutdown()
        if (service := self._service) is not None:
            service.close()

    @property
    def _service(self) -> CompileService | None:
        """The compile service; None while it is being built, or if building it has failed."""
        is_built = self._built.done() and self._built.exception() is None
        return self._built.result()[0] if is_built else None

    def _fill(self, jobs: Sequence[MaskJob]) -> Masks:
        """Fill masks on the mask thread. If a matcher fails, only its row fails: its mask allows no token."""
        start = perf_counter()
        _, buffer, _ = self._built.result()
        lines: list[int] = []
        forced: list[int] = []
        checks: dict[int, TokenCheck] = {}
        buffer.fill_together(self._fills(jobs))
        for job in jobs:
            at, end = len(lines), len(lines) + len(job.drafts) + 1
            try:
                self._fill_job(buffer, at, job)
            except Exception as error:
                # An error of a library, or a bug, ends only this sequence.
                job.matcher.fail(error)
            if job.matcher.has_failed:
                buffer.words[at:end] = 0
            else:
                checks |= {row: buffer.checks[row] for row in range(at, end) if row in buffer.checks}
            for row in range(at, end):
                only = None if job.scored else buffer.forced(row)
                lines.append(job.line + row - at)
                forced.append(-1 if only is None else only)
        self._mask_seconds.append(perf_counter() - start)
        checks = {row: check for row, check in checks.items() if forced[row] < 0}
        return Masks(tuple(lines), buffer.words[: len(lines)], tuple(forced), checks)

    @staticmethod
    def _fills(jobs: Sequence[MaskJob]) -> list[MaskFill]:
        """Return the masks to fill for the matchers that have not failed, in the buffer rows that ``_fill`` expects."""
        rows = accumulate((len(job.drafts) + 1 for job in jobs), initial=0)
        return [
            MaskFill(row, job.matcher.lent, job.remaining, job.drafts)
            for row, job in zip(rows, jobs, strict=False)
            if not job.matcher.has_failed
        ]

    def _fill_job(self, buffer: MaskBuffer, at: int, job: MaskJob) -> None:
        """Fill the buffer rows of a job, from row ``at`` on."""
        if job.matcher.has_failed:
            return
        for error in buffer.fill([MaskFill(at, job.matcher.lent, job.remaining, job.drafts)]).values():
            if not isinstance(error, GrammarFailure):
                raise error
            job.matcher.explain(str(error))
        for early in range(min(job.num_early, len(job.drafts) + 1)):
            words, check = buffer.words[at + early], buffer.checks.get(at + early)
            _postpone(words, self._eos_ids, check)
            # Where no other token is left, a stop token may be drawn, but still no end token.
            if stops := job.late_ids.difference(self._eos_ids):
                _postpone(words, stops, check)


def _compile_ahead(
    spec: GrammarSpec, tenant: str, built: Future[tuple[CompileService, MaskBuffer, Vocabulary]]
) -> None:
    if built.cancelled() or built.exception() is not None:
        return
    service = built.result()[0]
    if service.stats.pending < MOST_AHEAD:
        with suppress(CompileQueueFull):
            service.compile(spec, tenant)


def _postpone(words: NDArray[np.int32], tokens: Iterable[int], check: TokenCheck | None) -> None:
    """Forbid tokens in a mask if it allows another token after which the answer can still end in time."""
    kept = words.view(np.uint32).copy()
    for token in tokens:
        if token < 32 * len(kept):
            kept[token // 32] &= ~np.uint32(1 << token % 32)
    if kept.any() if check is None else _may_go_on(kept, check):
        words[:] = kept.view(np.int32)


def _may_go_on(words: NDArray[np.uint32], check: TokenCheck) -> bool:
    """Return whether the answer can still end in time after one of these tokens, as far as this is known or tested."""
    if (words & check.known().view(np.uint32)).any():
        return True
    left = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    for _ in range(MOST_TESTED):
        if not len(left):
            return False
        token = int(left[0])
        if check.fits(token):
            return True
        left = np.setdiff1d(left, np.append(check.alike(token), token))
    return False


class Compilation:
    """A compile in progress."""

    def __init__(
        self,
        built: Future[tuple[CompileService, MaskBuffer, Vocabulary]],
        spec: GrammarSpec | None,
        reasoning: ThoughtRules | None,
        tenant: str = "",
    ) -> None:
        self._built = built
        self._spec = spec
        self._tenant = tenant
        self._reasoning = reasoning
        self._compiled: Future[CompiledGrammar] | None = None
        self._since = monotonic()

    def poll(self) -> AnswerMatcher | EngineError | None:
        """Return a matcher in the state before the first output token, or the error, or None while the compile runs."""
        if not self._built.done():
            return None
        try:
            if self._spec is None:
                return self._after_thought(None)
            if self._compiled is None:
                self._compiled = self._built.result()[0].compile(self._spec, self._tenant)
            if not self._compiled.done():
                return self._late()
            # The exception is not raised here. Raised, it would refer to this frame, and so to the future that refers
            # to it.
            error = self._compiled.exception()
            if isinstance(error, GrammarError):
                return GrammarRefused(error.keyword, error.pointer, error.reason)
            if isinstance(error, CompileUnavailable):
                return CapacityError(str(error))
            return self._after_thought(self._compiled.result().matcher())
        except CompileQueueFull:
            return CapacityError("Too many grammars are waiting to be compiled.")
        except Exception as error:
            # An error of a library, or a bug, fails only this request.
            if _lacks_memory(error):
                return CapacityError("The server has no memory for the grammar of this request now: try again later.")
            logger.error("A grammar could not be loaded; its request ends", exc_info=error)
            return ModelError(f"The grammar of this request could not be loaded: {type(error).__name__}.")

    def _late(self) -> CapacityError | None:
        """Return the error for a request that has waited too long, else None.

        The compile continues, for a later request.
        """
        if monotonic() - self._since < MOST_WAITED:
            return None
        return CapacityError(f"The grammar was not compiled within {MOST_WAITED:g} s, because the server is busy.")

    def _after_thought(self, matcher: Matcher | None) -> AnswerMatcher:
        """Return the matcher of an answer, or of the reasoning and the answer after it."""
        if self._reasoning is None:
            assert matcher is not None
            return matcher
        return ReasoningMatcher(self._built.result()[2], self._reasoning, matcher)


def _lacks_memory(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, NoThread) or is_out_of_memory(error))


def _build(
    texts: TokenTexts, eos_ids: tuple[int, ...], vocab_size: int, max_lines: int, num_threads: int
) -> tuple[CompileService, MaskBuffer, Vocabulary]:
    resources.check_room(_BUILD_BYTES * len(texts.lengths))
    bounds = accumulate(texts.lengths, initial=0)
    tokens = tuple(texts.data[start:end] for start, end in pairwise(bounds))
    vocabulary = Vocabulary(tokens[:vocab_size], frozenset(texts.special), eos_ids, vocab_size)
    _ = vocabulary.llguidance, ranks(vocabulary)
    return CompileService(vocabulary), MaskBuffer(max_lines, vocabulary, num_threads), vocabulary
