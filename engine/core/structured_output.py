"""The grammars of running sequences: compiled in other processes, masked on another thread. Needs ``llguidance``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, pairwise
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from ...grammar.compile.compile_service import CompileQueueFull, CompileService
from ...grammar.compile.compiled_grammar import CompiledGrammar
from ...grammar.errors import GrammarError
from ...grammar.match.closing_texts import ranks
from ...grammar.match.mask_buffer import MaskBuffer, MaskFill
from ...grammar.match.matcher import Matcher
from ...grammar.spec import GrammarKind, GrammarSpec
from ...grammar.vocabulary import Vocabulary
from ..batch import Masks
from ..errors import CapacityError, EngineError, GrammarRefused
from ..messages import TokenTexts
from ..sequence.sequence import MaskJob


class StructuredOutputManager:
    """Compiles grammars and fills the masks of a step while the forward pass runs.

    Building the library's view of the vocabulary takes a second, so it is done on the mask thread: nobody waits for
    it but the first request with a grammar.

    Args:
        texts: the vocabulary as bytes.
        eos_ids: the model's end tokens, at least one.
        vocab_size: width of the logits, which may be padded beyond the vocabulary.
        max_lines: places of a batch at which tokens are drawn, at most.
    """

    def __init__(self, texts: TokenTexts, eos_ids: tuple[int, ...], vocab_size: int, max_lines: int) -> None:
        self._eos_ids = eos_ids
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._mask_seconds: list[float] = []
        self._built = self._thread.submit(_build, texts, eos_ids, vocab_size, max_lines)

    def compile(self, kind: str, content: bytes) -> Compilation:
        """Begin to compile, or find it done already. The result is polled: ``Compilation.poll``."""
        return Compilation(self._built, GrammarSpec(GrammarKind(kind), content))

    def fill(self, jobs: Sequence[MaskJob]) -> Callable[[], Masks]:
        """Begin to fill masks; the call that is returned waits for them."""
        pending = self._thread.submit(self._fill, jobs)
        return pending.result

    def stats(self) -> dict[str, float]:
        """Counters and gauges of the compiles, for metrics."""
        if not self._built.done():
            return {}
        stats = self._built.result()[0].stats
        return {
            "grammar_hits": stats.hits,
            "grammar_compiled": stats.compiled,
            "grammar_refused": stats.refused,
            "grammar_stopped": stats.stopped,
            "grammar_pending": stats.pending,
            "grammar_cached_bytes": stats.cached_bytes,
        }

    def take_observations(self) -> dict[str, list[float]]:
        """Seconds that the masks of each step took, and each compile, since the last call."""
        if not self._built.done():
            return {}
        taken, self._mask_seconds = self._mask_seconds, []
        return {"grammar_mask_seconds": taken, "grammar_compile_seconds": self._built.result()[0].take_seconds()}

    def close(self) -> None:
        """End threads and child processes."""
        service, _ = self._built.result()
        service.close()
        self._thread.shutdown()

    def _fill(self, jobs: Sequence[MaskJob]) -> Masks:
        """A row whose matcher fails is left without a single token, and so fails in the sampler, alone."""
        start = perf_counter()
        _, buffer = self._built.result()
        starts = list(accumulate((len(job.drafts) + 1 for job in jobs), initial=0))
        buffer.fill(
            [MaskFill(at, job.matcher, job.remaining, job.drafts) for at, job in zip(starts, jobs, strict=False)]
        )
        lines: list[int] = []
        forced: list[int] = []
        for at, job in zip(starts, jobs, strict=False):
            for early in range(min(job.num_early, len(job.drafts) + 1)):
                _postpone_end(buffer.words[at + early], self._eos_ids)
            for ahead in range(len(job.drafts) + 1):
                only = None if job.scored else buffer.forced(at + ahead)
                lines.append(job.line + ahead)
                forced.append(-1 if only is None else only)
        self._mask_seconds.append(perf_counter() - start)
        return Masks(tuple(lines), buffer.words[: starts[-1]], tuple(forced))


def _postpone_end(words: NDArray[np.int32], eos_ids: tuple[int, ...]) -> None:
    """Forbid the end tokens in a mask that allows anything else."""
    kept = words.view(np.uint32).copy()
    for token in eos_ids:
        kept[token // 32] &= ~np.uint32(1 << token % 32)
    if kept.any():
        words[:] = kept.view(np.int32)


class Compilation:
    """A compile under way."""

    def __init__(self, built: Future[tuple[CompileService, MaskBuffer]], spec: GrammarSpec) -> None:
        self._built = built
        self._spec = spec
        self._compiled: Future[CompiledGrammar] | None = None

    def poll(self) -> Matcher | EngineError | None:
        """A matcher at the beginning of an answer, or why there is none, or None while the compile goes on."""
        if not self._built.done():
            return None
        try:
            if self._compiled is None:
                self._compiled = self._built.result()[0].compile(self._spec)
            if not self._compiled.done():
                return None
            # Asked for, not raised: the exception would keep this frame, and with it the future that keeps it.
            error = self._compiled.exception()
            if isinstance(error, GrammarError):
                return GrammarRefused(error.keyword, error.pointer, error.reason)
            return self._compiled.result().matcher()
        except CompileQueueFull:
            return CapacityError("Too many grammars wait to be compiled.")


def _build(
    texts: TokenTexts, eos_ids: tuple[int, ...], vocab_size: int, max_lines: int
) -> tuple[CompileService, MaskBuffer]:
    bounds = accumulate(texts.lengths, initial=0)
    tokens = tuple(texts.data[start:end] for start, end in pairwise(bounds))
    vocabulary = Vocabulary(tokens[:vocab_size], frozenset(texts.special), eos_ids, vocab_size)
    _ = vocabulary.llguidance, ranks(vocabulary)
    return CompileService(vocabulary), MaskBuffer(max_lines, vocabulary)
