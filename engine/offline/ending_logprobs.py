"""Ending logprobs: computes the logprobs of trees of endings from the outputs of their reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..serving.ending_tree import EndingRead, EndingTree
from ..types import SamplingParams
from .request_inputs import Input
from .request_output import RequestOutput

WINDOW = 256
"""Number of reads that the engine has at a time. It is limited because each read holds its prompt in memory."""
Run = Callable[[Sequence[Input], Sequence[SamplingParams]], Sequence[RequestOutput]]


def read_trees(trees: Sequence[EndingTree], prompts: Sequence[Input], run: Run) -> list[list[list[float]]]:
    """Return the logprobs of each ending's tokens, for each tree.

    Args:
        prompts: prompt of each tree.
        run: computes requests.
    """
    reads = [(place, read) for place, tree in enumerate(trees) for read in tree.reads]
    # Parents are computed before their children, because parents have shorter paths. The children then find cached KV.
    order = sorted(range(len(reads)), key=lambda index: len(reads[index][1].path))
    values: dict[int, list[float]] = {}
    for begin in range(0, len(order), WINDOW):
        window = [(index, *reads[index]) for index in order[begin : begin + WINDOW]]
        inputs = [Input(read.tokens, None, prompts[at].salt, prompts[at].adapter) for _, at, read in window]
        outputs = run(inputs, [read.params for _, _, read in window])
        for (index, _, read), output in zip(window, outputs, strict=True):
            values[index] = read_logprobs(read, output)
    found = iter([values[index] for index in range(len(reads))])
    return [tree.by_token([next(found) for _ in tree.reads]) for tree in trees]


def read_logprobs(read: EndingRead, output: RequestOutput) -> list[float]:
    """Return the logprobs of ``read.edges`` from the output of the request with ``read.tokens``."""
    found = []
    scored = output.prompt_logprobs or []
    for token, scores in zip(output.prompt_token_ids[read.scored_from :], scored[read.scored_from :], strict=False):
        assert scores is not None
        found.append(scores[token].logprob)
    assert output.outputs[0].logprobs is not None
    [drawn] = output.outputs[0].logprobs
    return found + [drawn[target].logprob for target in read.targets]
