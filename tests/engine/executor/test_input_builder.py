from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.engine.batch import Batch, Row
from rootgraft.engine.executor.input_builder import InputBuilder


@given(seed=st.integers(0, 2**32), page_size=st.sampled_from([1, 4, 16]))
def test_tensors_say_what_the_rows_say(seed, page_size):
    """Sequences that grow over several steps, against a plain list of pages for each."""
    rng = random.Random(seed)
    builder = InputBuilder(6, 100, page_size, torch.device("cpu"))
    pages: dict[int, list[int]] = {row: [] for row in range(6)}
    computed = dict.fromkeys(range(6), 0)
    for _ in range(4):
        rows = []
        for row in rng.sample(range(6), rng.randint(1, 6)):
            count = rng.randint(1, 25)
            if rng.random() < 0.2:  # another sequence takes the row
                pages[row], computed[row] = [], 0
            if computed[row] + count > 100:
                continue
            first = len(pages[row])
            needed = -(-(computed[row] + count) // page_size)
            pages[row] += [rng.randrange(1000) for _ in range(needed - first)]
            tokens = [rng.randrange(50) for _ in range(count)]
            rows.append(Row(row, computed[row], tokens, first, tuple(pages[row][first:]), True, 0))
            computed[row] += count
        if not rows:
            continue
        inputs = builder.to_tensors(builder.build(Batch(tuple(rows))))
        assert inputs.token_ids.tolist() == [t for row in rows for t in row.tokens]
        positions = [row.start + i for row in rows for i in range(len(row.tokens))]
        assert inputs.positions.tolist() == positions
        owners = [row.row for row in rows for _ in row.tokens]
        assert inputs.kv_loc.tolist() == [
            pages[row][p // page_size] * page_size + p % page_size for row, p in zip(owners, positions, strict=True)
        ]
        assert inputs.context_len.tolist() == [row.start + len(row.tokens) for row in rows]
        assert inputs.max_query == max(len(row.tokens) for row in rows)
        assert inputs.max_context == max(inputs.context_len.tolist())
        assert inputs.query_start.diff().tolist() == [len(row.tokens) for row in rows]
        for i, row in enumerate(rows):
            used = -(-int(inputs.context_len[i]) // page_size)
            assert inputs.page_table[i, :used].tolist() == pages[row.row][:used]
