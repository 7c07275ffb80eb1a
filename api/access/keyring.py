"""The keys that are valid now. The file is looked at again when it has changed, so a key can be taken back at once."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...engine.errors import ConfigError
from .api_keys import ANYBODY, Key, read_keys

LOOK_SECONDS = 0.5
"""How often the file is looked at, at most."""

logger = logging.getLogger(__name__)


class KeyRing:
    """Finds the key of a token. Belongs to one event loop.

    Args:
        given: keys of the command line.
        file: more of them; see ``keys.read_keys``.
        clock: seconds, monotonic.

    Raises:
        ConfigError: the file cannot be taken at the start.
    """

    def __init__(self, given: Sequence[str], file: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._given = tuple(map(Key.given, given))
        self._file = file
        self._clock = clock
        self._seen = self._look()
        self._looked_at = clock()
        self._keys = self._given + (() if file is None else read_keys(file))

    @property
    def in_use(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, token: bytes) -> Key | None:
        """The key with this text; ``ANYBODY`` where no keys are in use.

        The time that it takes depends on the number of keys alone: digests are compared, in constant time, with all.
        """
        self._refresh()
        if not self._keys:
            return ANYBODY
        digest = hashlib.sha256(token).digest()
        matches = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        return matches[0] if matches else None

    def named(self, name: str) -> Key | None:
        """The key of this name, if it is valid now; ``ANYBODY`` has none, where no keys are in use."""
        self._refresh()
        if not self._keys:
            return None if name else ANYBODY
        return next((key for key in self._keys if key.name == name), None)

    def _refresh(self) -> None:
        """Read the file anew if it has changed. If it cannot be taken, all stays as it was, and the log says why."""
        if self._file is None or self._clock() < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = self._clock()
        seen = self._look()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._keys = self._given + read_keys(self._file)
            logger.info("the file with keys has changed: %d keys are valid now", len(self._keys))
        except ConfigError as error:
            logger.error("the file with keys has changed and cannot be taken, so the keys stay as they were: %s", error)

    def _look(self) -> tuple[int, int, int] | None:
        """What tells one state of the file from another; None if it is not there."""
        try:
            found = None if self._file is None else self._file.stat()
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
