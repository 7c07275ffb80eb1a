"""From a folder to an adapter ready for a slot: the whole way, in the background."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .adapter_weights import sort_tensors
from .base_projections import BaseLayout
from .config import MOST_BYTES, read_config
from .errors import AdapterError
from .prepare_factors import PreparedAdapter, prepare
from .safe_paths import CONFIG, find_files, find_folder
from .safetensors_file import read_tensors


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters for one base model. Its methods may be called from any thread.

    Attributes:
        layout: the base model.
        max_rank: the largest rank of a module that is taken.
        max_file_bytes: the largest file of weights that is read.
        root: the folder that paths are relative to, and that no adapter's files may lie outside of, but for those of a
            trusted path; None for the working directory and no limit.
    """

    layout: BaseLayout
    max_rank: int
    max_file_bytes: int = 4 << 30
    root: Path | None = None

    def read(self, path: str, *, trusted: bool = False) -> PreparedAdapter:
        """The adapter in a folder.

        Args:
            path: of the folder.
            trusted: whether it may lead outside ``root``: the operator's word, not a request's.

        Raises:
            AdapterError: it is malformed, asks for what is not computed, or does not fit the base model.
        """
        given, limit = (str((self.root or Path()) / path), None) if trusted else (path, self.root)
        config_file, weights_file = find_files(find_folder(given, limit), limit)
        config = read_config(_bytes(config_file))
        try:
            tensors = read_tensors(weights_file, self.max_file_bytes)
            return prepare(sort_tensors(tensors, config, self.layout, self.max_rank), self.layout)
        except (MemoryError, RuntimeError):  # torch's allocator raises the latter
            raise AdapterError("There is not enough memory to load the adapter.") from None

    def read_again(self, path: str, digest: str, *, trusted: bool = False) -> PreparedAdapter:
        """The same for one whose content is known.

        Raises:
            AdapterError: as for ``read``, or the content is no longer that.
        """
        adapter = self.read(path, trusted=trusted)
        if adapter.digest != digest:
            raise AdapterError("The adapter's files have changed since it was loaded; load it again under its name.")
        return adapter


def _bytes(config: Path) -> bytes:
    try:
        with config.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise AdapterError(f"{CONFIG} cannot be read: {error.strerror}.") from None
