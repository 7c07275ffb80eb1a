"""``WorkerPlan``: the sizes of a worker's memory, computed before any of it is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...radix.namespace import ENDLESS
from ..config import EngineConfig
from ..kv_cache.state_cache import StateSlots
from ..models.decoder import DecoderModel
from ..models.kv_pool import bytes_per_page
from ..models.state_pool import state_bytes
from .device import choose_kv_dtype
from .draft_weights import draft_pages
from .gpu_memory import StepMemory
from .kv_budget import longest_sequence, pool_bytes, share_states
from .load_weights import Weights


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """The memory that a worker allocates for a model after its weights are loaded.

    Attributes:
        kv_dtype: number format of KV.
        page_bytes: bytes of a page of KV in all layers, and of the hidden states that a draft head reads.
        num_pages: number of pages of the KV pool.
        num_draft_pages: number of pages of the draft's KV pool, 0 without a draft.
        states: number of slots of recurrent states; None for a model without such states.
        max_model_len: largest number of tokens of a sequence: the model's limit, or the pool's if that is smaller.
        rope_switch: number of tokens beyond which all KV of a sequence changes; ``ENDLESS`` if no sequence gets that
            long.
        steps: memory of steps on a GPU; None if the size of the pool does not depend on it.
        slot_bytes: bytes of the adapter slots when they are full.
    """

    kv_dtype: torch.dtype
    page_bytes: int
    num_pages: int
    num_draft_pages: int
    states: StateSlots | None
    max_model_len: int
    rope_switch: int
    steps: StepMemory | None
    slot_bytes: int


def plan_worker(config: EngineConfig, weights: Weights, steps: StepMemory | None, slot_bytes: int) -> WorkerPlan:
    """Divide the memory that the weights leave between KV, recurrent states and the draft's KV.

    Args:
        steps, slot_bytes: as in ``WorkerPlan``.

    Raises:
        ConfigError: the options do not fit the model or the memory.
    """
    model, draft, size = weights.model, weights.draft, config.block_size
    kv_dtype = choose_kv_dtype(config, model.config, model.device, model.dtype)
    page_bytes = bytes_per_page(model.config, size, kv_dtype) + (draft.hidden_bytes(size) if draft else 0)
    num_bytes = pool_bytes(config, model.device, steps or StepMemory(), slot_bytes)
    num_draft_pages = 0
    if draft is not None:
        num_draft_pages, draft_bytes = draft_pages(config, num_bytes, page_bytes, draft)
        num_bytes -= draft_bytes
    states = None
    if isinstance(model, DecoderModel) and model.config.has_states:
        num_pages, states = share_states(config, num_bytes, page_bytes, state_bytes(model.config, model.dtype))
    else:
        num_pages = config.num_gpu_blocks_override or num_bytes // page_bytes
    return WorkerPlan(
        kv_dtype=kv_dtype,
        page_bytes=page_bytes,
        num_pages=num_pages,
        num_draft_pages=num_draft_pages,
        states=states,
        max_model_len=longest_sequence(config, model.config, num_pages, on_gpu=model.device.type == "cuda"),
        rope_switch=(model.config.rope_switch or ENDLESS) if model.long_offset else ENDLESS,
        steps=steps,
        slot_bytes=slot_bytes,
    )
