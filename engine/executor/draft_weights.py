"""Weights of a draft model, an EAGLE-3 head or an MTP module: found by the options, checked, loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from ...kernels import quantised_weights
from ..checkpoint.base_digest import base_digest
from ..checkpoint.gguf import GgufFile
from ..checkpoint.locate import resolve_model
from ..checkpoint.model_config import ModelConfig, ModelShape
from ..checkpoint.read_config import open_checkpoint, read_model_config
from ..config import EngineConfig
from ..errors import ConfigError, ModelError
from ..loading.load_head import is_draft_head, load_head
from ..loading.load_model import load_model
from ..loading.load_mtp import load_mtp, prediction_module
from ..loading.upload import end_uploads
from ..loading.weight_forms import WeightForm, choose_weight_form
from ..models.decoder import DecoderModel
from ..models.draft_head import DraftHead
from ..models.hidden_pool import HiddenPool
from ..models.kv_pool import bytes_per_page
from ..models.model import Model
from ..text.shared_vocabulary import has_tokenizer, vocabulary_difference

_MODEL, _MTP = "The model of --speculative-config", "Method mtp of --speculative-config"
# The draft model's KV takes at most 1 / _SHARE of the memory for KV.
_SHARE = 4


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The weights of a draft model or head that fits the model for which it drafts, and the digest of their content."""

    model: DecoderModel | DraftHead
    base_digest: str

    def hidden_pool(self, num_pages: int, page_size: int) -> HiddenPool | None:
        """Make the pool of the hidden states that a head reads; None for a model."""
        head = self.model
        if isinstance(head, DecoderModel):
            return None
        return HiddenPool(num_pages, page_size, head.config.hidden_size, head.dtype, head.device, head.reads)

    def hidden_bytes(self, page_size: int) -> int:
        """Return the bytes of a page of that pool."""
        if isinstance(self.model, DecoderModel):
            return 0
        return page_size * self.model.config.hidden_size * self.model.dtype.itemsize


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """The folder or GGUF file with the weights of a draft; for an MTP module it is the model's own folder."""

    kind: Literal["model", "head", "mtp"]
    path: Path


def find_draft(config: EngineConfig, target: ModelShape, files: Path) -> DraftFiles | None:
    """Find the draft model, the EAGLE-3 head or the MTP module that the options name; None if they name none.

    Only configurations and tokenizers are read, so that errors in them are raised before any weights are read.

    Args:
        target: the model that it drafts for.
        files: folder or file of the target.

    Raises:
        ModelError: the draft cannot be found or computed.
        ConfigError: the draft has another vocabulary, or recurrent states of its own.
    """
    speculative = config.speculative
    if speculative.model is None and speculative.method != "mtp":
        return None
    if speculative.model is None:
        return _find_module(config, target, files)
    with _naming_draft():
        path = resolve_model(speculative.model).path
        if speculative.method == "eagle3" or is_draft_head(path):
            return _find_head(config, target, path)
        source = Path(config.tokenizer) if config.tokenizer else files
        if difference := vocabulary_difference(source, path):
            raise _refusal(f"must have the vocabulary of the model: {difference}")
        shape = read_model_config(open_checkpoint(path))
    if not has_tokenizer(source) and shape.vocab_size != target.vocab_size:
        sizes = f"it has {target.vocab_size:,} tokens, and the draft model has {shape.vocab_size:,}"
        raise _refusal(f"must have the vocabulary of the model: {sizes}")
    if shape.has_states:
        raise _refusal("must have attention in all layers: a rejected draft would remain in its recurrent states")
    return DraftFiles("model", path)


def _find_head(config: EngineConfig, target: ModelShape, path: Path) -> DraftFiles:
    """Find the EAGLE-3 head of a model. Raises ModelError and ConfigError."""
    if not isinstance(target, ModelConfig):
        raise _refusal("is a head, which reads hidden states that --model-impl transformers does not give")
    if config.load_format == "dummy":
        raise _refusal("is a head, which --load-format dummy cannot create")
    if not path.is_dir() or not is_draft_head(path):
        raise _refusal(f"is not an EAGLE-3 head: {path.name} has neither its architecture nor a draft_vocab_size")
    return DraftFiles("head", path)


