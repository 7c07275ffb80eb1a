"""Reads the tokenizer files of a folder in Hugging Face's format as plain data.

tokenizer.json              the tokenizer itself
tokenizer.model             otherwise a SentencePiece model, see ``tokenizer_sentencepiece``
tiktoken.model              otherwise a vocabulary of tiktoken's, see ``tokenizer_tiktoken``. ``qwen.tiktoken`` and
                            GLM-4's ``tokenizer.model`` are such vocabularies too. Python code is never run.
added_tokens.json           ids of further tokens, if there is a ``tokenizer.model``
tokenizer_config.json       names of special tokens, further added tokens, flags of all added tokens, and whether a text
                            begins like a word after a space, see ``prefix_space``
special_tokens_map.json     names of special tokens, in older folders
generation_config.json      further end tokens
chat_template.jinja         chat templates: the first of these three files that exists counts
chat_template.json
tokenizer_config.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ModelError, quoted, shortened
from .definition_parts import add_ends, added_token
from .prefix_space import set_prefix_space
from .tokenizer_sentencepiece import SENTENCEPIECE, read_sentencepiece
from .tokenizer_tiktoken import TIKTOKEN, read_tiktoken, tiktoken_file

DEFINITION = "tokenizer.json"
FURTHER_TEMPLATES = "additional_chat_templates"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of a tokenizer as data.

    Attributes:
        definition: content of ``tokenizer.json``.
        special: texts of the special tokens by role (``bos_token``, ...); roles that the model lacks are left out.
        eos_ids: tokens that end an answer, in addition to ``special["eos_token"]``.
        chat_templates: Jinja templates by name, see ``ChatTemplates``.
    """

    definition: dict[str, Any]
    special: dict[str, str]
    eos_ids: tuple[int, ...] = ()
    chat_templates: dict[str, str] = field(default_factory=dict)


@contextmanager
def refusing_malformed() -> Iterator[None]:
    """Context manager: raise ModelError if an entry of a tokenizer's files is missing or has a wrong type."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"The tokenizer's files are malformed: {quoted(error)}.") from error


def read_folder(folder: Path) -> TokenizerFiles:
    """Read the tokenizer of a model folder.

    Raises:
        ModelError: there is no ``tokenizer.json``, the tokenizer is Python code, or files are malformed.
    """
    config = _read_json(folder / "tokenizer_config.json") or {}
    definition = _definition(folder, config)
    if definition is None or not isinstance(definition.get("model"), dict):
        raise ModelError("tokenizer.json is not a definition of a tokenizer.")
    named = {**(_read_json(folder / "special_tokens_map.json") or {}), **config}
    special = {name: text for name in SPECIAL_NAMES if (text := _text(named.get(name))) is not None}
    _complete_added_tokens(definition, config, special, named)
    generation = _read_json(folder / "generation_config.json") or {}
    return TokenizerFiles(definition, special, _ids(generation.get("eos_token_id")), _templates(folder, config))


def has_definition(folder: Path) -> bool:
    """Return whether a folder has a tokenizer in the form of data files."""
    return any((folder / name).is_file() for name in (DEFINITION, SENTENCEPIECE, *TIKTOKEN))


def _definition(folder: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the content of ``tokenizer.json``; if it is missing, another vocabulary converted to the same form."""
    if (folder / DEFINITION).is_file():
        definition = _read_json(folder / DEFINITION)
        if definition is not None:
            set_prefix_space(definition, config)
        return definition
    if (vocabulary := tiktoken_file(folder, config)) is not None:
        return read_tiktoken(vocabulary, config)
    if (folder / SENTENCEPIECE).is_file():
        return _sentencepiece(folder, config)
    _refuse_code(folder, config)
    return None


def _sentencepiece(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the definition of a SentencePiece model.

    Adds the model's special tokens to ``config`` if it lacks them.
    """
    found = read_sentencepiece(folder / SENTENCEPIECE, config)
    for role, text in found.special.items():
        config.setdefault(role, text)
    known = {token["content"] for token in found.definition["added_tokens"]}
    for text, token in (_read_json(folder / "added_tokens.json") or {}).items():
        if text not in known:
            found.definition["added_tokens"].append(added_token(int(token), text, special=False))
    first = _text(config.get("bos_token")) if config.get("add_bos_token", True) else None
    last = _text(config.get("eos_token")) if config.get("add_eos_token", False) else None
    add_ends(found.definition, [first], [last])
    return found.definition


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no such file."""
    # Only regular files are read, because reading from a pipe may never end.
    if path.exists() and not path.is_file():
        raise ModelError(f"{path.name} is not a file.")
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} cannot be read as JSON.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} does not hold a JSON object.")
    return value


