"""Load an EAGLE-3 draft head: from a folder in Hugging Face format to a ``DraftHead`` beside its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..checkpoint.config_fields import Fields
from ..checkpoint.hf_config import model_config
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.read_config import CONFIG, read_config_file
from ..errors import ModelError
from ..models.decoder import DecoderModel
from ..models.draft_head import DraftHead, SideBySide
from ..models.hidden_pool import FusedLayers
from .layer_loader import LayerLoader
from .tensor_names import EMBEDDING, HEAD, Shape, check_tensors, expected_shapes, qkv_modules
from .weight_forms import WeightForm, WeightReader
from .weight_readers import SafetensorsFolder

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_LAYER = "model.layers.0"
_HIDDEN_NORM, _FUSE = f"{_LAYER}.hidden_norm", "model.fc"
_TARGET_IDS = "d2t"  # difference between a token of the head's vocabulary and the model's token
_HAS_TOKEN = "t2d"  # the same the other way round, as flags of the model's tokens
_REFUSED = ("norm_before_fc", "fc_norm", "parallel_drafting")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def is_draft_head(path: Path) -> bool:
    """Return whether a folder holds an EAGLE-3 head. Raises ModelError if its ``config.json`` is malformed.

    Early heads have the architecture name of a Llama; such a head is recognised by the field for the size of its own
    vocabulary.
    """
    if not (path / CONFIG).is_file():
        return False
    config = read_config_file(path)
    architectures = config.get("architectures")
    named = isinstance(architectures, list) and any(name in ARCHITECTURES for name in architectures)
    return named or config.get("draft_vocab_size") is not None


def load_head(folder: Path, model: DecoderModel, weights: WeightForm) -> DraftHead:
    """Load the EAGLE-3 head of a model.

    Args:
        model: the model whose hidden states the head reads. It also provides the embedding if the head's folder has
            none.
        weights: the form of matrices in memory.

    Raises:
        ModelError: the head belongs to another model, has parts that are not computed, or its files are malformed.
    """
    fields = Fields(read_config_file(folder), CONFIG)
    config, layers = _read_config(fields), _read_layers(fields, model)
    if config.vocab_size != model.config.vocab_size:
        raise fields.wrong("vocab_size", f"that of its model, {model.config.vocab_size}")
    source = _HeadFolder(folder)
    size = fields.integer("draft_vocab_size", default=config.vocab_size)
    expected = _expected_shapes(config, size, len(layers) * model.config.hidden_size)
    own_embedding = EMBEDDING in source.shapes
    if not own_embedding:
        _check_shared(fields, config, model)
        del expected[EMBEDDING]
    check_tensors(expected, source.shapes, frozenset())
    target_ids = _target_ids(source.shifts, size, config.vocab_size)
    reader = WeightReader(source, model.dtype, model.device, weights)
    loader = LayerLoader(config, reader, model.max_positions)
    return DraftHead(
        kind="EAGLE-3 head",
        config=config,
        dtype=model.dtype,
        device=model.device,
        embedding=loader.embedding() if own_embedding else model.embedding,
        join=SideBySide(
            token_norm=loader.norm(f"{_LAYER}.input_layernorm"),
            hidden_norm=loader.norm(_HIDDEN_NORM),
            normed_residual=fields.flag("norm_before_residual"),
        ),
        layer=loader.layer(0, loader.norm(None), loader.norm("model.norm")),
        head=loader.projection("", {"lm_head": size}, bias=False),
        target_ids=target_ids if target_ids is None else target_ids.to(model.device),
        reads=FusedLayers(layers, loader.projection("model", {"fc": config.hidden_size}, bias=False)),
        vocab_size=config.vocab_size,
        max_positions=model.max_positions,
    )


class _HeadFolder(SafetensorsFolder):
    """A head's tensors by the names that they would have in a model of one layer.

    Attributes:
        shifts: number to add to each token of the head's vocabulary to get the model's token; None if both vocabularies
            are the same.
    """

    may_be_bare: ClassVar[bool] = False

    def __init__(self, folder: Path) -> None:
        self.shifts: Tensor | None = None
        super().__init__(folder)

    def _add(self, name: str, file: Any, stored: str, shard: str) -> None:
        if name == _TARGET_IDS:
            self.shifts = file.get_tensor(stored)
        elif name != _HAS_TOKEN:
            super()._add(_in_model(name), file, stored, shard)


def _in_model(name: str) -> str:
    """``midlayer.mlp.up_proj.weight`` -> ``model.layers.0.mlp.up_proj.weight``, ``fc.weight`` -> ``model.fc.weight``"""
    if name == HEAD:
        return name
    name = name.removeprefix("model.")
    return "model." + (f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name)


def _read_config(fields: Fields) -> ModelConfig:
    """Read the head's layer as the layer of a Llama with one layer."""
    nested = Fields(fields.mapping("eagle_config"), f"{CONFIG}: eagle_config")
    for each in fields, nested:
        for key in _REFUSED:
            if each.has(key) and each.values[key] is not False:
                raise each.wrong(key, "absent: this part of a head is not supported")
    if nested.values.get("use_aux_hidden_state", True) is not True:
        raise nested.wrong("use_aux_hidden_state", "true")
    changes = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False}
    config = model_config({**fields.values, **changes})
    if config.num_layers != 1:
        raise fields.wrong("num_hidden_layers", "1")
    return config