def _find_module(config: EngineConfig, target: ModelShape, files: Path) -> DraftFiles:
    """Find the MTP module of a model in the model's own folder. Raises ModelError and ConfigError."""
    if not isinstance(target, ModelConfig):
        raise _refusal("reads hidden states that --model-impl transformers does not give", _MTP)
    if config.load_format == "dummy":
        raise _refusal("reads a module of the checkpoint, which --load-format dummy cannot create", _MTP)
    if not files.is_dir():
        raise _refusal(
            f"reads a folder in Hugging Face format, but {files.name} is a GGUF file. Leave the method out", _MTP
        )
    with _naming_module():
        prediction_module(target)
    return DraftFiles("mtp", files)


def load_draft(config: EngineConfig, target: Model, found: DraftFiles) -> DraftModel:
    """Load the weights of a draft.

    Args:
        target: the model that it drafts for.
        found: the draft, as ``find_draft`` returns it.

    Raises:
        ModelError: the files are malformed, or a head was made for another model.
        ConfigError: no kernel computes the form of weights that the options name.
    """
    device, dtype = target.device, target.dtype
    if found.kind == "model":
        with _naming_draft():
            checkpoint, dummy = open_checkpoint(found.path), config.load_format == "dummy"
            form = _form(config, target, checkpoint)
            model = load_model(checkpoint, dtype=dtype, device=device, dummy=dummy, weights=form)
        return DraftModel(model, base_digest(checkpoint, dummy=dummy))
    assert isinstance(target, DecoderModel)
    form = _form(config, target, found.path)
    with _naming_draft() if found.kind == "head" else _naming_module():
        load = load_head if found.kind == "head" else load_mtp
        made = DraftModel(load(found.path, target, form), base_digest(found.path))
    end_uploads()
    return made


def draft_pages(config: EngineConfig, num_bytes: int, page_bytes: int, draft: DraftModel) -> tuple[int, int]:
    """Return the number of pages of a draft's KV pool, and the bytes of all of them.

    The draft's pool has as many pages as the model's pool, or fewer if they would take more than a quarter of the
    memory for KV, which the two pools share. If an option sets the number of the model's pages, the draft gets as many
    pages in addition, and the number of bytes returned is 0.

    Args:
        num_bytes: bytes for the KV of the model and of the draft together.
        page_bytes: bytes of a page of the model's KV.

    Raises:
        ConfigError: no memory is left.
    """
    own = bytes_per_page(draft.model.config, config.block_size, draft.model.dtype)
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override, 0
    pages = min(num_bytes // (page_bytes + own), num_bytes // _SHARE // own)
    if pages < 2:
        reason = (
            f"does not have enough memory for its KV in {num_bytes / 2**30:.2f} GiB. Try a larger --kv-cache-memory"
        )
        raise _refusal(reason, _subject(config))
    return pages, pages * own


@contextmanager
def _naming_draft() -> Iterator[None]:
    """Let a ModelError name the option of the draft model in place of the model's."""
    try:
        yield
    except ModelError as error:
        raise ModelError(str(error).replace("--model:", f"{_MODEL}:", 1)) from error


@contextmanager
def _naming_module() -> Iterator[None]:
    """Let a ModelError name the method."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{_MTP}: {error}") from error


def _form(config: EngineConfig, target: Model, checkpoint: Path | GgufFile) -> WeightForm:
    """Choose the form of a draft model's weights: by default quantised on a CPU if the model is in bfloat16.

    A step of a draft model takes as long as reading its weights, so fewer bytes make it faster. Rounding of the draft
    model's weights does not change answers. Beside a model in float32, whose user wants precision, the draft model is
    not quantised. On a GPU it is not quantised either, because GPU kernels read only forms that checkpoints store.

    Raises:
        ConfigError: no kernel computes the form that the options name.
    """
    quantization = config.speculative.quantization or config.quantization
    on_cpu = target.device.type == "cpu"
    if quantization is None and on_cpu and target.dtype is torch.bfloat16 and quantised_weights.available():
        quantization = "gguf_dynamic" if isinstance(checkpoint, GgufFile) else "int8_dynamic"
    return choose_weight_form(replace(config, quantization=quantization), target.device, target.dtype, checkpoint)


def _subject(config: EngineConfig) -> str:
    """Return the name of the drafter's option, for error messages."""
    return _MTP if config.speculative.method == "mtp" else _MODEL


def _refusal(reason: str, subject: str = _MODEL) -> ConfigError:
    return ConfigError(f"{subject} {reason}.")
