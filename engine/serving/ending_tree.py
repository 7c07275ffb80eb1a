"""Prefix tree of the endings of a prompt. The logprob of an ending is the sum of the logprobs along its path.

Endings with a common beginning share its tokens. Each inner node of the tree is computed once, at one position of one
sequence. That position gives the logprobs of all children of the node::

    prompt . [re -> {d, fund}] . [fund -> {ed, s}]
           . [gr -> {een, ay}]

Consecutive tokens without a branch form one sequence, and their logprobs are prompt logprobs. If a sequence continues
another one, the prefix cache supplies the KV of the shared tokens, in whichever step it was computed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ..types import MAX_LOGPROB_TOKEN_IDS, SamplingParams
from .output_processor import SequenceOutput
from .request import TextRequest


@dataclass(frozen=True, slots=True)
class EndingRead:
    """Sequence that is computed for the logprobs of its last tokens and of candidate tokens after it.

    Attributes:
        prompt: prompt of the tree.
        path: tokens between the prompt and the end of the sequence.
        scored_from: position of the first token of the sequence whose logprob is read; the sequence's length if no
            logprob is read.
        targets: tokens whose logprobs are read after the last token of the sequence.
        edges: numbers of the tree's edges whose logprobs are read: first the edges of ``tokens[scored_from:]``, then
            the edges of ``targets``.
    """

    prompt: array[int]
    path: array[int]
    scored_from: int
    targets: tuple[int, ...]
    edges: range

    @property
    def tokens(self) -> array[int]:
        """The prompt and the path.

        They are joined at each call, because the joined tokens of all reads may need much memory.
        """
        return self.prompt + self.path

    @property
    def params(self) -> SamplingParams:
        """Sampling parameters of the sequence. Its logprobs are used; the one token that it generates is discarded."""
        is_scored = self.scored_from < len(self.prompt) + len(self.path)
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            logprobs=0,
            logprob_token_ids=self.targets,
            prompt_logprobs=0 if is_scored else None,
            logprob_start_len=self.scored_from if is_scored else 0,
            num_label=len(self.path),
        )

    def request(self, base: TextRequest) -> TextRequest:
        """Return ``base`` with the tokens and parameters of this sequence."""
        return replace(base, tokens=self.tokens, params=self.params)

    def logprobs(self, output: SequenceOutput) -> list[float]:
        """Return the logprobs of ``edges`` from the output of the sequence."""
        [drawn] = output.logprobs
        return [each.logprob for each in output.prompt_logprobs] + [each.logprob for each in drawn.top]


class EndingTree:
    """Builds the prefix tree of a prompt's endings, and the sequences that compute their logprobs.

    Args:
        prompt: tokens of the prompt, at least one.
        endings: lists of at least one token each. Endings may be equal, and one ending may be a prefix of another.

    Attributes:
        reads: the sequences of the tree; parents come before their children.
        num_path_tokens: number of tokens that are computed after the prompt.
        num_label_tokens: number of tokens of all endings together.
    """

    def __init__(self, prompt: array[int], endings: Sequence[Sequence[int]]) -> None:
        self.reads: list[EndingRead] = []
        self.num_path_tokens = 0
        self.num_label_tokens = sum(map(len, endings))
        self._num_edges = 0
        self._paths: list[list[int]] = [[] for _ in endings]  # For each ending, the numbers of its edges.
        self._grow(prompt, endings)

    def sums(self, logprobs: Iterable[Sequence[float]]) -> list[float]:
        """Return the logprob of each ending, given the logprobs of each read (``EndingRead.logprobs``)."""
        return [math.fsum(each) for each in self.by_token(logprobs)]

    def by_token(self, logprobs: Iterable[Sequence[float]]) -> list[list[float]]:
        """Return the logprobs of each ending's tokens, given the logprobs of each read."""
        edges = [0.0] * self._num_edges
        for read, values in zip(self.reads, logprobs, strict=True):
            edges[read.edges.start : read.edges.stop] = values
        return [[edges[edge] for edge in path] for path in self._paths]

    def _grow(self, prompt: array[int], endings: Sequence[Sequence[int]]) -> None:
        """Build the reads from the root downwards."""
        # A node consists of the tokens between the prompt and the node, and the numbers of the endings that pass
        # through it.
        nodes = [(array("i"), list(range(len(endings))))]
        for before, group in nodes:
            path, first = before[:], self._num_edges
            while True:
                children = self._children(endings, group, len(path))
                longer = _longer(endings, next(iter(children.values())), len(path) + 1)
                if len(children) > 1 or not longer:
                    break
                path.append(next(iter(children)))
                group = longer
            self.num_path_tokens += len(path) - len(before) + bool(before)
            self._add_reads(prompt, path, len(prompt) + len(before), tuple(children), first)
            for token, going in children.items():
                if longer := _longer(endings, going, len(path) + 1):
                    nodes.append((path + array("i", [token]), longer))

    def _children(self, endings: Sequence[Sequence[int]], group: list[int], depth: int) -> dict[int, list[int]]:
        """Group the endings of a node by their next token, and give each of these tokens the number of a new edge."""
        children: dict[int, list[int]] = {}
        for each in group:
            children.setdefault(endings[each][depth], []).append(each)
        for number, going in enumerate(children.values(), self._num_edges):
            for each in going:
                self._paths[each].append(number)
        self._num_edges += len(children)
        return children

    def _add_reads(
        self, prompt: array[int], path: array[int], scored_from: int, targets: tuple[int, ...], first: int
    ) -> None:
        """Add the read of a path.

        If it has too many targets for one sequence, add further reads for the remaining targets.
        """
        end = len(prompt) + len(path)
        behind = first + end - scored_from
        for start in range(0, len(targets), MAX_LOGPROB_TOKEN_IDS):
            some = targets[start : start + MAX_LOGPROB_TOKEN_IDS]
            edges = range(behind + start if start else first, behind + start + len(some))
            self.reads.append(EndingRead(prompt, path, end if start else scored_from, some, edges))


def _longer(endings: Sequence[Sequence[int]], group: Sequence[int], length: int) -> list[int]:
    return [each for each in group if len(endings[each]) > length]


def num_distinct_tokens(prompts: Iterable[array[int]]) -> int:
    """Return the number of nodes in the prefix tree of these token lists.

    A prefix that several lists share counts once.
    """
    ordered = sorted(prompt.tobytes() for prompt in prompts)
    total, size = 0, array("i").itemsize
    for before, prompt in zip([b"", *ordered], ordered, strict=False):
        total += (len(prompt) - _num_shared(before, prompt) // size * size) // size
    return total


def _num_shared(first: bytes, second: bytes) -> int:
    """Return the length of the longest common prefix in bytes, by binary search."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == second[:middle] else (low, middle - 1)
    return low
