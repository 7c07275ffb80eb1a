"""Captured draws give the tokens of the CPU's sampler, on the GPU's kernels, which the interpreter runs.

A capture is played by keeping the pass: a replay runs it again, over the memory that it was captured with.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.models.paged_run import pool

from rootgraft.engine.batch import Batch, Masks, Row, RowResult, RowStart
from rootgraft.engine.executor.draw_graphs import DrawGraphs, DrawVariant, LineEdits, LineMasks, joined_masks
from rootgraft.engine.executor.input_builder import InputBuilder
from rootgraft.engine.executor.model_runner import ModelRunner
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.sampling.draft_verify import sampling_positions
from rootgraft.engine.sampling.sampler import Sampler
from rootgraft.engine.types import SamplingParams
from rootgraft.kernels.layouts.logit_edits import MOST_EDITS
from rootgraft.kernels.ops import use_native

ROWS, VOCAB, PAGE_SIZE = 6, 97, 4
CPU = torch.device("cpu")
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(top_p=0.7),
    SamplingParams(min_p=0.2),
    SamplingParams(top_n_sigma=1.0),
)


def keep(forward: Callable[[], None]) -> Callable[[], None]:
    return forward


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    """A model as small as can be."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    folder = tmp_path_factory.mktemp("smallest")
    (folder / "config.json").write_text(json.dumps(config))
    return load_model(folder, dtype=torch.float32, device=CPU, max_positions=64, dummy=True)


def compare_logprobs(found: RowResult, expected: RowResult) -> None:
    assert len(found.logprobs) == len(expected.logprobs)
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert (one.token, one.rank, len(one.top)) == (other.token, other.rank, len(other.top))
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
        values = [one.logprob, *(value for _, value in one.top)]
        assert values == pytest.approx([other.logprob, *(value for _, value in other.top)], abs=1e-5)