def _refuse_code(folder: Path, config: dict[str, Any]) -> None:
    """Raise ModelError for a tokenizer that needs Python code: code in its folder, or a class of another library."""
    code = config.get("auto_map", {})
    if isinstance(code, dict) and code.get("AutoTokenizer"):
        named = quoted(code["AutoTokenizer"])
        raise ModelError(f"The tokenizer is code in the model's folder (auto_map {named}), which is never run.")
    slow = [name for name in ("vocab.json", "vocab.txt", "tekken.json") if (folder / name).exists()]
    name = shortened(str(config.get("tokenizer_class", "an unnamed tokenizer")))
    kind = f"{name} with {', '.join(slow)}" if slow else "none"
    raise ModelError(f"The tokenizer must be a tokenizer.json; the folder has {kind}. Save it as a fast tokenizer.")


def _text(token: Any) -> str | None:
    """Return the text of a special token, given as a string or as an object with ``content``."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) and value else None


def _complete_added_tokens(
    definition: dict[str, Any], config: dict[str, Any], special: dict[str, str], named: dict[str, Any]
) -> None:
    """Complete ``added_tokens`` of the definition from the configuration: its tokens, its flags and its special tokens.

    As in transformers, a token is identified by its text, the flags of ``added_tokens_decoder`` replace those of
    ``tokenizer.json``, and a token that either of the two calls special is special.
    """
    added: list[dict[str, Any]] = definition.setdefault("added_tokens", [])
    known = {token["content"]: token for token in added}
    roles = set(special.values())
    for key, token in (config.get("added_tokens_decoder") or {}).items():
        entry = _configured(int(key), token, has_role=token["content"] in roles)
        if (old := known.get(entry["content"])) is not None:
            old.update(entry | {"id": old["id"], "special": old["special"] or entry["special"]})
        else:
            added.append(entry)
    texts = {*roles, *_further_special(named)}
    for token in added:
        token["special"] = token["special"] or token["content"] in texts
    present = {token["content"] for token in added}
    ids = _model_ids(definition["model"])
    added += [added_token(ids[text], text, special=True) for text in sorted(texts - present) if text in ids]
    added.sort(key=lambda token: int(token["id"]))
    for name in [name for name, text in special.items() if text not in {token["content"] for token in added}]:
        del special[name]


def _further_special(named: dict[str, Any]) -> Iterator[str]:
    """Yield the texts of special tokens without a role, from transformers 5's key or else from the older key."""
    tokens = named.get("extra_special_tokens") or named.get("additional_special_tokens") or ()
    yield from filter(None, map(_text, tokens.values() if isinstance(tokens, dict) else tokens))


def _configured(token_id: int, token: dict[str, Any], *, has_role: bool) -> dict[str, Any]:
    """Convert a token of ``added_tokens_decoder`` to a definition's entry.

    Only special tokens are found before normalization.
    """
    special = bool(token.get("special")) or has_role
    entry = added_token(token_id, token["content"], special=special) | {"normalized": not special}
    flags = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in token}
    return entry | flags


def _model_ids(model: dict[str, Any]) -> dict[str, int]:
    """Return the ids by piece.

    The vocabulary of BPE is an object of ids, that of Unigram is a list of (piece, score).
    """
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, dict):
        return vocabulary
    return {piece: token for token, (piece, _) in enumerate(vocabulary)}


def _ids(value: Any) -> tuple[int, ...]:
    """Return the ids in ``eos_token_id``, which is a number, a list, or absent."""
    return (value,) if isinstance(value, int) else tuple(value or ())


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    value = config.get("chat_template")
    if (stored := _read_json(folder / "chat_template.json")) is not None:
        value = stored.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        templates = {entry["name"]: entry["template"] for entry in value}
    files = {path.stem: path for path in sorted((folder / FURTHER_TEMPLATES).glob("*.jinja")) if path.is_file()}
    if (usual := folder / "chat_template.jinja").is_file():
        files["default"] = usual
    return templates | {name: path.read_text("utf-8-sig") for name, path in files.items()}
