"""Load a model of the transformers library: its own class and its own loader, checked before it serves."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ....lora.base_projections import in_tower
from ...checkpoint.families.library_classes import LIBRARY_CLASSES
from ...checkpoint.safetensors_files import shard_names
from ...errors import ModelError, shortened
from .adapted_modules import adapted_modules, observed_rows
from .attention_calls import RECORDED, AttentionCall, recorded_calls
from .exactness_check import NUM_TOKENS, check_exactness
from .packed_modules import pack
from .paged_attention import PAGED, CurrentStep, attach_layers
from .transformers_config import LibraryModel, TransformersConfig, end_tokens, read_library_model
from .transformers_model import GivenHidden, TransformersModel

_SEED = 0  # seed of random weights, and of the tokens of the check
_PROBED = 7  # tokens of the pass whose calls are recorded


def load_transformers_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int | None = None,
    dummy: bool = False,
) -> TransformersModel:
    """Load a folder in Hugging Face format with the class of ``transformers`` that its configuration names.

    Logits of random prompts over pages of KV are compared with those that the class computes by its own attention.

    Args:
        dtype: type of weights and hidden states.
        max_positions: length of the longest sequence; the model's own maximum by default.
        dummy: whether to use random weights in the model's shape.

    Raises:
        ModelError: the library has no such model, its files are malformed, or it cannot be computed exactly.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    found = read_library_model(folder)
    model = _random(found, dtype) if dummy else _load(folder, found, dtype)
    model = model.to(device).eval().requires_grad_(False)
    try:
        return _assemble(folder, found, model, dtype, min(max_positions or found.longest, found.longest))
    except ModelError as error:
        raise ModelError(f"{found.name}: {error}" if found.name not in str(error) else str(error)) from error
    except Exception as error:
        # The model's own code was not written for these calls and may raise anything.
        reason = shortened(f"{type(error).__name__}: {error}", 300)
        raise ModelError(f"{found.name} of transformers cannot be computed over pages of KV: {reason}") from error


def _load(folder: Path, found: LibraryModel, dtype: torch.dtype) -> Any:
    """Load the weights. Each stored weight must be one of the class's, and none may be missing."""
    # This call refuses pickles.
    shard_names(folder)
    try:
        model, info = found.model_class.from_pretrained(
            folder,
            config=found.config,
            dtype=dtype,
            attn_implementation="eager",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(f"{found.name} of transformers does not load: {shortened(str(error), 300)}") from error
    for fault in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(name for name in map(str, info.get(fault) or ()) if not in_tower(name, found.towers))
        if names:
            kind = fault.partition("_")[0]
            raise ModelError(f"The checkpoint has {kind} tensors for {found.name}: {shortened(', '.join(names), 300)}.")
    return model


def _random(found: LibraryModel, dtype: torch.dtype) -> Any:
    """Return the model with random weights, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return found.model_class._from_config(found.config, dtype=dtype, attn_implementation="eager")


@torch.inference_mode()
def _assemble(folder: Path, found: LibraryModel, model: Any, dtype: torch.dtype, longest: int) -> TransformersModel:
    """Record the model's attention calls, connect its attention to our pool, and check the result."""
    decoder = model.get_decoder()
    prompts = _prompts(found.config.vocab_size, model.device)
    expected = model(input_ids=prompts, use_cache=False, return_dict=True).logits.float()
    calls, rows = _probe(model, decoder, prompts[:1, :_PROBED], max(longest, NUM_TOKENS))
    adapted = adapted_modules(model, rows, _PROBED, found.towers)
    for module in (*rows, model.get_output_embeddings()):
        pack(module, dtype)
    step = CurrentStep()
    shapes = attach_layers(calls, dtype, step)
    model.set_attn_implementation(PAGED)
    adapted.hook(step, dtype)
    given = GivenHidden(decoder)
    _replace(model, decoder, given)
    config = TransformersConfig(
        family=found.name,
        vocab_size=expected.shape[-1],
        hidden_size=found.config.hidden_size,
        num_heads=calls[0].num_heads,
        shapes=shapes,
        kv_sources=tuple(call.source for call in calls),
        max_position_embeddings=found.longest,
        eos_token_ids=end_tokens(folder, found.config, expected.shape[-1]),
    )
    made = TransformersModel(
        config=config,
        dtype=dtype,
        device=model.device,
        max_positions=longest,
        decoder=decoder,
        head=model,
        given=given,
        adapted=adapted,
        step=step,
        notice="",
    )
    return replace(made, notice=_notice(found.name, check_exactness(made, prompts, expected)))


def _notice(name: str, error: float) -> str:
    """Return the line printed at the start: which class computes the model, and why that is slow."""
    untested = (
        ""
        if name in LIBRARY_CLASSES
        else "; our tests do not compare it, unlike the models in docs/reference/models.md"
    )
    return (
        f"Implementation: {name} of transformers {transformers.__version__}, slower than ours: its modules run one op "
        "after another in PyTorch, without our fused kernels and recorded steps. Checked: logits over "
        f"pages of KV are within {error:.0e} of those by its own attention{untested}"
    )


def _prompts(vocab_size: int, device: torch.device) -> Tensor:
    """Return two prompts of random tokens: [2, NUM_TOKENS]."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.randint(vocab_size, (2, NUM_TOKENS), generator=generator).to(device)


def _probe(
    model: Any, decoder: Any, tokens: Tensor, longest: int
) -> tuple[list[AttentionCall], dict[nn.Module, set[int]]]:
    """Run the decoder once to record its attention calls, and how many tokens each linear module computes."""
    model.set_attn_implementation(RECORDED)
    num_tokens = tokens.shape[1]
    positions = torch.arange(num_tokens, device=tokens.device)[None]
    with recorded_calls(num_tokens, longest) as calls, observed_rows(decoder) as rows:
        decoder(input_ids=tokens, position_ids=positions, use_cache=False, return_dict=True)
    _check_calls(calls, model.config.num_hidden_layers)
    return calls, rows


def _check_calls(calls: list[AttentionCall], num_layers: int) -> None:
    modules = {call.module for call in calls}
    if not len(calls) == len(modules) == num_layers:
        raise ModelError(
            f"A pass calls transformers' attention interface {len(calls)} times, from {len(modules)} modules, in "
            f"{num_layers} layers: only models with one call in each layer are supported."
        )


def _replace(model: Any, decoder: Any, given: GivenHidden) -> None:
    """Replace the decoder in the model by another module."""
    name = next(name for name, module in model.named_modules() if module is decoder)
    if not name:
        raise ModelError("Its decoder is not a module separate from its head.")
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, given)
