"""Messages of rank 0 to its followers: what a forward pass reads comes back as it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.batch import Batch, PageCopy, PageLoad, Row, RowStart, StateLoad
from rootgraft.engine.executor.adapter_messages import pack_adapter, unpack_adapter
from rootgraft.engine.executor.rank_messages import pack_batch, unpack_batch
from rootgraft.engine.types import SamplingParams
from rootgraft.kernels.lora_ops import Factors, pack_expansion
from rootgraft.lora.prepare_factors import PreparedAdapter, join_factors

small = st.integers(0, 1 << 20)
tokens = st.lists(st.integers(0, 1 << 31), min_size=1, max_size=9)
starts = st.builds(
    lambda row, slot, first, is_long, state: RowStart(
        row, SamplingParams(temperature=0.7), [1, 2], 2, (3,), 9, slot, first, is_long, state
    ),
    small, st.integers(-1, 9), small, st.booleans(), st.integers(-1, 9),
)  # fmt: skip


@st.composite
def rows(draw: st.DrawFn) -> Row:
    chunk, draws = draw(tokens), draw(st.booleans())
    drafts = draw(st.integers(0, len(chunk) - 1)) if draws else 0
    pages, targets = tuple(draw(st.lists(small, max_size=4))), draw(st.lists(small, max_size=5))
    pooled, saved = draw(st.integers(0, len(chunk))), tuple(draw(st.lists(st.tuples(small, small), max_size=3)))
    return Row(
        draw(small), draw(small), chunk, draw(small), pages, draws, draw(small), drafts, targets, saved,
        draw(st.integers(-1, 9)), pooled,
    )  # fmt: skip


copies = st.lists(st.builds(PageCopy, small, small, small), max_size=3)


@given(st.lists(rows(), min_size=1, max_size=5), st.lists(starts, max_size=3), copies)
def test_a_follower_reads_the_same_pass(rows: list[Row], starts: list[RowStart], copies: list[PageCopy]) -> None:
    batch = Batch(tuple(rows), tuple(starts), tuple(copies))
    found = unpack_batch(pack_batch(batch))
    assert found.copies == batch.copies
    assert [pass_of(row) for row in found.rows] == [pass_of(row) for row in rows]
    assert [of_start(each) for each in found.starts] == [of_start(each) for each in starts]


def of_start(start: RowStart) -> tuple[int, ...]:
    return start.row, start.slot, start.adapted_from, start.is_long, start.state


def pass_of(row: Row) -> tuple[object, ...]:
    return (
        row.row, row.start, list(row.tokens), row.first_new_page, row.new_pages, row.num_positions,
        len(row.prompt_targets), row.num_kept, row.checkpoints, row.state,
    )  # fmt: skip


def test_nothing_private_is_told() -> None:
    """The tokens of a sequence that are in the pool, and its parameters, stay with rank 0."""
    start = RowStart(0, SamplingParams(), list(range(5000)), 5000, (), 0)
    row = Row(0, 4999, [7], 312, (9,), draws=True, num_generated=0)
    assert len(pack_batch(Batch((row,), (start,)))) < 200


def test_pages_from_elsewhere_come_with_their_bytes_in_order() -> None:
    row = Row(0, 4999, [7], 312, (9,), draws=True, num_generated=0)
    copies = (PageLoad(1, b"xyz"), PageCopy(1, 2, 3), StateLoad(4, b""), PageLoad(5, memoryview(b"uv")))
    found = unpack_batch(pack_batch(Batch((row,), (), copies)))
    assert found.copies == copies and found.rows == (replace(row, num_generated=0),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_comes_back_bit_by_bit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    fused = Factors(
        random(5, 8).to(dtype),
        random(5),
        (2, 0, 3),
        torch.cat([pack_expansion(random(70, 2).to(dtype)), pack_expansion(random(6, 3).to(dtype))]),
        gain=random(80),
    )
    down = Factors(random(2, 6).to(dtype), random(2), (2,), pack_expansion(random(9, 2).to(dtype)), add=random(9))
    block, factors = join_factors({"q": fused, "down": down}, pinned=False)
    sent = PreparedAdapter(factors, "d" * 32, (7,), 3, block.nbytes, block)
    slot, found = unpack_adapter(pack_adapter(6, sent), pinned=False)
    assert (slot, found.digest, found.factors.keys()) == (6, sent.digest, factors.keys())
    for name, part in factors.items():
        other = found.factors[name]
        assert other.ranks == part.ranks
        for ours, theirs in zip(part.tensors(), other.tensors(), strict=True):
            assert ours.dtype is theirs.dtype and torch.equal(ours, theirs)
        assert (other.gain is None, other.add is None) == (part.gain is None, part.add is None)
    assert unpack_adapter(pack_adapter(0, replace(sent, factors={}, block=block[:0])), pinned=False)[1].factors == {}
