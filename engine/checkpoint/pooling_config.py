"""What a checkpoint's files say of embeddings and classes: those of sentence-transformers, and ``config.json``.

modules.json                          Transformer, Pooling and perhaps Normalize, in their order
1_Pooling/config.json                 which hidden states become the embedding
sentence_bert_config.json             the longest text
config_sentence_transformers.json     prompts that stand before texts
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import ModelError, quoted
from ..types import Pooler
from .model_config import ModelShape
from .read_config import CONFIG

_MODULES = "modules.json"
_TEXTS = "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
_LAST = "lasttoken"


def read_pooler(folder: Path, config: ModelShape, *, classes: int, generates: bool) -> Pooler:
    """Return what a model gives beside tokens.

    Args:
        folder: of the checkpoint; a file is one in GGUF, which says nothing of it.
        classes: rows of its classification head, 0 without one.
        generates: whether it has a language head.

    Raises:
        ModelError: a file is malformed.
    """
    if not folder.is_dir():
        return Pooler(generates, config.hidden_size)
    whole = _object(folder / CONFIG)
    return Pooler(
        generates=generates,
        size=config.hidden_size,
        labels=_labels(whole, classes),
        is_multi_label=whole.get("problem_type") == "multi_label_classification",
        **_embedding(folder),
    )


def _labels(config: dict[str, Any], classes: int) -> tuple[str, ...]:
    named = config.get("id2label")
    names = named if isinstance(named, dict) else {}
    return tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(classes))


def _embedding(folder: Path) -> dict[str, Any]:
    """Return the fields of ``Pooler`` that sentence-transformers' files name. Without them the last token counts."""
    if not (folder / _MODULES).is_file():
        return {}
    refusal, normalizes, max_length = "", False, 0
    for module in _list(folder / _MODULES):
        kind, path = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ModelError(f"{_MODULES}: the path {quoted(module.get('path'))} leaves the model's folder.")
        match kind:
            case "Transformer":
                max_length = _length(_optional(path / _TEXTS) or _optional(folder / _TEXTS))
            case "Pooling":
                refusal = refusal or _pooling_refusal(_object(path / CONFIG))
            case "Normalize":
                normalizes = True
            case _:
                refusal = f"the module {kind!r} of {_MODULES} is not computed"
    asked = _optional(folder / _PROMPTS)
    prompts = asked.get("prompts")
    if not isinstance(prompts, dict):
        prompts = {}
    texts = tuple((str(name), text) for name, text in prompts.items() if isinstance(text, str))
    default = asked.get("default_prompt_name")
    if default is not None and default not in dict(texts):
        raise ModelError(f"{_PROMPTS}: default_prompt_name {quoted(default)} is none of its prompts.")
    return {
        "refusal": refusal,
        "normalizes": normalizes,
        "prompts": texts,
        "default_prompt": "" if default is None else str(default),
        "max_length": max_length,
    }


def _pooling_refusal(config: dict[str, Any]) -> str:
    """Return why a kind of pooling is not computed, "" for that of the last token."""
    named = config.get("pooling_mode")
    flags = {key for key, value in config.items() if key.startswith("pooling_mode_") and value}
    modes = {str(named)} if named else flags
    if modes in ({_LAST}, {f"pooling_mode_{_LAST}"}):
        return ""
    told = ", ".join(sorted(mode.removeprefix("pooling_mode_") for mode in modes)) or "none"
    return f"its pooling is {told}; that of the last token alone is computed, as of Qwen3-Embedding"


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