def _read_layers(fields: Fields, model: DecoderModel) -> tuple[int, ...]:
    """Return the layers of the model whose input the head reads.

    Published heads list three layers, in one of two conventions: a number is either the layer whose output is read, or
    the layer whose input is read. The first number tells them apart: 1 for outputs, 2 for inputs. By default the head
    reads the inputs of the third layer, of the middle layer and of the third layer from the end.
    """
    nested, last = fields.mapping("eagle_config").get(_LAYER_IDS), model.config.num_layers - 1
    ids = nested if nested is not None else fields.values.get(_LAYER_IDS)
    if ids is None:
        ids = [2, model.config.num_layers // 2, model.config.num_layers - 3]
    whole = isinstance(ids, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in ids)
    if whole and ids and ids[0] == 1:
        ids = [each + 1 for each in ids]
    if not whole or not ids or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] <= last:
        raise ModelError(
            f"{CONFIG}: {_LAYER_IDS} (the layers of the model whose inputs the head reads) must be in ascending "
            f"order and from 0 to {last}, not {ids}."
        )
    return tuple(ids)


def _expected_shapes(config: ModelConfig, vocab_size: int, read: int) -> dict[str, Shape]:
    """Return the names and shapes of a draft head's tensors. q, k and v read two hidden states side by side."""
    shapes = expected_shapes(config)
    for name in qkv_modules(config, 0):
        rows, columns = shapes[f"{_LAYER}.self_attn.{name}.weight"]
        shapes[f"{_LAYER}.self_attn.{name}.weight"] = rows, 2 * columns
    own = {HEAD: (vocab_size, config.hidden_size), f"{_HIDDEN_NORM}.weight": (config.hidden_size,)}
    return shapes | own | {f"{_FUSE}.weight": (config.hidden_size, read)}


def _check_shared(fields: Fields, config: ModelConfig, model: DecoderModel) -> None:
    """Check that a head without an embedding of its own can read the model's. Raises ModelError."""
    if config.hidden_size != model.config.hidden_size:
        wanted = f"that of its model, {model.config.hidden_size}, because it shares the model's embedding"
        raise fields.wrong("hidden_size", wanted)
    if model.embedding_scale != 1.0 or model.embedding_norm is not None:
        raise ModelError(
            "The checkpoint has no embedding of its own, and cannot share its model's, which is scaled or normalised."
        )


def _target_ids(shifts: Tensor | None, size: int, vocab_size: int) -> Tensor | None:
    """Return the tokens of the model that are the head's, [size]. Raises ModelError."""
    if shifts is None:
        if size != vocab_size:
            raise ModelError(f"The checkpoint lacks {_TARGET_IDS}, which maps its {size} tokens to the model's.")
        return None
    ids = torch.arange(size) + shifts.long() if shifts.shape == (size,) and not shifts.is_floating_point() else None
    if ids is None or not bool((ids[1:] > ids[:-1]).all()) or not 0 <= int(ids[0]) <= int(ids[-1]) < vocab_size:
        raise ModelError(f"The tensor {_TARGET_IDS} must map {size} tokens to ascending token ids below {vocab_size}.")
    return ids
