"""Logprobs of allowed tokens: of raw logits under the mask, whatever penalties, temperature and drafts there are."""

from __future__ import annotations

import numpy as np
import torch

from rootgraft.engine.batch import Row, RowStart
from rootgraft.engine.sampling.draft_verify import sampling_positions
from rootgraft.engine.sampling.sampler import DeviceMasks, Sampler
from rootgraft.engine.types import MAX_ALLOWED_LOGPROBS, AllowedLogprobs, SamplingParams


def words_of(masks: list[list[int]], vocab: int) -> torch.Tensor:
    bits = np.zeros((len(masks), -(-vocab // 32) * 32), dtype=np.bool_)
    for line, tokens in zip(bits, masks, strict=True):
        line[tokens] = True
    return torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))


def check(allowed: AllowedLogprobs, logits: torch.Tensor, mask: list[int]) -> None:
    kept = logits[mask].double().log_softmax(0)
    wanted = dict(zip(mask, kept.tolist(), strict=True))
    ids, values = np.frombuffer(allowed.ids, np.int32).tolist(), np.frombuffer(allowed.logprobs, np.float32)
    assert len(ids) == min(len(mask), MAX_ALLOWED_LOGPROBS) == len(set(ids))
    np.testing.assert_allclose(np.exp(values), np.exp([wanted[token] for token in ids]), atol=1e-7)
    assert set(ids) == set(sorted(mask, key=lambda token: -wanted[token])[: len(ids)])


def test_rows_with_and_without():
    """Beside a row that wants none and one without a mask; drafts have a record for each accepted token."""
    vocab = 5000
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1)) * 3
    masks = [[3, 9, 4999], list(range(7, 5000, 2)), [5, 6], [8]]
    options = {"temperature": 0.7, "presence_penalty": 2.0, "top_k": 3, "logit_bias": ((3, 90.0),)}
    sampler = Sampler(4, vocab, torch.device("cpu"))
    wants = SamplingParams(allowed_logprobs=True, **options)
    starts = [RowStart(row, wants, [1, 2], 1, (), row) for row in range(3)]
    sampler.start([*starts, RowStart(3, SamplingParams(**options), [1, 2], 1, (), 3)])
    draft = 9999 % vocab
    rows = [Row(0, 0, [1, 3], 0, (), True, 1, num_drafts=1), *(Row(row, 0, [1], 0, (), True, 1) for row in (1, 2, 3))]
    before = logits.clone()
    positions = sampling_positions(rows, {})
    device = DeviceMasks(torch.tensor([0, 1, 2, 4]), words_of(masks, vocab))
    drafted, wide, free, none = sampler.collect(sampler.draw(logits, positions, device))
    assert drafted.tokens[0] == 3 and len(drafted.tokens) == 2, draft
    check(drafted.allowed[0], before[0], masks[0])
    check(drafted.allowed[1], before[1], masks[1])
    check(wide.allowed[0], before[2], masks[2])
    assert [each.token for each in drafted.allowed] == list(drafted.tokens)
    assert free.allowed == (AllowedLogprobs(free.tokens[0], b"", b""),)
    assert none.allowed == ()


def test_a_row_is_forgotten_with_its_sequence():
    sampler = Sampler(1, 64, torch.device("cpu"))
    for wants in (True, False):
        sampler.start([RowStart(0, SamplingParams(allowed_logprobs=wants), [1], 1, (), 3)])
        positions = sampling_positions([Row(0, 0, [1], 0, (), True, 0)], {})
        masks = DeviceMasks(torch.tensor([0]), words_of([[1, 2]], 64))
        [result] = sampler.collect(sampler.draw(torch.zeros(1, 64), positions, masks))
        assert bool(result.allowed) is wants
