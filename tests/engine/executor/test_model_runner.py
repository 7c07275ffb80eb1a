"""On a GPU a step is waited for once, and only when the next one is launched: seen on torch's device without memory,
which has no values.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.engine.sampler_oracle import Request, packed, step
from support.kernels.meta_gpu import GPU, posing_gpu
from torch.utils._python_dispatch import TorchDispatchMode

from rootgraft.engine.batch import Batch, Row, RowStart, placeholder_token
from rootgraft.engine.executor.input_builder import HostInputs, InputBuilder
from rootgraft.engine.executor.model_runner import ModelRunner
from rootgraft.engine.executor.static_inputs import StaticInputs
from rootgraft.engine.sampling.draft_verify import sampling_positions
from rootgraft.engine.sampling.sampler import Drawing, Sampler
from rootgraft.engine.types import SamplingParams
from rootgraft.kernels import backend

VOCAB = 200
REQUESTS = {
    "greedy": SamplingParams(temperature=0),
    "any": SamplingParams(),
    "min_p": SamplingParams(min_p=0.1),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.9),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5),
    "bias": SamplingParams(logit_bias=((3, 1.0),)),
    "min_tokens": SamplingParams(min_tokens=3),
    "logprobs": SamplingParams(logprobs=5),
}


class Watch(TorchDispatchMode):
    """Counts copies for which the host would wait."""

    waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") not in (None, args[0].device):
            self.waits += not kwargs.get("non_blocking")
        return func(*args, **kwargs)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shapes of what was read by ``tolist``, the one way in which results are read."""
    shapes = []

    def tolist(tensor: torch.Tensor) -> Any:
        shapes.append(tensor.shape)
        return np.zeros(tensor.shape, np.int64 if tensor.dtype is torch.int64 else np.float64).tolist()

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    return shapes


def draw(requests: list[Request]) -> tuple[Sampler, Drawing]:
    """A step of these requests on the device; whatever would ask it for a value raises, but for ``tolist``."""
    sampler = Sampler(len(requests), VOCAB, GPU)
    sampler.start([request.start(row) for row, request in enumerate(requests)])
    masks = packed([request.allowed for request in requests], VOCAB)
    if masks is not None:
        masks = type(masks)(masks.positions.to(GPU, non_blocking=True), masks.words.to(GPU, non_blocking=True))
    logits = torch.empty(len(requests), VOCAB, device=GPU)
    rows = [step(row, 0) for row in range(len(requests))]
    return sampler, sampler.draw(logits, sampling_positions(rows, {}), masks)


@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("name", [*REQUESTS, "mask", "all"])
def test_a_step_reads_once_and_waits_for_nothing_else(name, with_kernels, reads, monkeypatch):
    """With the kernels that draw tokens and apply masks, and in plain torch, which sorts whole rows."""
    only_even = tuple(token % 2 == 0 for token in range(VOCAB))
    requests = [
        Request(params, (1, 2), stops=(5,), seed=seed, allowed=only_even if each == "mask" else None)
        for seed, (each, params) in enumerate([*REQUESTS.items(), ("mask", SamplingParams(temperature=0))])
        if name in (each, "all")
    ]
    monkeypatch.setattr(backend.LIBRARY, "enabled", with_kernels)
    with posing_gpu() as launched, Watch() as watch:
        sampler, drawing = draw(requests)
    assert not reads
    assert len(sampler.collect(drawing)) == len(requests)
    assert len(reads) == 1
    assert watch.waits == 0
    assert ("_draw" in launched) == with_kernels
    assert ("_mask" in launched) == (with_kernels and name in ("mask", "all"))


HIDDEN, ROWS = 8, 3


def runner(*, captured: bool) -> ModelRunner:
    """A runner on the device, whose forward pass only takes its inputs to it, or to where a captured one reads them."""
    inputs = InputBuilder(ROWS, 64, 16, GPU)
    room = StaticInputs(8, ROWS, 4, GPU)

    def forward(step: HostInputs) -> torch.Tensor:
        placed = room.inputs(8, ROWS, 8, 64) if captured else inputs.to_tensors(step)
        if captured:
            room.fill(step)
        assert placed.token_ids.device == GPU
        return torch.empty(step.num_tokens, HIDDEN, device=GPU)

    model: Any = SimpleNamespace(
        device=GPU,
        config=SimpleNamespace(vocab_size=VOCAB),
        logits=lambda hidden, lora, own: torch.empty(len(hidden), VOCAB, device=GPU),
    )
    pool: Any = SimpleNamespace(copy=lambda copies: None)
    return ModelRunner(model, forward, pool, inputs, Sampler(ROWS, VOCAB, GPU))


@pytest.mark.parametrize("captured", [False, True])
def test_a_step_is_launched_on_tokens_that_nobody_has_read(captured, reads):
    """Prompts, one of them scored, then two steps planned ahead: each is read when the next one has been launched."""
    with posing_gpu():
        mine = runner(captured=captured)
    params = [SamplingParams(temperature=0), SamplingParams(top_k=5, logprobs=2), SamplingParams(prompt_logprobs=1)]
    starts = tuple(RowStart(i, each, [1, 2], 2, (5,), i) for i, each in enumerate(params))
    prompts = [Row(i, 0, [1, 2], 0, (i,), True, 0, prompt_targets=[2] if i == 2 else ()) for i in range(ROWS)]
    ahead = [tuple(Row(i, n + 1, [placeholder_token(i)], 1, (), True, n) for i in range(ROWS)) for n in (1, 2)]
    with posing_gpu() as launched, Watch() as watch:
        step = mine.launch(Batch(tuple(prompts), starts))
        step.draw(None)
        for number, rows in enumerate(ahead):
            following = mine.launch(Batch(rows))
            assert len(reads) == number + (number > 0), "one read a step, and one of the prompt's scores"
            assert len(step.result().rows) == ROWS
            step = following
            step.draw(None)
        assert len(step.result().rows) == ROWS
    assert watch.waits == 0
    assert len(reads) == 4
    assert launched.count("_draw") == 3, "one launch draws for all rows of a step"
