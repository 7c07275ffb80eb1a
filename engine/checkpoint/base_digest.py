"""Digest of a base model: which weights a process serves, found without reading all of them.

The digest covers in full: the configuration, and the size and header of each weights file (names, shapes, types and
offsets of all tensors; in a GGUF file the tokenizer too). Of each tensor's bytes it covers a sample: ``BLOCK``
bytes at its beginning, middle and end. Training, merging an adapter, or editing even one matrix changes nearly all
bytes of a tensor, and so the digest; a change of single values outside of the samples is not detected. So the
digest distinguishes models that are confused by mistake, which is sufficient for replicas and stored KV. It is no
proof against forged weights: such a proof needs a hash of the whole files.

A model of 100 MB has 3 MB of samples, a model of 140 GB with 723 tensors 9 MB. The samples are read after the weights,
while the system still caches the pages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from ..errors import ModelError
from .gguf import GgufFile
from .quantization_config import FILES
from .safetensors_files import shard_names, tensor_spans

BLOCK = 4096
_LENGTH = 32  # hexadecimal digits, 128 bits
_CONFIG = "config.json"


def base_digest(checkpoint: Path | GgufFile, *, dummy: bool = False) -> str:
    """Return the digest of a folder in Hugging Face format or of a GGUF file, opened or not, 32 hexadecimal digits.

    Args:
        dummy: whether the weights are random, and derived from the configuration alone.

    Raises:
        ModelError: a file cannot be read, or its header is malformed.
    """
    digest = hashlib.blake2b(b"rootgraft base model 1", digest_size=_LENGTH // 2)
    path = checkpoint.path if isinstance(checkpoint, GgufFile) else checkpoint
    try:
        if isinstance(checkpoint, GgufFile) or not path.is_dir():
            _add_gguf(digest, checkpoint if isinstance(checkpoint, GgufFile) else GgufFile.open(path), dummy)
        else:
            _add(digest, (path / _CONFIG).read_bytes())
            _add(digest, *((path / name).read_bytes() for name in FILES if (path / name).is_file()))
            for name in [] if dummy else shard_names(path):
                header, spans = tensor_spans(path / name)
                _add(digest, name.encode(), header)
                _add_samples(digest, path / name, spans)
    except OSError as error:
        raise ModelError(f"{path.name} cannot be read: {error.strerror}.") from error
    return digest.hexdigest()


def _add_gguf(digest: hashlib.blake2b, opened: GgufFile, dummy: bool) -> None:
    for part in opened.parts:
        tensors = part.own_tensors.values()
        start = min((tensor.offset for tensor in tensors), default=part.path.stat().st_size)
        with part.path.open("rb") as file:
            _add(digest, file.read(start))
        spans = [] if dummy else [(each.offset, each.offset + each.num_bytes) for each in tensors]
        _add_samples(digest, part.path, spans)


def _add_samples(digest: hashlib.blake2b, path: Path, spans: Iterable[tuple[int, int]]) -> None:
    """Add a file's size and the samples of its tensors, whose spans are given by start and end."""
    _add(digest, str(path.stat().st_size).encode())
    with path.open("rb", buffering=0) as file:
        for start, end in spans:
            last = max(start, end - BLOCK)
            for at in sorted({start, (start + last) // 2, last}):
                file.seek(at)
                _add(digest, file.read(min(BLOCK, end - at)))


def _add(digest: hashlib.blake2b, *parts: bytes) -> None:
    """Add parts with their lengths, so that different lists of parts never have the same digest."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
