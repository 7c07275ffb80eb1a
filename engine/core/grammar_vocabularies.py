"""Grammar vocabularies: structured output over the model's vocabulary and those of adapters with own tokenizers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from ..batch import Masks
from ..errors import RequestError
from ..messages import Done, Failed, Message, PrepareGrammar, Submit, TokenTexts
from ..sequence.mask_jobs import MaskJob

if TYPE_CHECKING:
    from .structured_output import Compilation, StructuredOutputManager

MOST_VOCABULARIES = 4
"""Number of adapters' vocabularies whose compiled grammars are kept while no sequence uses them."""

OWN = ""
"""Key of the model's own vocabulary."""


class GrammarVocabularies:
    """Keeps a ``StructuredOutputManager`` for each vocabulary, and closes idle managers beyond a limit.

    Args:
        eos_ids: the model's end tokens.
        vocab_size: width of the model's logits.
        max_lines: largest number of sampling positions of a batch.
        overlaps: whether the device computes while the host continues, as in ``StructuredOutputManager``.
    """

    def __init__(self, eos_ids: tuple[int, ...], vocab_size: int, max_lines: int, *, overlaps: bool = False) -> None:
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._max_lines = max_lines
        self._overlaps = overlaps
        self._texts: dict[str, TokenTexts] = {}
        # The least recently used manager is the first one.
        self._managers: OrderedDict[str, StructuredOutputManager] = OrderedDict()
        # Closing a manager may wait for a thread or a child process, so another thread does it instead of the step
        # loop.
        self._closer = ThreadPoolExecutor(1, "grammar-ends")
        # The thread is started now, because later there may be no memory for it.
        self._closer.submit(int)
        # Vocabulary of each running or waiting sequence that does not use the model's own, by sequence id.
        self._users: dict[int, str] = {}

    def learn(self, texts: TokenTexts) -> None:
        """Store the bytes of a vocabulary's tokens. For the model's own vocabulary, the manager is built at once."""
        self._texts[texts.vocabulary] = texts
        if texts.vocabulary == OWN and self._ends(texts):
            self._manager(OWN)

    def forget(self, vocabulary: str) -> None:
        """Drop the bytes of a vocabulary. Its grammars are dropped when no sequence uses them any more."""
        self._texts.pop(vocabulary, None)
        self._close_idle()

    def compile(self, submit: Submit, vocab_size: int) -> Compilation:
        """Start to compile the grammar of a sequence.

        The vocabulary is kept until ``settle`` receives the sequence's end.

        Args:
            vocab_size: size of the adapter's own vocabulary, 0 for the model's.

        Raises:
            RequestError: the vocabulary has no end token, so no answer can be completed; or the vocabulary is not that
                of the adapter.
        """
        texts = self._texts.get(submit.vocabulary)
        is_own = submit.vocabulary == OWN and not vocab_size
        if texts is not None and not is_own and len(texts.lengths) > (vocab_size or self._vocab_size):
            raise RequestError(
                f"The adapter {submit.adapter!r} was replaced by one with another vocabulary: try again.", param="model"
            )
        if texts is None or not self._ends(texts):
            what = "cannot follow a grammar" if submit.grammar else "cannot have a thought with a budget"
            raise RequestError(f"This model has no end token, so its answers {what}.")
        if submit.vocabulary != OWN:
            self._users[submit.id] = submit.vocabulary
        compilation = self._manager(submit.vocabulary).compile(submit.grammar, submit.reasoning, submit.tenant)
        self._close_idle()
        return compilation

    def settle(self, messages: Iterable[Message]) -> None:
        """Remove the sequences that these messages end, and close managers that are not used any more."""
        if self._users:
            for message in messages:
                if isinstance(message, (Done, Failed)):
                    key = self._users.pop(message.id, OWN)
                    if key not in self._texts:
                        self._close_idle()

    def prepare(self, message: PrepareGrammar) -> None:
        """Compile a grammar in advance if the manager of its vocabulary exists."""
        if (manager := self._managers.get(message.vocabulary)) is not None:
            manager.prepare(message.kind, message.content, message.tenant)

    def fill(self, jobs: Seq[MaskJob]) -> Callable[[], Masks]:
        """Start to fill token masks. Returns a function that waits for them and returns them."""
        of_vocabulary: dict[str, list[MaskJob]] = {}
        for job in jobs:
            of_vocabulary.setdefault(job.vocabulary, []).append(job)
        waits = [self._managers[key].fill(group) for key, group in of_vocabulary.items()]
        return waits[0] if len(waits) == 1 else lambda: _joined([wait() for wait in waits])

    def stats(self) -> dict[str, float]:
        """Return the sums of all vocabularies' counters and gauges."""
        sums: Counter[str] = Counter()
        for manager in self._managers.values():
            sums.update(manager.stats())
        return dict(sums)

    def take_observations(self) -> dict[str, list[float]]:
        """Return the seconds of each step's masks and of each compile since the last call."""
        found: dict[str, list[float]] = {}
        for manager in self._managers.values():
            for name, seconds in manager.take_observations().items():
                found.setdefault(name, []).extend(seconds)
        return found

    def close(self) -> None:
        """End all threads and child processes."""
        for manager in self._managers.values():
            manager.close()
        self._closer.shutdown()

    def _ends(self, texts: TokenTexts) -> tuple[int, ...]:
        ends = dict.fromkeys((*texts.ends, *self._eos_ids))
        return tuple(token for token in ends if token < len(texts.lengths))

    def _manager(self, key: str) -> StructuredOutputManager:
        manager = self._managers.get(key)
        if manager is None:
            from .structured_output import StructuredOutputManager

            texts = self._texts[key]
            size = self._vocab_size if key == OWN else len(texts.lengths)
            ends = self._ends(texts)
            manager = StructuredOutputManager(texts, ends, size, self._max_lines, overlaps=self._overlaps)
            self._managers[key] = manager
        self._managers.move_to_end(key)
        return manager

    def _close_idle(self) -> None:
        in_use = {OWN, *self._users.values()}
        idle = [key for key in self._managers if key not in in_use]
        extra = idle[: max(0, len(self._managers) - 1 - MOST_VOCABULARIES)]
        for key in idle:
            if key in extra or key not in self._texts:
                self._closer.submit(self._managers.pop(key).close)


def _joined(parts: Seq[Masks]) -> Masks:
    """Join masks of different widths. A narrower mask allows no token beyond its vocabulary."""
    width = max(part.words.shape[1] for part in parts)
    words = np.concatenate([np.pad(part.words, ((0, 0), (0, width - part.words.shape[1]))) for part in parts])
    positions = tuple(position for part in parts for position in part.positions)
    forced = tuple(token for part in parts for token in part.forced)
    before = accumulate((len(part.positions) for part in parts), initial=0)
    checks = {start + at: each for start, part in zip(before, parts, strict=False) for at, each in part.checks.items()}
    return Masks(positions, words, forced, checks)