class Runner:
    """A runner that draws by graphs if it has any, and notes how often."""

    def __init__(self, model: DecoderModel, *, captured: bool) -> None:
        self.sampler = Sampler(ROWS, VOCAB, CPU)
        self.num_replays = 0
        inputs = InputBuilder(ROWS, 64, PAGE_SIZE, CPU)
        kv = pool(model, ROWS * 16, PAGE_SIZE, ROWS)
        draws = None
        if captured:
            assert self.sampler.table is not None
            draws = DrawGraphs(model, self.sampler.table, self.counted, ROWS + 2, model.config.vocab_size)
            draws.capture(draws.variants)
        self.num_replays = 0
        forward = lambda step: model.forward(inputs.to_tensors(step), kv)  # noqa: E731
        self.runner = ModelRunner(model, forward, kv, inputs, self.sampler, draws=draws)

    def counted(self, run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.num_replays += 1
            run()

        run()
        return replay

    def step(self, batch: Batch, masks: Masks | None = None) -> tuple[RowResult, ...]:
        return self.runner.run(batch, None if masks is None else lambda: masks).rows


def start(row: int, params: SamplingParams) -> RowStart:
    return RowStart(row, params, [3, row], 2, (), 1000 + row)


def prompt(row: int) -> Row:
    return Row(row, 0, [3, row], 0, tuple(range(16 * row, 16 * row + 2)), True, 0)


def later(row: int, generated: int, drafts: tuple[int, ...] = ()) -> Row:
    tokens = [7 + row, *drafts]
    return Row(row, 1 + generated, tokens, 0, (), True, generated, len(drafts))


def masks_of(*positions: int) -> Masks:
    """Every third token, another third at each position; the first of them forces its token."""
    words = np.zeros((len(positions), -(-VOCAB // 32)), np.int32)
    for line, position in enumerate(positions):
        bits = np.zeros(32 * words.shape[1], np.uint8)
        bits[position % 3 : VOCAB : 3] = 1
        words[line] = np.packbits(bits, bitorder="little").view(np.int32)
    return Masks(positions, words, (5, *(-1 for _ in positions[1:])))


@pytest.fixture
def both(model: DecoderModel, interpreted: None) -> Callable[..., Runner]:
    """Runs steps with graphs in the interpreter and without in the CPU's sampler, and compares what they draw."""
    use_native(False)
    plain = Runner(model, captured=False)
    use_native(True)
    captured = Runner(model, captured=True)

    def step(batch: Batch, masks: Masks | None = None) -> Runner:
        use_native(False)
        try:
            expected = plain.step(batch, masks)
        finally:
            use_native(True)
        found = captured.step(batch, masks)
        assert [each.tokens for each in found] == [each.tokens for each in expected]
        for one, other in zip(found, expected, strict=True):
            compare_logprobs(one, other)
        assert not any(each.failed for each in (*found, *expected))
        return captured

    return step


def test_any_mix_of_rows_draws_by_one_replay(both: Callable[..., Runner]) -> None:
    runner = both(Batch(tuple(prompt(row) for row in range(ROWS)), tuple(map(start, range(ROWS), KINDS))))
    assert runner.num_replays == 1
    for generated in (1, 2):
        runner = both(Batch(tuple(later(row, generated) for row in range(ROWS)[:: generated + 1])))
    assert runner.num_replays == 3


def test_masks_forced_tokens_and_drafts(both: Callable[..., Runner]) -> None:
    """Rows with a mask beside others, the first of which is forced, and a row with drafts."""
    runner = both(Batch(tuple(prompt(row) for row in range(3)), tuple(map(start, range(3), KINDS[1:]))), masks_of(0, 2))
    assert runner.num_replays == 1
    runner = both(Batch((later(0, 1, (4, 9)), later(1, 1), later(2, 1))), masks_of(1, 3))
    assert runner.num_replays == 2


def test_penalties_biases_and_bans(both: Callable[..., Runner]) -> None:
    """Of tokens that a prompt has, of generated ones and of drafts; beside masks and rows without."""
    kinds = (
        SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.3),
        SamplingParams(temperature=0.9, logit_bias=((3, 2.0), (8, -1.0)), min_tokens=3),
        SamplingParams(temperature=0.0, repetition_penalty=0.6, logit_bias=((7, 9.0),)),
        KINDS[1],
    )
    starts = tuple(RowStart(row, params, [3, row], 2, (7, 40), 1000 + row) for row, params in enumerate(kinds))
    runner = both(Batch(tuple(prompt(row) for row in range(4)), starts))
    runner = both(Batch((later(0, 1, (4, 9)), later(1, 1), later(2, 1), later(3, 1))), masks_of(1, 3))
    runner = both(Batch(tuple(later(row, 2) for row in range(4))))
    assert runner.num_replays == 3


def test_what_no_graph_does_is_drawn_op_by_op(both: Callable[..., Runner]) -> None:
    kinds = (
        SamplingParams(logprob_token_ids=(3, 5), logprobs=0),
        SamplingParams(allowed_logprobs=True),
    )
    for row, params in enumerate(kinds):
        runner = both(Batch((prompt(row), prompt(5)), (start(row, params), start(5, KINDS[1]))))
        assert runner.num_replays == row
        assert both(Batch((later(5, 1),))).num_replays == row + 1, "rows that end are not asked"


def test_logprobs_are_part_of_the_replay(both: Callable[..., Runner]) -> None:
    """Of raw logits: beside rows without, with penalties and masks, of drafts, and as many as a request may want."""
    kinds = (
        SamplingParams(logprobs=2),
        SamplingParams(temperature=0.0, logprobs=0, presence_penalty=1.0),
        SamplingParams(temperature=0.7, logprobs=20, logit_bias=((8, 3.0),)),
        KINDS[1],
    )
    runner = both(Batch(tuple(map(prompt, range(4))), tuple(map(start, range(4), kinds))))
    runner = both(Batch((later(0, 1, (4, 9)), later(1, 1), later(2, 1), later(3, 1))), masks_of(1, 3))
    runner = both(Batch((later(0, 4), later(3, 2))))
    assert runner.num_replays == 3


def test_allowed_tokens_are_a_mask_of_the_replay(both: Callable[..., Runner]) -> None:
    """Alone, with a mask of a grammar at the same position, and with penalties; beside bad words."""
    kinds = (
        SamplingParams(temperature=0.0, allowed_token_ids=(3, 5, 96)),
        SamplingParams(temperature=1.4, allowed_token_ids=tuple(range(40)), repetition_penalty=1.3),
        KINDS[1],
        SamplingParams(temperature=0.0, bad_words=((5,), (3, 7), *((a, a) for a in range(VOCAB)))),
    )
    runner = both(Batch(tuple(map(prompt, range(4))), tuple(map(start, range(4), kinds))))
    runner = both(Batch(tuple(later(row, 1) for row in range(4))), masks_of(2, 1))
    assert runner.num_replays == 2


def test_masks_of_one_line_allow_what_both_allow() -> None:
    masks = LineMasks(np.array([4, 1]), np.array([[0b0110], [0b0001]], np.int32))
    more = np.array([1, 2]), np.array([[0b0011], [0b1000]], np.int32)
    joined = joined_masks(masks, more)
    assert joined is not None
    assert dict(zip(joined.lines.tolist(), joined.words[:, 0].tolist(), strict=True)) == {1: 1, 2: 8, 4: 6}
    assert joined_masks(masks, None) is masks
    assert joined_masks(None, None) is None


def test_more_than_a_graph_has(model: DecoderModel, interpreted: None) -> None:
    sampler = Sampler(ROWS, VOCAB, CPU)
    assert sampler.table is not None
    draws = DrawGraphs(model, sampler.table, keep, 3, model.config.vocab_size)
    none, edits = LineEdits(), LineEdits(edits=np.zeros((2, 4), np.int32))
    assert not draws.holds(1, none), "none is captured"
    draws.capture([DrawVariant(4, True)])
    assert draws.holds(3, edits) and not draws.holds(3, none)
    assert not draws.holds(5, edits)
    assert not draws.holds(3, LineEdits(edits=np.zeros((MOST_EDITS + 2, 4), np.int32)))


def test_a_line_that_is_not_finite_fails_alone(model: DecoderModel, interpreted: None) -> None:
    """Even where its mask hides what is not."""
    sampler = Sampler(ROWS, VOCAB, CPU)
    assert sampler.table is not None
    sampler.start([start(row, KINDS[0]) for row in range(3)])
    draws = DrawGraphs(model, sampler.table, keep, 4, model.config.vocab_size)
    draws.capture([DrawVariant(4, True), DrawVariant(4, False)])
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    hidden[1] = torch.nan
    positions = sampling_positions([Row(row, 0, [1], 0, (), True, 0) for row in range(3)], {})
    index = np.array([0, 1, 4])
    found = [each.token for each in draws.draw(hidden, index, positions, LineEdits()).wait()]
    expected = model.logits(hidden[[0, 4]]).argmax(1).tolist()
    assert found == [expected[0], -1, expected[1]]
    words = masks_of(1, 2).words
    masks = LineMasks(np.array([1, 2]), words)
    found = [each.token for each in draws.draw(hidden, index, positions, LineEdits(masks)).wait()]
    assert found[:2] == [expected[0], -1] and found[2] % 3 == 2
