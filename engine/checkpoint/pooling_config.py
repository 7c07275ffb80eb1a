"""Read how a checkpoint computes embeddings and classes, from sentence-transformers' files and ``config.json``.

modules.json                          Transformer, Pooling and perhaps Dense and Normalize, in their order
1_Pooling/config.json                 which hidden states become the embedding
2_Dense/config.json                   a linear layer after the pooling
sentence_bert_config.json             the longest text
config_sentence_transformers.json     prompts that are put before texts
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from ..errors import ModelError, quoted
from ..types import Pooler, PoolingMode
from .model_config import ModelShape
from .read_config import CONFIG

_MODULES = "modules.json"
_TEXTS = "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
_MODES: Final[tuple[PoolingMode, ...]] = get_args(PoolingMode)
# Older files have a flag for each kind of pooling; their results are joined in this order.
_FLAGS: Final[dict[str, PoolingMode]] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer after the pooling.

    Attributes:
        folder: folder of the weights.
        place: the folder's name in the checkpoint, for errors.
        size_in, size: number of values of its input and of its output.
        activation: name of the activation's class in torch.
    """

    folder: Path
    place: str
    size_in: int
    size: int
    bias: bool
    activation: str


def read_pooler(folder: Path, config: ModelShape, *, classes: int, generates: bool) -> Pooler:
    """Return how a model pools hidden states: to embeddings, scores or classes, and whether it generates text too.

    Args:
        folder: folder of the checkpoint. A GGUF file names no pooling: the last hidden state is used.
        classes: number of rows of the classification head, 0 without one.
        generates: whether the model has a language head.

    Raises:
        ModelError: a file is malformed.
    """
    if not folder.is_dir():
        return Pooler(generates=generates, size=config.hidden_size)
    whole = _object(folder / CONFIG)
    return Pooler(
        generates=generates,
        labels=_labels(whole, classes),
        is_multi_label=whole.get("problem_type") == "multi_label_classification",
        is_raw_score=_is_identity(whole),
        **_embedding(folder, config.hidden_size),
    )


def _is_identity(config: dict[str, Any]) -> bool:
    """Return whether a cross-encoder's score is its logit, by sentence-transformers' entry in ``config.json``."""
    written = config.get("sentence_transformers")
    named = written.get("activation_fn") if isinstance(written, dict) else None
    named = named or config.get("sbert_ce_default_activation_function") or ""
    return str(named).rpartition(".")[2] == "Identity"


def _labels(config: dict[str, Any], classes: int) -> tuple[str, ...]:
    named = config.get("id2label")
    names = named if isinstance(named, dict) else {}
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(classes))


def read_dense(folder: Path) -> tuple[DenseModule, ...]:
    """Return the linear layers after the pooling, in their order; none if the embeddings are refused.

    Raises:
        ModelError: a file is malformed.
    """
    if not (folder / _MODULES).is_file():
        return ()
    read = _Modules.read(folder)
    return () if read.refusal else tuple(read.dense)


