"""Adapter reader: reads an adapter from a folder to factors in host memory, on a background thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..kernels.device_memory import is_out_of_memory
from .adapter_weights import AdapterWeights, check_tensors, sort_tensors
from .base_projections import BaseLayout
from .config import MOST_BYTES, read_config
from .errors import AdapterError, AdapterLimit
from .own.own_weights_maker import OwnWeightsMaker
from .prepare_factors import PreparedAdapter, prepare
from .safe_paths import CONFIG, find_files, find_folder
from .safetensors_file import read_shapes, read_shards, read_tensors
from .sum_parts import SumPart
from .weighted_sum import weighted_sum

T = TypeVar("T")

# Largest number of times that config and weights are read. Both must be of one version, so they are read again if one
# of them is replaced meanwhile.
_MOST_READS = 3


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters for one base model. Its methods may be called from any thread.

    Attributes:
        layout: the base model.
        max_rank: limit of a module's rank.
        max_file_bytes: limit of the weights file.
        root: the folder of relative paths, which must contain all files except those of trusted paths; None for the
            working directory and no limit.
        own_weights: creates the weights that replace the base model's.
    """

    layout: BaseLayout
    max_rank: int
    max_file_bytes: int = 4 << 30
    root: Path | None = None
    own_weights: OwnWeightsMaker = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Create the maker of own weights, which is shared by all adapters of this reader."""
        object.__setattr__(self, "own_weights", OwnWeightsMaker(self.layout))

    def read(self, path: str, *, trusted: bool = False) -> PreparedAdapter:
        """Read the adapter in a folder.

        Args:
            path: path of the folder.
            trusted: whether the path may be outside of ``root``; only the operator may set this, never a request.

        Raises:
            AdapterError: the adapter is malformed, unsupported or does not fit the base model, or its files keep
                changing.
        """
        return self._unchanged(path, trusted, self._prepare)

    def read_sum(self, parts: Sequence[SumPart]) -> PreparedAdapter:
        """Read several adapters. Returns their weighted sum.

        Raises:
            AdapterError: as for ``read``; or the digest of a part has changed since it was loaded, or ``weighted_sum``
                refuses the parts.
        """
        adapters = [self._unchanged(part.path, part.trusted, lambda weights: weights) for part in parts]
        for part, adapter in zip(parts, adapters, strict=True):
            _check_digest(adapter.digest, part.digest)
        with _as_limit():
            return prepare(weighted_sum(parts, adapters, self.max_rank), self.layout)

    def _unchanged(self, path: str, trusted: bool, then: Callable[[AdapterWeights], T]) -> T:
        """Return a result computed from the weights in a folder. The files must not change meanwhile."""
        for _ in range(_MOST_READS):
            files = self._files(path, trusted=trusted)
            before = _stamps(files)
            try:
                found = then(self._weights(files[0], files[1:]))
            except AdapterError:
                if _stamps(files) == before:
                    raise
                continue
            if _stamps(files) == before:
                return found
        raise AdapterError("The adapter's files changed while they were being read: load it again.")

    def _weights(self, config_file: Path, weights_files: Sequence[Path]) -> AdapterWeights:
        """Return the weights of the adapter in these files."""
        config = read_config(_bytes(config_file))
        with _as_limit():
            tensors = read_shards(weights_files, self.max_file_bytes, read_tensors)
            return sort_tensors(tensors, config, self.layout, self.max_rank)

    def _prepare(self, weights: AdapterWeights) -> PreparedAdapter:
        with _as_limit():
            return prepare(weights, self.layout, self.own_weights.make(weights.saved, weights.modules))

    def check(self, path: str, *, trusted: bool = False) -> None:
        """Check the config, and the names and shapes of the tensors, of the adapter in a folder. Values are not read.

        Raises:
            AdapterError: ``read`` would raise it for the same files.
        """
        config_file, *weights_files = self._files(path, trusted=trusted)
        config = read_config(_bytes(config_file))
        shapes = read_shards(weights_files, self.max_file_bytes, read_shapes)
        check_tensors(shapes, config, self.layout, self.max_rank)

    def read_again(self, path: str, digest: str, *, trusted: bool = False) -> PreparedAdapter:
        """Read an adapter again and check that its content is unchanged.

        Raises:
            AdapterError: as for ``read``, or the content has another digest.
        """
        adapter = self.read(path, trusted=trusted)
        _check_digest(adapter.digest, digest)
        return adapter

    def _files(self, path: str, *, trusted: bool) -> tuple[Path, ...]:
        """Return the config and the weights files in an adapter's folder. Raises AdapterError."""
        given, limit = (str((self.root or Path()) / path), None) if trusted else (path, self.root)
        config, weights = find_files(find_folder(given, limit), limit)
        return config, *weights


@contextlib.contextmanager
def _as_limit() -> Iterator[None]:
    """Context manager: convert a lack of memory in the block to ``AdapterLimit``."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        # PyTorch's allocator raises RuntimeError when memory runs out, and mmap raises OSError.
        if not is_out_of_memory(error):
            raise
        raise AdapterLimit("The server has no memory to load the adapter now: try again later.") from None


def _check_digest(found: str, wanted: str) -> None:
    if found != wanted:
        raise AdapterError("The adapter's files have changed since it was loaded: load it again under its name.")


def _stamps(files: Iterable[Path]) -> list[tuple[int, ...]]:
    """Return data that distinguishes files from later files at the same paths."""
    stamps: list[tuple[int, ...]] = []
    for file in files:
        try:
            found = file.stat()
        except OSError:
            stamps.append(())
        else:
            stamps.append((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
    return stamps


def _bytes(config: Path) -> bytes:
    try:
        with config.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise AdapterError(f"{CONFIG} cannot be read: {error.strerror}.") from None
