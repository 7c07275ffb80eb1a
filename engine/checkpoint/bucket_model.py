"""Base models in buckets: ``s3://BUCKET/FOLDER`` in Hugging Face format, or ``s3://BUCKET/FILE.gguf``.

    buckets/PLACE/VERSION/      a whole model, by the ETags and sizes of its files
    buckets/PLACE/partial/      an unfinished download, which is resumed
    buckets/PLACE/latest        the version seen last, which is used while the store does not answer
    buckets/PLACE/place         the bucket and folder or file; PLACE is a hash of it

A version gets its name by one rename, once all its files are whole. Older versions are kept, as processes may read
them.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ModelError
from .bucket_files import open_buckets

Progress = Callable[[str, int, int], None]

_PLACE = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](?:/[A-Za-z0-9][\w.+=-]*)+", re.ASCII)
_PREFIX = "s3://"
_FOLDER = "buckets"
_PLACE_NAME = "place"
_LONGEST = 1024
PART_BYTES = 8 << 20  # bytes of one request
_NEEDS_EXTRA = "Models at s3:// need the package s3fs: install the extra s3 (pip install 'rootgraft[s3]')."

logger = logging.getLogger("rootgraft.models")


@dataclass(frozen=True, slots=True)
class _BucketFile:
    """A file of a model: its local name, its address in the store, its size in bytes, and its ETag."""

    name: str
    address: str
    size: int
    etag: str


def is_in_bucket(model: str | None) -> bool:
    """Return whether a model's name is a place in a bucket."""
    return model is not None and model.startswith(_PREFIX)


def fetch_from_bucket(
    model: str,
    cache: Path,
    patterns: tuple[list[str], list[str]],
    progress: Progress | None = None,
    *,
    on_machine: bool = False,
) -> Path:
    """Return the folder or GGUF file of a model in a bucket; download it if this version is not on this machine.

    Args:
        cache: folder of downloaded models.
        patterns: patterns of the file names in a folder that are wanted, and patterns of the names that are not.
        progress: called during downloads.
        on_machine: whether to return the version that was seen last, without asking the store.

    Raises:
        ModelError: there is no such model, access to it is denied, or the store does not answer and no version was seen
            before.
    """
    place = model.removeprefix(_PREFIX).removesuffix("/")
    if len(place) > _LONGEST or not _PLACE.fullmatch(place):
        raise ModelError(f"--model: {model} is not s3://BUCKET/FOLDER or s3://BUCKET/FILE.gguf.")
    folder = cache / _FOLDER / hashlib.sha256(place.encode()).hexdigest()[:32]
    if on_machine:
        return _latest(folder, model)
    try:
        files = _Store(place).list(*patterns)
    except ConnectionError as error:
        logger.warning("%s", error)
        return _latest(folder, model, str(error))
    return _kept(folder, place, files, progress)


def _latest(folder: Path, model: str, fault: str = "") -> Path:
    try:
        name = (folder / "latest").read_text()
    except OSError:
        text = fault or f"{model} is not on this machine. Try: rootgraft pull {shlex.quote(model)}"
        raise ModelError(f"--model: {text}") from None
    return folder / name


def _kept(folder: Path, place: str, files: list[_BucketFile], progress: Progress | None) -> Path:
    """Return the current version of a place, downloaded if need be."""
    version = hashlib.sha256(repr([(each.name, each.size, each.etag) for each in files]).encode()).hexdigest()[:32]
    base = place.rpartition("/")[2]
    is_file = len(files) == 1 and files[0].address == place
    found = Path(version) / base
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            _write(folder / _PLACE_NAME, place)
            if not (folder / version).is_dir():
                _download(folder, folder / "partial" / version / ("" if is_file else base), place, files, progress)
                os.replace(folder / "partial" / version, folder / version)
                shutil.rmtree(folder / "partial", ignore_errors=True)
            _write(folder / "latest", str(found))
    except ConnectionError as error:
        raise ModelError(
            f"--model: {error}. The part that was downloaded is kept: the next start resumes there."
        ) from error
    except OSError as error:
        raise ModelError(
            f"The model cache {folder} cannot be written: {error.strerror or error}. "
            "Try: XDG_CACHE_HOME=/tmp/cache rootgraft serve"
        ) from error
    return folder / found


@dataclass(frozen=True, slots=True)
class BucketCopy:
    """A model of a bucket on this machine.

    Attributes:
        model: name of the model, ``s3://...``.
        folder: folder of all versions of the model.
        path: the folder or GGUF file of the version seen last; None while its first download has not ended.
    """

    model: str
    folder: Path
    path: Path | None


