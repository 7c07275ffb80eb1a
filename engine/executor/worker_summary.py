"""Summary of a worker: lines for people about its model, KV pool, adapters and kernels."""

from __future__ import annotations

import torch

from ...kernels import ops
from ...kernels.layouts import kv_forms
from ..checkpoint.model_config import ModelShape
from ..config import EngineConfig
from ..kv_cache.state_cache import StateSlots
from ..loading.model_impl import notices
from ..machine.software import install_command
from ..models.decoder import DecoderModel
from ..models.kv_pool import KvPool
from ..models.model import Model
from .worker_plan import WorkerPlan


def summary_lines(
    config: EngineConfig, model: Model, plan: WorkerPlan, kv: KvPool, draft: str | None, seconds: tuple[float, float]
) -> tuple[str, ...]:
    """Return lines for people about the model, its KV pool and its kernels.

    Args:
        draft: the line about the draft model; None without one.
        seconds: seconds in which the weights were loaded, and seconds in which everything else was made.
    """
    kv_format = " of FP8" if kv.dtype is kv_forms.FLOAT8 else " of 8 bits" if kv_forms.has_scales(kv.dtype) else ""
    return (
        f"{_shape(model.config)}; {_number_formats(model, model.device)}; "
        f"loaded in {seconds[0]:.1f} s, warm after {seconds[1]:.1f} s more",
        f"KV pool: {kv.num_pages * kv.page_size:,} tokens{kv_format} "
        f"in pages of {kv.page_size} ({kv.num_pages * kv.page_bytes / 2**30:.2f} GiB); "
        f"context {plan.max_model_len:,}; up to {config.most_seqs} sequences and "
        f"{config.most_tokens:,} tokens a step",
        *([_ranks(config, model)] if config.num_ranks > 1 else []),
        *(
            [_kv_scales(model, kv.dtype)]
            if isinstance(model, DecoderModel) and model.kv_scales is not None and kv_format
            else []
        ),
        *([_states(plan.states, kv.state_bytes)] if plan.states else []),
        *([draft] if draft else []),
        *notices(model),
        *([f"Steps: {plan.steps}"] if plan.steps else []),
        *([_slots(config, plan.slot_bytes)] if config.enable_lora else []),
        _kernel_status(model.device),
    )


def _kv_scales(model: DecoderModel, dtype: torch.dtype) -> str:
    """Return the line that says whether KV of 8 bits uses the checkpoint's ``k_scale`` and ``v_scale``."""
    scales = list((model.kv_scales or {}).values())
    if used := sum(kv_forms.takes_static(dtype, each.form) for each in scales):
        return f"KV scales: static, the checkpoint's k_scale and v_scale of {used} layers"
    made_for = f", which are for --kv-cache-dtype {scales[0].form}," if scales else ""
    return (
        f"KV scales: the checkpoint's k_scale and v_scale{made_for} have no effect; each token and head has a scale of "
        "its own"
    )


def _ranks(config: EngineConfig, model: Model) -> str:
    library, width = "NCCL" if model.device.type == "cuda" else "gloo", config.tensor_parallel_size
    if (stages := config.pipeline_parallel_size) > 1:
        ranks = f"{stages} stages of {width} ranks" if width > 1 else f"{stages} ranks"
        return (
            f"Pipeline parallel: {ranks} over {library}; the layers and the KV pool above are those of the last stage"
        )
    return f"Tensor parallel: {width} ranks over {library}; the heads and the KV pool above are those of each rank"


def _shape(config: ModelShape) -> str:
    kv_heads = "1 KV head" if config.num_kv_heads == 1 else f"{config.num_kv_heads} KV heads"
    return (
        f"{config.family}: {config.num_layers} layers of {config.hidden_size}, "
        f"{config.num_heads} heads over {kv_heads}, vocabulary {config.vocab_size:,}"
    )


def _number_formats(model: Model, device: torch.device) -> str:
    """Describe the model's type and device, and the forms of quantised weights."""
    name = f"{str(model.dtype).removeprefix('torch.')} on {device}"
    packed = model.weights if isinstance(model, DecoderModel) else ()
    widened = f", {' and '.join(model.widened)} widened" if isinstance(model, DecoderModel) and model.widened else ""
    grouped = sorted({part.form.description for part in packed if isinstance(part, ops.GroupedLinear)})
    if grouped:
        return f"{name}, weights as stored: {' and '.join(grouped)}{widened}"
    quantised = [part for part in packed if isinstance(part, ops.QuantisedLinear)]
    if not quantised:
        return name + widened
    forms = {(part.format.description, part.widened and part.widened.few_rows) for part in quantised}
    described = " and ".join(
        form if few is None else f"{form} for steps of {'1 row' if few == 1 else f'up to {few} rows'}"
        for form, few in sorted(forms, key=str)
    )
    return f"{name}, weights in {described}{', else widened' if any(few for _, few in forms) else ''}{widened}"


def _slots(config: EngineConfig, slot_bytes: int) -> str:
    return (
        f"Adapters: {config.max_loras} slots up to rank {config.max_lora_rank} (at most {slot_bytes / 2**30:.2f} GiB); "
        f"up to {config.max_adapters:,} loaded"
    )


def _states(slots: StateSlots, state_bytes: int) -> str:
    return (
        f"Recurrent states: {slots.num_checkpoints:,} checkpoints of prefixes, one for every {slots.interval:,} "
        f"tokens, beside {slots.num_rows} of sequences ({slots.total * state_bytes / 2**30:.2f} GiB). "
        + (
            f"At most {slots.num_drafts} drafts in a step, each with the state before it"
            if slots.num_drafts
            else "Drafts are off: there is no memory for the states before them"
        )
    )


def _kernel_status(device: torch.device) -> str:
    """Return the line about kernels; if they lack only a compiler, it names the command that installs one."""
    if device.type != "cpu":
        return ops.triton_status(device)
    status = ops.native_status()
    return f"{status}. Try: {install_command('g++')}" if "no C++ compiler" in status else status
