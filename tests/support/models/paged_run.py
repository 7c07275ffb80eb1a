"""Drives a decoder through a paged KV pool, in any division of the tokens into steps."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.models.forward_inputs import ForwardInputs
from rootgraft.engine.models.kv_pool import KvPool
from rootgraft.engine.models.state_pool import StatePool
from rootgraft.kernels.state_ops import StateBatch

CPU = torch.device("cpu")


def pool(
    model: DecoderModel, num_pages: int, page_size: int, num_rows: int, dtype: torch.dtype | None = None
) -> KvPool:
    """A pool with a state for each row, where the model has states."""
    states = StatePool(model.config, num_rows + 1, model.dtype, model.device) if model.config.has_states else None
    return KvPool(model.config, num_pages, page_size, dtype or model.dtype, model.device, states)


def with_states(inputs: ForwardInputs, model: DecoderModel, rows: list[int], done: list[int]) -> ForwardInputs:
    """The inputs with the slots of these rows, of which so many tokens are computed, in a model with states."""
    if not model.config.has_states:
        return inputs
    slots = torch.tensor(rows, dtype=torch.int32)
    source = torch.where(torch.tensor(done) > 0, slots, -1).int()
    checkpoints = torch.full((len(inputs.token_ids),), -1, dtype=torch.int32)
    return replace(inputs, states=StateBatch(inputs.query_start, source, slots, checkpoints))


class PagedRun:
    """Sequences on random pages of a pool. ``step`` extends some of them and returns logits of each new token."""

    def __init__(
        self,
        model: DecoderModel,
        page_size: int,
        num_rows: int,
        max_len: int,
        seed: int = 0,
        offset: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        per_row = -(-max_len // page_size)
        self.model = model
        self.page_size = page_size
        self.offset = offset
        self.kv = pool(model, num_rows * per_row + 1, page_size, num_rows, kv_dtype)
        pages = list(range(num_rows * per_row + 1))
        random.Random(seed).shuffle(pages)
        self.table = torch.tensor(pages[: num_rows * per_row], dtype=torch.int32).view(num_rows, per_row)
        self.done = [0] * num_rows

    def step(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        """Compute the next tokens of the given rows together: row -> logits [len(chunk), V]."""
        logits = self.model.logits(self.forward(chunks))
        return dict(zip(chunks, torch.split(logits, [len(chunk) for chunk in chunks.values()]), strict=True))

    def forward(self, chunks: dict[int, list[int]]) -> Tensor:
        """The same up to the hidden states, side by side in the order of the rows."""
        rows = list(chunks)
        lengths = [len(chunks[row]) for row in rows]
        positions = [torch.arange(self.done[row], self.done[row] + len(chunks[row])) for row in rows]
        cells = [
            self.table[row].long()[place // self.page_size] * self.page_size + place % self.page_size
            for row, place in zip(rows, positions, strict=True)
        ]
        contexts = [self.done[row] + len(chunks[row]) for row in rows]
        inputs = ForwardInputs(
            token_ids=torch.tensor([token for row in rows for token in chunks[row]]),
            positions=torch.cat(positions) + self.offset,
            kv_loc=torch.cat(cells),
            page_table=self.table[rows],
            query_start=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
            context_len=torch.tensor(contexts, dtype=torch.int32),
            max_query=max(lengths),
            max_context=max(contexts),
        )
        inputs = with_states(inputs, self.model, rows, [self.done[row] for row in rows])
        for row, context in zip(rows, contexts, strict=True):
            self.done[row] = context
        return self.model.forward(inputs, self.kv)


def run_whole(model: DecoderModel, tokens: list[int], page_size: int = 16, offset: int = 0) -> Tensor:
    """Logits [T, V] of one prompt in one step, with an offset to its rows of the rotary tables."""
    return PagedRun(model, page_size, 1, len(tokens), offset=offset).step({0: tokens})[0]


def run_ragged(model: DecoderModel, prompts: list[list[int]], page_size: int, rng: random.Random) -> list[Tensor]:
    """Logits [T, V] of each prompt, computed in steps of random rows and random chunks."""
    run = PagedRun(model, page_size, len(prompts), max(map(len, prompts)), rng.randrange(1000))
    parts: list[list[Tensor]] = [[] for _ in prompts]
    while waiting := [row for row, prompt in enumerate(prompts) if run.done[row] < len(prompt)]:
        chosen = rng.sample(waiting, rng.randint(1, len(waiting)))
        chunks = {row: prompts[row][run.done[row] :][: rng.randint(1, 12)] for row in chosen}
        for row, logits in run.step(chunks).items():
            parts[row].append(logits)
    return [torch.cat(part) for part in parts]
