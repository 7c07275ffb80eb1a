"""``add_prefix_space`` of ``tokenizer_config.json``: whether a text's first word is encoded like a word after a space.

Some tokenizer classes of transformers build their own steps from the configuration, and for them this key overrides
``tokenizer.json``. For other classes the key has no effect. Without the key, ``tokenizer.json`` decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_BYTE_LEVEL = frozenset(
    f"{name}Tokenizer" for name in ("Bart", "CodeGen", "Cohere", "GPT2", "GPTNeoX", "Qwen2", "Roberta")
)
_METASPACE = "LlamaTokenizer"
_PARTS = {"pre_tokenizer": "pretokenizers", "normalizer": "normalizers", "decoder": "decoders"}
"""For each kind of part, the key under which a sequence of parts lists its steps."""
_MARK = "\u2581"

Step = dict[str, Any]


def set_prefix_space(definition: dict[str, Any], config: dict[str, Any]) -> None:
    """Apply ``add_prefix_space`` of the configuration to a tokenizer definition, if the tokenizer's class uses it."""
    wanted, name = config.get("add_prefix_space"), str(config.get("tokenizer_class")).removesuffix("Fast")
    if not isinstance(wanted, bool):
        return
    if name in _BYTE_LEVEL:
        for step in _steps(definition, "pre_tokenizer"):
            if step["type"] == "ByteLevel":
                step["add_prefix_space"] = wanted
    elif name == _METASPACE and _has_prefix(definition) != wanted:
        _change_mark(definition, wanted=wanted)


def _change_mark(definition: dict[str, Any], *, wanted: bool) -> None:
    """Make encoding add U+2581 before the first word and decoding remove it, or make neither happen."""
    is_metaspace = False
    for part in ("pre_tokenizer", "decoder"):
        for step in _steps(definition, part):
            if step["type"] == "Metaspace":
                is_metaspace = is_metaspace or part == "pre_tokenizer"
                step.pop("add_prefix_space", None)
                step["prepend_scheme"] = "first" if wanted else "never"
    _replace(
        definition, "normalizer", _is_mark, [{"type": "Prepend", "prepend": _MARK}] * (wanted and not is_metaspace)
    )
    if not any(step["type"] == "Metaspace" for step in _steps(definition, "decoder")):
        strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        _replace(definition, "decoder", _is_strip, [], [strip] * wanted)


def _has_prefix(definition: dict[str, Any]) -> bool:
    for step in _steps(definition, "pre_tokenizer"):
        if step["type"] == "Metaspace":
            return bool(
                step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
            )
    return any(map(_is_mark, _steps(definition, "normalizer")))


def _is_mark(step: Step) -> bool:
    return bool(step["type"] == "Prepend" and step["prepend"] == _MARK)


def _is_strip(step: Step) -> bool:
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"])


def _replace(
    definition: dict[str, Any], part: str, is_old: Any, first: list[Step], last: list[Step] | None = None
) -> None:
    """Remove the steps for which ``is_old`` is true; put ``first`` at the beginning and ``last`` at the end."""
    kept = [step for step in _steps(definition, part) if not is_old(step)]
    steps = [*first, *kept, *(last or ())]
    definition[part] = {"type": "Sequence", _PARTS[part]: steps} if steps else None


def _steps(definition: dict[str, Any], part: str) -> Iterator[Step]:
    """Yield the steps of a part. A sequence is replaced by its steps."""
    left = [definition.get(part)]
    while left:
        step = left.pop(0)
        if step is not None:
            inner = step.get(_PARTS[part]) if step["type"] == "Sequence" else None
            if inner is None:
                yield step
            else:
                left[:0] = inner