@dataclass(slots=True)
class _Modules:
    """The modules that ``modules.json`` names, and why some of them are not computed."""

    refusal: str
    modes: tuple[PoolingMode, ...]
    dense: list[DenseModule]
    includes_prompt: bool = True
    normalizes: bool = False
    max_length: int = 0

    @classmethod
    def read(cls, folder: Path) -> _Modules:
        found = cls("", (), [])
        for module in _list(folder / _MODULES):
            kind, path = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
            if not path.resolve().is_relative_to(folder.resolve()):
                raise ModelError(f"{_MODULES}: the path {quoted(module.get('path'))} is outside the model's folder.")
            found._add(kind, path, folder)
        if not found.modes:
            found._refuse(f"{_MODULES} names no Pooling")
        return found

    def _add(self, kind: str, path: Path, folder: Path) -> None:
        if self.normalizes and kind in ("Dense", "Pooling"):
            self._refuse(f"{kind} after Normalize in {_MODULES} is not supported")
        match kind:
            case "Transformer":
                texts = _optional(path / _TEXTS) or _optional(folder / _TEXTS)
                self.max_length = _length(texts)
                if texts.get("do_lower_case"):
                    self._refuse(f"do_lower_case of {_TEXTS} is not supported")
            case "Pooling" if not self.modes:
                self._add_pooling(_object(path / CONFIG))
            case "Dense" if self.modes:
                self._add_dense(path, _object(path / CONFIG))
            case "Normalize":
                self.normalizes = True
            case "Dropout":
                pass
            case _:
                self._refuse(f"the module {kind!r} at this position of {_MODULES} is not supported")

    def _add_pooling(self, config: dict[str, Any]) -> None:
        named = config.get("pooling_mode") or [mode for flag, mode in _FLAGS.items() if config.get(flag)] or "mean"
        modes = [named] if isinstance(named, str) else named
        if not isinstance(modes, list):
            raise ModelError(f"pooling_mode must be a name or a list of names, not {quoted(named)}.")
        self.modes = tuple(mode for mode in _MODES if mode in modes) if len(modes) == 1 else tuple(modes)
        self.includes_prompt = config.get("include_prompt", True) is not False
        if unknown := [mode for mode in modes if mode not in _MODES]:
            self.modes = ("lasttoken",)
            self._refuse(f"its pooling is {quoted(unknown[0])}; supported are {', '.join(_MODES)}")

    def _add_dense(self, path: Path, config: dict[str, Any]) -> None:
        size_in, size = config.get("in_features"), config.get("out_features")
        place = path.name
        if type(size_in) is not int or type(size) is not int or min(size_in, size) < 1:
            raise ModelError(f"{place}/{CONFIG} must give in_features and out_features as whole numbers.")
        names = config.get("module_input_name", "sentence_embedding"), config.get("module_output_name")
        if config.get("use_residual") or names[0] != "sentence_embedding" or names[1] not in (None, names[0]):
            self._refuse(f"use_residual or other inputs of {place} are not supported")
        activation = str(config.get("activation_function") or "torch.nn.modules.activation.Tanh").rpartition(".")[2]
        self.dense.append(DenseModule(path, place, size_in, size, config.get("bias", True) is not False, activation))

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or reason


def _embedding(folder: Path, size: int) -> dict[str, Any]:
    """Return the fields of ``Pooler`` from sentence-transformers' files. Without such files the last token is pooled.

    Args:
        size: size of a hidden state.
    """
    if not (folder / _MODULES).is_file():
        return {"size": size}
    read = _Modules.read(folder)
    asked = _optional(folder / _PROMPTS)
    prompts = asked.get("prompts")
    if not isinstance(prompts, dict):
        prompts = {}
    texts = tuple((str(name), text) for name, text in prompts.items() if isinstance(text, str))
    default = asked.get("default_prompt_name")
    if default is not None and default not in dict(texts):
        raise ModelError(f"{_PROMPTS}: default_prompt_name {quoted(default)} is not one of its prompts.")
    return {
        "is_embedder": bool(read.modes),
        "size": _checked_sizes(size * max(1, len(read.modes)), read.dense),
        "modes": read.modes or ("lasttoken",),
        "includes_prompt": read.includes_prompt,
        "refusal": read.refusal,
        "normalizes": read.normalizes,
        "prompts": texts,
        "default_prompt": "" if default is None else str(default),
        "max_length": read.max_length,
    }


def _checked_sizes(size: int, dense: list[DenseModule]) -> int:
    """Return the number of values of an embedding. Raises ModelError if sizes of consecutive layers differ."""
    for module in dense:
        if module.size_in != size:
            raise ModelError(f"{module.place}/{CONFIG}: in_features must be {size}, not {module.size_in}.")
        size = module.size
    return size


def _length(config: dict[str, Any]) -> int:
    length = config.get("max_seq_length")
    return length if type(length) is int and length > 0 else 0


def _optional(path: Path) -> dict[str, Any]:
    return _object(path) if path.is_file() else {}


def _object(path: Path) -> dict[str, Any]:
    found = _read(path)
    if not isinstance(found, dict):
        raise ModelError(f"{path.name} must be a JSON object.")
    return found


def _list(path: Path) -> list[dict[str, Any]]:
    found = _read(path)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise ModelError(f"{path.name} must be a list of JSON objects.")
    return found


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{path.name} is missing from the model's folder.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not JSON.") from error
