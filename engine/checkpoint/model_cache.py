"""Model caches of this user: which models they hold, whether each can be served, and removal from them. No torch."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, UnknownArchitecture
from .bucket_model import bucket_copies, is_in_bucket, remove_copy
from .families.library_classes import TESTED_CLASSES
from .gguf import GgufFile
from .locate import DEFAULT_MODEL, DEFAULT_NAME, cache_folder
from .read_config import read_model_config

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo

_ADAPTER = "adapter_config.json"
_INDEX = "model.safetensors.index.json"
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model, or an adapter, in a cache.

    Attributes:
        name: name of the model in the commands' output and arguments.
        model: argument for ``rootgraft serve``; an empty string for the default model, which needs no name.
        path: folder or file of the model.
        cache: folder of the cache.
        size: bytes on disk.
        format: format of the weights, such as ``GGUF Q4_1`` or ``safetensors bfloat16``.
        used: last access, in seconds since 1970.
        fault: the reason why the model cannot be served; an empty string if it can.
    """

    name: str
    model: str
    path: Path
    cache: Path
    size: int
    format: str
    used: float
    fault: str = ""


def hub_cache() -> Path:
    """Return the cache folder of the hub's client, which may not exist yet."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def cached_models() -> list[CachedModel]:
    """Return the models in our own cache (models of buckets included) and in the hub client's cache, sorted by name."""
    return sorted([*_packaged_models(), *_bucket_models(), *_hub_models()], key=lambda model: model.name.lower())


def remove(model: CachedModel) -> None:
    """Delete a model from its cache.

    Raises:
        ModelError: the model is outside of the cache, for example behind a symbolic link, or cannot be deleted.
    """
    if model.path.is_symlink() or model.cache.resolve() not in model.path.resolve().parents:
        raise ModelError(f"{model.path} is outside the cache {model.cache}: nothing was removed.")
    try:
        if model.path.is_file():
            model.path.unlink()
            model.path.with_name(model.path.name + ".verified.json").unlink(missing_ok=True)
        elif is_in_bucket(model.name):
            remove_copy(model.path)
        else:
            _remove_from_hub(model)
    except OSError as error:
        raise ModelError(f"{model.path} cannot be removed: {error.strerror or error}.") from error
    if model.path.exists():
        raise ModelError(f"{model.path} could not be removed. Try: ls -ld {model.path}")


def _remove_from_hub(model: CachedModel) -> None:
    """Let the hub's client delete all revisions of a model.

    The client finds revisions by commit, and a copy of a repository has the commits of the original. So the client is
    shown only this repository.
    """
    from huggingface_hub import scan_cache_dir

    info = scan_cache_dir(model.cache)
    for repo in info.repos:
        if repo.repo_path == model.path:
            alone = replace(info, repos=frozenset((repo,)))
            alone.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()


def _packaged_models() -> Iterator[CachedModel]:
    cache = cache_folder()
    for path in sorted(cache.glob("*.gguf")):
        if path.is_file():
            status = path.stat()
            is_default = path.name == DEFAULT_MODEL.filename
            kind, fault = _gguf(path)
            yield CachedModel(
                DEFAULT_NAME if is_default else path.stem,
                "" if is_default else str(path),
                path,
                cache,
                status.st_size,
                kind,
                status.st_atime,
                fault,
            )


def _files_below(folder: Path) -> Iterator[os.stat_result]:
    """Yield the files below a folder, which another process may change meanwhile."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield os.stat(Path(parent, name))


def _bucket_models() -> Iterator[CachedModel]:
    cache = cache_folder()
    for copy in bucket_copies(cache):
        files = list(_files_below(copy.folder))
        kind, fault = "", "its download is incomplete: rootgraft pull fetches the rest"
        if copy.path is not None:
            kind, fault = _gguf(copy.path) if copy.path.is_file() else _describe(copy.model, copy.path)[1:]
        yield CachedModel(
            copy.model,
            copy.model,
            copy.folder,
            cache,
            sum(each.st_size for each in files),
            kind,
            max(each.st_atime for each in files),
            fault,
        )


def _hub_models() -> Iterator[CachedModel]:
    cache = hub_cache()
    if not cache.is_dir():
        return
    from huggingface_hub import scan_cache_dir

    for repo in scan_cache_dir(cache).repos:
        revision = _revision(repo)
        if repo.repo_type != "model" or revision is None:
            continue
        model, kind, fault = _describe(repo.repo_id, revision.snapshot_path)
        yield CachedModel(
            repo.repo_id, model, repo.repo_path, cache, repo.size_on_disk, kind, repo.last_accessed, fault
        )


def _revision(repo: CachedRepoInfo) -> CachedRevisionInfo | None:
    """Return the revision that is used for a name alone: that of the main branch, or else the latest one."""
    revisions = sorted(repo.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified))
    return revisions[-1] if revisions else None


def _describe(name: str, folder: Path) -> tuple[str, str, str]:
    """Return the argument of ``serve`` for a folder of the hub's cache, its format and its fault."""
    if (folder / _ADAPTER).is_file():
        base = _json(folder / _ADAPTER).get("base_model_name_or_path") or "its base model"
        return name, "adapter", f"an adapter: serve {base} with --enable-lora --lora-modules NAME={folder}"
    gguf = sorted(folder.glob("*.gguf"))
    if gguf and not (folder / "config.json").is_file():
        kind, fault = _gguf(gguf[0])
        return str(gguf[0]), kind, fault
    dtype = _json(folder / "config.json").get("dtype") or _json(folder / "config.json").get("torch_dtype") or ""
    return name, " ".join(filter(None, ("safetensors", str(dtype)))), _fault_of_folder(folder)


def _fault_of_folder(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        return "it has no config.json: it is not a language model, or its download is incomplete"
    try:
        read_model_config(folder)
    except UnknownArchitecture as error:
        if error.architecture not in TESTED_CLASSES:
            return str(error)
    except ModelError as error:
        return str(error)
    index = _json(folder / _INDEX).get("weight_map")
    shards = sorted(set(index.values())) if isinstance(index, dict) else ["model.safetensors"]
    missing = [name for name in (*map(str, shards), _TOKENIZER) if not (folder / name).exists()]
    return f"{missing[0]} is missing: rootgraft pull fetches the missing files" if missing else ""


def _gguf(path: Path) -> tuple[str, str]:
    """Return the format of a GGUF file, by the type of most of its bytes, and its fault."""
    try:
        sizes: Counter[str] = Counter()
        for tensor in GgufFile.open(path).tensors.values():
            sizes[tensor.type] += tensor.num_bytes
        kind = f"GGUF {sizes.most_common(1)[0][0]}" if sizes else "GGUF"
        read_model_config(path)
    except ModelError as error:
        return "GGUF", str(error)
    return kind, ""


def _json(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; an empty one if the file cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return content
    return {}
