"""Weights of an engine, the model's and its draft's: the device is chosen and options are checked, then they load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import torch

from ...kernels import ops
from ...kernels.collectives import ALONE, Ranks
from ..checkpoint.gguf import GgufFile
from ..checkpoint.pooling_config import read_dense, read_pooler
from ..checkpoint.read_config import open_checkpoint
from ..config import EngineConfig
from ..errors import ConfigError
from ..loading.model_impl import load_by, own_config
from ..loading.pooling_layers import DenseLayer, load_dense
from ..loading.shards import Shard
from ..loading.stages import Stage
from ..loading.weight_forms import WIDENED, WeightForm, choose_weight_form
from ..models.decoder import DecoderModel
from ..models.model import Model
from ..types import Pooler
from .adapter_options import check_adapters, check_folder
from .batch_invariance import check_invariance, check_weights
from .device import check_index, choose_device, choose_dtype, place_threads
from .draft_weights import DraftModel, find_draft, load_draft
from .kv_budget import check_budget, weight_room


class Weights(NamedTuple):
    """A model and its draft model (None without one). Engine processes that are forked share their memory."""

    model: Model
    draft: DraftModel | None

    def pooler(self, model_path: Path) -> Pooler:
        """Return the kinds of results other than tokens that the model has, such as embeddings."""
        own = self.model.config if isinstance(self.model, DecoderModel) else None
        classes, generates = (own.num_classes, own.generates) if own else (0, True)
        return read_pooler(model_path, self.model.config, classes=classes, generates=generates)

    def dense(self, model_path: Path) -> tuple[DenseLayer, ...]:
        """Load the linear layers that follow the pooling of embeddings.

        Raises:
            ModelError: weights of the layers are missing or have another shape.
        """
        return tuple(load_dense(each, self.model.device) for each in read_dense(model_path))


def load_for_forks(config: EngineConfig, model_path: Path) -> Weights | None:
    """Load the weights for a ``Worker`` of this process or of a process forked from it. Starts no thread.

    Returns:
        The weights; None on a GPU, whose memory a forked process cannot use, and with several ranks, which load shards.

    Raises:
        ModelError, ConfigError: as ``Worker``.
    """
    if config.num_ranks > 1:
        return None
    device = set_up_device(replace(config, threads=1))
    return load_weights(config, open_checkpoint(model_path), model_path, device) if device.type == "cpu" else None


def set_up_device(config: EngineConfig) -> torch.device:
    """Choose the device, kernels and threads."""
    device = choose_device(config)
    ops.use_native(config.native_kernels)
    ops.use_invariant(config.batch_invariant)
    if device.type == "cpu":
        ops.set_threads(place_threads(config))
    else:
        ops.import_attention()
    return device


def load_weights(
    config: EngineConfig, checkpoint: Path | GgufFile, model_path: Path, device: torch.device, ranks: Ranks = ALONE
) -> Weights:
    """Load the weights of a model and, on the first rank, of its draft, after all checks that need no weights.

    Args:
        device: the device, as ``set_up_device`` returns it.
        ranks: the group of ranks that compute the model; each loads its part.

    Raises:
        ModelError, ConfigError: as ``Worker``.
    """
    if config.num_ranks != ranks.size:
        raise ConfigError(f"{config.ranks_option} is an option of serve; this command uses one device. Leave it out.")
    dtype, dummy = choose_dtype(config, device), config.load_format == "dummy"
    check_folder(config)
    shape = own_config(config.model_impl, checkpoint)
    if shape is not None:
        shape = shape.up_to(config.max_model_len or shape.max_position_embeddings)
        check_index(shape, device)
    shard, stage = None, None
    part = shape
    if part is not None and config.tensor_parallel_size > 1:
        shard = Shard.of(part, ranks.split(config.tensor_parallel_size))
        part = shard.config
    if part is not None and config.pipeline_parallel_size > 1:
        stage = Stage.of(part, ranks, config.tensor_parallel_size)
        part = stage.config
    draft = None
    check_invariance(config, shape, device, dtype)
    if shape is not None and part is not None:
        check_budget(config, part, device, dtype)
        check_adapters(config, checkpoint, dtype)
        if ranks.rank == 0:  # only rank 0 draws tokens
            draft = find_draft(config, shape, model_path)
    available = weight_room(config, shape, device, dtype)
    if device.type == "cpu":
        available //= ranks.size
    is_theirs = shape is None and config.quantization in (None, WIDENED)  # the transformers library reads its weights
    form: WeightForm = "plain"
    if not is_theirs:
        form = choose_weight_form(config, device, dtype, checkpoint, available=available)
        form = _of_first(form, ranks)  # what a rank measures may differ
    check_weights(config, form, device)
    model = load_by(
        config.model_impl,
        checkpoint,
        dtype=dtype,
        device=device,
        max_positions=config.max_model_len,
        dummy=dummy,
        weights=form,
        available=available,
        shard=shard,
        stage=stage,
    )
    # The shape of a model of the transformers library is known only once its weights are loaded.
    if shape is None:
        draft = find_draft(config, model.config, model_path)
    return Weights(model, None if draft is None else load_draft(config, model, draft))


def _of_first(form: WeightForm, ranks: Ranks) -> WeightForm:
    """Return the form that rank 0 has chosen, on each rank."""
    forms: tuple[WeightForm, ...] = get_args(WeightForm)
    return forms[ranks.least(forms.index(form) if ranks.rank == 0 else len(forms))] if ranks.size > 1 else form
