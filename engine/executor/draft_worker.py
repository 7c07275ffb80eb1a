"""``DraftWorker``: the device's side of a draft model, with weights, KV pool and sampler of its own."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from ...kernels.device_memory import DeviceMemoryError, on_device
from ...kernels.ops import Largest, largest
from ...lora.lora_step import LoraStep
from ...lora.own.own_weights import OwnStep
from ..batch import Batch, Masks, StepResult
from ..checkpoint.model_config import ModelShape
from ..config import EngineConfig
from ..models.decoder import DecoderModel
from ..models.draft_head import DraftHead
from ..models.forward_inputs import ForwardInputs
from ..models.hidden_pool import HiddenPool
from ..models.kv_pool import KvPool
from ..models.model import Model
from ..speculation.model_drafter import most_tokens
from .cuda_graphs import padded_tokens
from .draft_weights import DraftModel
from .gpu_memory import StepMemory, measure_steps, single_row
from .head_inputs import HeadInputs
from .make_runner import make_runner


@dataclass(frozen=True, slots=True)
class TargetVocabulary:
    """A draft model whose logits are as wide as those of the model that it drafts for.

    Two models with the same tokenizer may have rows of logits of different widths, because they pad their vocabularies.
    A token that the draft model lacks has the logit -inf.
    """

    model: DecoderModel
    vocab_size: int

    @property
    def config(self) -> ModelShape:
        return self.model.config

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def max_positions(self) -> int:
        return self.model.max_positions

    @property
    def long_offset(self) -> int:
        return self.model.long_offset

    def forward(self, inputs: ForwardInputs, kv: KvPool) -> Tensor:
        """Return the hidden states of the kept tokens."""
        return self.model.forward(inputs, kv)

    def logits(self, hidden: Tensor, lora: LoraStep | None = None, own: OwnStep | None = None) -> Tensor:
        """Return the logits [S, vocab_size] fp32 of hidden states [S, H]."""
        logits = self.model.logits(hidden, lora, own)
        missing = self.vocab_size - logits.shape[1]
        return functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits

    def best(self, hidden: Tensor, lora: LoraStep | None = None, own: OwnStep | None = None) -> Largest:
        """Return the largest logit of each row."""
        if self.vocab_size < self.model.config.vocab_size:
            return largest(self.logits(hidden, lora, own))
        return self.model.best(hidden, lora, own)


def head_of(model: DecoderModel | DraftHead, vocab_size: int) -> Model:
    """Return the model that computes a draft's logits, as wide as those of the model for which it drafts."""
    return model if isinstance(model, DraftHead) else TargetVocabulary(model, vocab_size)


def draft_steps(config: EngineConfig) -> EngineConfig:
    """Return the options of a draft's own steps: few tokens, and one draw of each row."""
    rows = config.most_seqs
    return replace(
        config, max_num_seqs=rows, max_num_batched_tokens=most_tokens(rows), speculative_config='{"method": "off"}'
    )


def measure_draft(config: EngineConfig, draft: DraftModel, vocab_size: int) -> StepMemory | None:
    """Measure the memory of a draft's steps on a GPU, as ``measure_steps`` does for the model's steps.

    Args:
        vocab_size: number of logits, as in ``DraftWorker``.
    """
    config, model = draft_steps(config), draft.model
    if isinstance(model, DraftHead):
        like = torch.empty(0, model.config.hidden_size, dtype=model.dtype, device=model.device)
        model.states.reserve(padded_tokens(config.most_tokens), like)
    return measure_steps(model, config, None, head=head_of(model, vocab_size), vocab_size=vocab_size)


class DraftWorker:
    """Runs a draft model or head (``speculation.model_drafter.DraftRunner``).

    Args:
        config: options of the engine.
        draft: weights of the draft model or head.
        num_pages: number of pages of the draft's KV pool.
        vocab_size: number of logits of the model that it drafts for.
        hidden: pool of hidden states of that model; only for a head.

    Attributes:
        num_pages: number of pages of the draft's KV pool.
        max_model_len: largest number of tokens of a sequence.
        vocab_size: number of tokens in the vocabulary that it can read.
        base_digest: digest that distinguishes its weights from others.
        num_skipped: number of first tokens of a sequence that it does not read: 1 for a head, else 0.
        summary: one line that describes the draft, for people to read.
    """

    def __init__(
        self, config: EngineConfig, draft: DraftModel, num_pages: int, vocab_size: int, hidden: HiddenPool | None = None
    ) -> None:
        model = draft.model
        config = draft_steps(config)
        self.num_pages, self.base_digest, self.vocab_size = num_pages, draft.base_digest, model.config.vocab_size
        pool = (num_pages - 1) * config.block_size - 1
        self.max_model_len = min(model.max_positions, model.config.rope_switch or model.max_positions, pool)
        kv = KvPool(model.config, num_pages, config.block_size, model.dtype, model.device)
        self._head: HeadInputs | None = None
        if isinstance(model, DraftHead) and hidden is not None:
            model.states.reserve(padded_tokens(config.most_tokens), hidden.cells)
            self._head = HeadInputs(model.states, hidden, config.most_seqs, config.block_size)
        head = head_of(model, vocab_size)
        self._runner = make_runner(
            config, model, kv, max_model_len=self.max_model_len, vocab_size=vocab_size, head=head
        )
        self.num_skipped = int(self._head is not None)
        self._compute(single_row(1, (0,)), [(0,)], None)  # no request waits for what first use sets up
        shape = model.config
        kind = f"{shape.family}, {shape.num_layers} layers"
        if isinstance(model, DraftHead):
            kind = f"{model.kind}, a layer"
        self.summary = (
            f"Draft model: {kind} of {shape.hidden_size}; KV pool of "
            f"{num_pages * config.block_size:,} tokens ({num_pages * kv.page_bytes / 2**30:.2f} GiB)"
        )

    def run(self, batch: Batch, pages: Seq[Seq[int]], masks: Callable[[], Masks] | None = None) -> StepResult | None:
        """Compute a step; see ``DraftRunner.run``."""
        try:
            return on_device(self._compute, batch, pages, masks)
        except DeviceMemoryError:
            return None

    def _compute(self, batch: Batch, pages: Seq[Seq[int]], masks: Callable[[], Masks] | None) -> StepResult:
        if self._head is None:
            return self._runner.run(batch, masks)
        self._head.give(batch, pages)
        result = self._runner.run(batch, masks)
        self._head.keep(batch)
        return result
