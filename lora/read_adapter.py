"""Reading an adapter from a folder to factors in host memory, on a background thread."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from .adapter_weights import check_tensors, sort_tensors
from .base_projections import BaseLayout
from .config import MOST_BYTES, AdapterConfig, read_config
from .errors import AdapterError
from .own.own_weights_maker import OwnWeightsMaker
from .prepare_factors import PreparedAdapter, prepare
from .safe_paths import CONFIG, find_files, find_folder
from .safetensors_file import read_shapes, read_tensors


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters for one base model. Its methods may be called from any thread.

    Attributes:
        layout: the base model.
        max_rank: limit of a module's rank.
        max_file_bytes: limit of the weights file.
        root: the folder of relative paths, which must contain all files except those of trusted paths; None for the
            working directory and no limit.
        own_weights: makes weights in place of the base model's.
    """

    layout: BaseLayout
    max_rank: int
    max_file_bytes: int = 4 << 30
    root: Path | None = None
    own_weights: OwnWeightsMaker = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Begin to share own weights among the adapters read here."""
        object.__setattr__(self, "own_weights", OwnWeightsMaker(self.layout))

    def read(self, path: str, *, trusted: bool = False) -> PreparedAdapter:
        """Read the adapter in a folder.

        Args:
            path: of the folder.
            trusted: whether it may lead outside ``root``: set by the operator, never by a request.

        Raises:
            AdapterError: malformed, unsupported, or it does not fit the base model.
        """
        config, weights_file = self._find(path, trusted=trusted)
        try:
            tensors = read_tensors(weights_file, self.max_file_bytes)
            weights = sort_tensors(tensors, config, self.layout, self.max_rank)
            return prepare(weights, self.layout, self.own_weights.make(weights.saved, weights.modules))
        except (MemoryError, RuntimeError):  # torch's allocator raises the latter
            raise AdapterError("There is not enough memory to load the adapter.") from None

    def check(self, path: str, *, trusted: bool = False) -> None:
        """Check the config, and names and shapes of the tensors, of the adapter in a folder; values are not read.

        Raises:
            AdapterError: what ``read`` would raise for them.
        """
        config, weights_file = self._find(path, trusted=trusted)
        check_tensors(read_shapes(weights_file, self.max_file_bytes), config, self.layout, self.max_rank)

    def read_again(self, path: str, digest: str, *, trusted: bool = False) -> PreparedAdapter:
        """Read an adapter again and check that its content is unchanged.

        Raises:
            AdapterError: as for ``read``, or the content has another digest.
        """
        adapter = self.read(path, trusted=trusted)
        if adapter.digest != digest:
            raise AdapterError("The adapter's files have changed since it was loaded; load it again under its name.")
        return adapter

    def _find(self, path: str, *, trusted: bool) -> tuple[AdapterConfig, Path]:
        """Return the config and the weights file of the adapter in a folder. Raises AdapterError."""
        given, limit = (str((self.root or Path()) / path), None) if trusted else (path, self.root)
        config_file, weights_file = find_files(find_folder(given, limit), limit)
        return read_config(_bytes(config_file)), weights_file


def _bytes(config: Path) -> bytes:
    try:
        with config.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise AdapterError(f"{CONFIG} cannot be read: {error.strerror}.") from None
