"""``Worker``: the device's side of the engine. It loads a model, plans its memory and runs batches on both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ...kernels.collectives import ALONE, Ranks
from ..batch import Batch, Masks, StepHandle, StepResult
from ..checkpoint.base_digest import base_digest
from ..checkpoint.read_config import open_checkpoint
from ..config import EngineConfig
from ..step_timer import StepTimer
from ..text.end_tokens import read_end_tokens
from .adapter_options import make_adapters
from .draft_worker import DraftWorker, measure_draft
from .gpu_memory import measure_steps, single_row
from .load_weights import Weights, load_weights, set_up_device
from .make_runner import make_kv_pool, make_runner
from .pool_pages import PoolPages
from .prompt_pooling import PromptPooling
from .rank_adapters import RankMirror
from .rank_pages import RankPages
from .worker_plan import plan_worker
from .worker_summary import summary_lines


@dataclass(slots=True)
class DeferredStep:
    """A step that is computed when its result is read: on a CPU an earlier launch would gain nothing."""

    compute: Callable[[Batch, Callable[[], Masks] | None], StepResult]
    batch: Batch
    masks: Callable[[], Masks] | None = None

    def draw(self, masks: Callable[[], Masks] | None) -> None:
        self.masks = masks

    def result(self) -> StepResult:
        return self.compute(self.batch, self.masks)


class Worker:
    """Loads a model and runs batches on it.

    Args:
        model_path: folder in Hugging Face format or GGUF file.
        step_timer: makes the timer of each step.
        weights: weights that are already loaded, with the same options; None to load them.
        ranks: the group of ranks that compute the model; each has its part. With several ranks, no step is planned
            ahead, because only rank 0 has the drawn tokens.
        mirror: the other ranks, on rank 0; None on the other ranks and for a single rank.

    Attributes:
        draft: the draft model; None without one.
        vocab_size: width of the logits.
        eos_ids: the tokens that end an answer, see ``read_end_tokens``.
        max_model_len: largest number of tokens of a sequence: the model's limit, or the pool's if that is smaller.
        states: slots of recurrent states; None for a model without.
        rope_switch: number of tokens beyond which all KV of a sequence changes; ``ENDLESS`` if no sequence gets that
            long.
        adapters: names, memory and slots of adapters; None without ``enable_lora``.
        overlaps: whether the device computes while the host continues; false on a CPU, whose kernels run on the
            engine's own thread.
        pooler: kinds of results other than tokens that the model has, such as embeddings and scores.
        base_digest: digest that distinguishes its weights from others.
        kv_pages: the pages of its pool.
        summary: lines for people about model, pool and kernels.

    Raises:
        ModelError: the model cannot be computed exactly.
        ConfigError: the options do not fit the model or the memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        step_timer: Callable[[], StepTimer] = StepTimer,
        *,
        weights: Weights | None = None,
        ranks: Ranks = ALONE,
        mirror: RankMirror | None = None,
    ) -> None:
        started = time.monotonic()
        device, is_dummy = set_up_device(config), config.load_format == "dummy"
        checkpoint, is_split = open_checkpoint(model_path), ranks.size > 1
        weights = load_weights(config, checkpoint, model_path, device, ranks) if weights is None else weights
        self.model = model = weights.model
        loaded = time.monotonic()
        self.adapters, slot_bytes = make_adapters(config, model, checkpoint, ranks, mirror)
        bank = self.adapters.bank if self.adapters else None
        self.overlaps = device.type == "cuda" and not is_split
        self.vocab_size, draft = model.config.vocab_size, weights.draft
        steps = None
        if device.type == "cuda":
            steps = measure_steps(model, config, bank, hidden=draft.hidden_pool if draft else None)
            of_draft_steps = measure_draft(config, draft, self.vocab_size) if draft else None
            steps = steps.beside(of_draft_steps) if steps and of_draft_steps else steps
        plan = plan_worker(config, weights, steps, slot_bytes)
        # All ranks take the smallest pool of any.
        if is_split:
            pages = replace(config, num_gpu_blocks_override=ranks.least(plan.num_pages))
            of_draft = plan.num_draft_pages
            plan = replace(plan_worker(pages, weights, steps, slot_bytes), num_draft_pages=of_draft)

        tokenizer = None if config.tokenizer is None else Path(config.tokenizer)
        self.eos_ids = read_end_tokens(model.config, model_path, tokenizer)
        self.pooler = weights.pooler(model_path)
        self.base_digest = base_digest(checkpoint, dummy=is_dummy)
        self.num_pages, self.states = plan.num_pages, plan.states
        self.max_model_len, self.rope_switch = plan.max_model_len, plan.rope_switch
        hidden = draft.hidden_pool(plan.num_pages, config.block_size) if draft else None
        self.draft: DraftWorker | None = None
        if draft:
            self.draft = DraftWorker(config, draft, plan.num_draft_pages, self.vocab_size, hidden)
        kv = make_kv_pool(config, model, plan, hidden)
        self.kv_pages: PoolPages | RankPages = PoolPages(config, model, kv)
        self._runner = make_runner(
            config,
            model,
            kv,
            max_model_len=plan.max_model_len,
            vocab_size=self.vocab_size,
            bank=bank,
            step_timer=step_timer,
            mirror=mirror,
            pooling=PromptPooling(self.pooler.modes, weights.dense(model_path)),
        )
        if ranks.rank == 0:
            self._runner.run(single_row(1, (0,)))  # the smallest step: no request waits for what first use sets up
        self.kv_pages.populate_ahead()
        seconds = loaded - started, time.monotonic() - loaded
        self.summary = summary_lines(config, model, plan, kv, self.draft.summary if self.draft else None, seconds)

    def launch(self, batch: Batch) -> StepHandle:
        """Start the forward pass of a step: see ``ModelRunner.launch``."""
        self.kv_pages.reach(batch)
        return self._runner.launch(batch) if self.overlaps else DeferredStep(self.compute, batch)

    def compute(self, batch: Batch, masks: Callable[[], Masks] | None = None) -> StepResult:
        """Compute a step and wait for its result: see ``ModelRunner.run``."""
        return self._runner.run(batch, masks)

    def free_memory(self) -> None:
        """Return to the GPU the memory that torch only caches."""
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """End other processes that compute the model: a single rank has none."""
