"""The tree of endings: what each sequence reads, against a plain walk over the endings."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.serving.ending_tree import EndingTree, num_distinct_tokens
from rootgraft.engine.types import MAX_LOGPROB_TOKEN_IDS

PROMPT = array("i", [5, 6, 7])
ENDINGS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=12)


def logprob(before: list[int], token: int) -> float:
    """A number that names one node and one child."""
    return -float(hash((*before, token)) % 1_000_003)


def read(tree: EndingTree) -> list[list[float]]:
    values = []
    for each in tree.reads:
        tokens = list(each.tokens)
        scored = [logprob(tokens[:at], tokens[at]) for at in range(each.scored_from, len(tokens))]
        values.append(scored + [logprob(tokens, target) for target in each.targets])
    return values


@given(ENDINGS)
def test_each_ending_gets_the_logprobs_of_its_own_tokens(endings: list[list[int]]):
    tree = EndingTree(PROMPT, endings)
    wanted = [[logprob([*PROMPT, *ending[:at]], token) for at, token in enumerate(ending)] for ending in endings]
    assert tree.by_token(read(tree)) == wanted
    assert tree.sums(read(tree)) == [sum(each) for each in wanted]


@given(ENDINGS)
def test_each_node_is_read_once_and_parents_come_first(endings: list[list[int]]):
    tree = EndingTree(PROMPT, endings)
    edges = {tuple(ending[: at + 1]) for ending in endings for at in range(len(ending))}
    inner = {tuple(ending[:at]) for ending in endings for at in range(len(ending))}
    reads: list[tuple[int, ...]] = []
    known = {()}
    for each in tree.reads:
        path = tuple(each.tokens[len(PROMPT) :])
        assert path[: each.scored_from - len(PROMPT)] in known
        reads += [path[: at - len(PROMPT) + 1] for at in range(each.scored_from, len(each.tokens))]
        reads += [(*path, target) for target in each.targets]
        known.update(reads)
        assert len(each.edges) == len(each.tokens) - each.scored_from + len(each.targets)
    assert sorted(reads) == sorted(edges)
    assert tree.num_path_tokens == len(inner) - 1


@given(ENDINGS)
def test_every_read_tells_how_many_of_its_tokens_are_a_label(endings: list[list[int]]):
    for each in EndingTree(PROMPT, endings).reads:
        assert each.tokens[: len(each.tokens) - each.params.num_label] == PROMPT


def test_labels_of_one_token_are_one_sequence():
    [only] = EndingTree(PROMPT, [[9], [8], [9]]).reads
    assert (only.tokens, only.targets, only.scored_from) == (PROMPT, (9, 8), len(PROMPT))


def test_more_children_than_a_sequence_may_name_are_read_by_several():
    most = MAX_LOGPROB_TOKEN_IDS
    for count, num_reads in ((most, 1), (most + 1, 2)):
        tree = EndingTree(PROMPT, [[token] for token in range(count)])
        assert len(tree.reads) == num_reads
        assert tree.sums(read(tree)) == [logprob(list(PROMPT), token) for token in range(count)]


@given(st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=6), max_size=12))
def test_distinct_tokens(prompts: list[list[int]]):
    nodes = {tuple(prompt[: at + 1]) for prompt in prompts for at in range(len(prompt))}
    assert num_distinct_tokens(array("i", prompt) for prompt in prompts) == len(nodes)


@pytest.mark.parametrize("start", [0, 1])
def test_a_request_asks_for_what_the_read_says(start: int):
    from rootgraft.engine.serving.request import RequestLimits, TextRequest
    from rootgraft.engine.types import SamplingParams

    tree = EndingTree(PROMPT, [[1, 2, 3]] if start else [[1], [2]])
    request = tree.reads[0].request(TextRequest(PROMPT, SamplingParams(), adapter="a"))
    params = RequestLimits(100, 100).check(request).params
    assert (request.adapter, params.max_tokens, params.temperature) == ("a", 1, 0.0)
    assert params.logprob_token_ids == ((3,) if start else (1, 2))
    assert (params.prompt_logprobs, params.logprob_start_len) == ((0, len(PROMPT)) if start else (None, 0))
