"""Files replaced as a whole, where a write that fails leaves the file as it was, and files that one user may read."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO


def open_private(path: str, flags: int) -> int:
    """Open a file, as an opener of ``open``; no other user of the machine may read one that this makes."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing; it replaces ``path`` when the block ends without an error.

    If ``path`` exists, its mode and owner are kept, and a symbolic link remains a link to the new content. A pipe,
    ``/dev/stdout`` or any other file that is not a regular file is written directly.

    Args:
        mode: permissions of a new file, before the umask.

    Raises:
        OSError: the file cannot be written; the temporary file is removed.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as out:
            yield out
        return
    part = target.with_name(f".{secrets.token_hex(8)}.part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as out:
            with suppress(FileNotFoundError):
                before = target.stat()
                os.fchmod(handle, before.st_mode & 0o777)
                with suppress(PermissionError):
                    os.fchown(handle, before.st_uid, before.st_gid)
            yield out
            out.flush()
            os.fsync(handle)
        os.replace(part, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(part)
        raise


def write_whole(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace a file by one with this content, or make one. Raises OSError as ``replacing`` does."""
    with replacing(path, mode) as out:
        out.write(content)