def bucket_copies(cache: Path) -> Iterator[BucketCopy]:
    """Yield the models of buckets that are in a cache of downloaded models."""
    for noted in sorted((cache / _FOLDER).glob(f"*/{_PLACE_NAME}")):
        with suppress(OSError, ValueError):
            model = _PREFIX + noted.read_text()
            latest = noted.with_name("latest")
            path = noted.parent / latest.read_text() if latest.exists() else None
            yield BucketCopy(model, noted.parent, path if path is not None and path.exists() else None)


def remove_copy(folder: Path) -> None:
    """Delete all versions of a model of a bucket. Raises OSError."""
    with _locked(folder):
        shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write(path: Path, text: str) -> None:
    written = path.with_suffix(".new")
    written.write_text(text)
    os.replace(written, path)


def _download(folder: Path, target: Path, place: str, files: list[_BucketFile], progress: Progress | None) -> None:
    target.mkdir(parents=True, exist_ok=True)
    missing = sum(each.size for each in files) - sum(each.stat().st_size for each in target.iterdir())
    if (free := shutil.disk_usage(folder).free) < missing:
        raise ModelError(
            f"No space left for s3://{place}: {folder} has {free / 1e6:.0f} MB free, and {missing / 1e6:.0f} MB are "
            "needed. Try: XDG_CACHE_HOME=/another/disk rootgraft pull"
        )
    store = _Store(place)
    for file in files:
        store.read(file, target / file.name, progress)


class _Store:
    """Blocking client of one place in a bucket. Raises ModelError, and ConnectionError if the store does not answer."""

    def __init__(self, place: str) -> None:
        self._place = place
        try:
            self._files = open_buckets()
        except ImportError as error:
            raise ModelError(_NEEDS_EXTRA) from error

    def list(self, wanted: list[str], ignored: list[str]) -> list[_BucketFile]:
        """Return the files of a model, sorted by name."""
        listed = self._asked(self._files.ls, self._place, True)
        found = [_described(each) for each in listed if each.get("type") == "file"]
        if not any(each.address == self._place for each in found):
            wanted_names = [each for each in found if _is_wanted(each.name, wanted, ignored)]
            found = [each for each in wanted_names if each.address == f"{self._place}/{each.name}"]
        elif not self._place.endswith(".gguf"):
            raise ModelError(f"--model: s3://{self._place} is a file, but not a .gguf file.")
        if not found:
            raise ModelError(
                f"--model: there is no model at s3://{self._place}: the folder is empty, or the bucket does not exist."
            )
        return sorted(found, key=lambda each: each.name)

    def read(self, file: _BucketFile, target: Path, progress: Progress | None) -> None:
        """Append the missing rest of a file to the target; all parts must be of the version that was listed."""
        opened = partial(self._files.open, file.address, "rb", cache_type="none")
        with target.open("ab") as out, self._asked(opened) as stream:
            if (stream.details.get("ETag"), stream.size) != (file.etag, file.size):
                raise ModelError(f"--model: s3://{file.address} changed during the download. Start again.")
            stream.seek(out.tell())
            while out.tell() < file.size:
                if not (part := self._asked(stream.read, PART_BYTES)):
                    raise ConnectionError(f"s3://{file.address} has ended early")
                out.write(part)
                if progress is not None:
                    progress(file.name, out.tell(), file.size)

    def _asked(self, call: Any, *arguments: Any) -> Any:
        from botocore.exceptions import NoCredentialsError

        place = f"s3://{self._place}"
        try:
            return call(*arguments)
        except FileNotFoundError as error:
            raise ModelError(
                f"--model: there is no model at {place}: the folder is empty, or the bucket does not exist."
            ) from error
        except PermissionError as error:
            raise ModelError(f"--model: {place} may not be read with this machine's credentials.") from error
        except NoCredentialsError as error:
            raise ModelError(
                f"--model: {place} may not be read without credentials: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public bucket."
            ) from error
        except Exception as error:  # those of fsspec, botocore and its HTTP client have no common base class
            if "PreconditionFailed" in str(error) or type(error).__name__ == "FileExpired":
                raise ModelError(f"--model: {place} changed during the download. Start again.") from error
            raise ConnectionError(f"the object store does not answer for {place} ({type(error).__name__})") from error


def _described(found: dict[str, Any]) -> _BucketFile:
    address = str(found["name"])
    return _BucketFile(address.rpartition("/")[2], address, int(found["size"]), str(found.get("ETag", "")))


def _is_wanted(name: str, wanted: list[str], ignored: list[str]) -> bool:
    def fits(patterns: list[str]) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in patterns)

    return name not in ("", ".", "..") and fits(wanted) and not fits(ignored)
