"""Answer room: the bytes that answers of batches take of their owners' share of the files, until they are files."""

from __future__ import annotations

import asyncio
import logging

from ..errors import HTTPError
from ..storage.batch_store import BatchRecord
from ..storage.file_store import FileStore

RETRY_SECONDS = 5.0  # seconds between two looks whether the owner has made room

logger = logging.getLogger(__name__)


class AnswerRoom:
    """What batches hold of a file store for their answers. Belongs to one event loop.

    Args:
        files: store of which it is taken, in ``FileStore.answers``.
    """

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._held: dict[str, int] = {}

    def hold(self, record: BatchRecord, size: int) -> None:
        """Hold so many bytes for a batch in all: those that are on the disk, or 0 once they are files."""
        self._files.answers.give_back(record.owner, self._held.pop(record.id, 0))
        if size:
            self._files.answers.take(record.owner, size)
            self._held[record.id] = size

    async def take(self, record: BatchRecord, size: int) -> None:
        """Take bytes that are about to be written, or wait until the owner has made room, as the batch tells then."""
        while True:
            try:
                self._files.check_room(record.owner, size)
                break
            except HTTPError as error:
                if not record.errors:
                    logger.warning("batch %s waits for room: %s", record.id, error)
                message = f"An answer waits for room, which the owner of the batch has to make: {error.detail}"
                record.errors = [{"code": error.code, "message": message, "line": None, "param": None}]
            await asyncio.sleep(RETRY_SECONDS)
        record.errors = []
        self.hold(record, self._held.get(record.id, 0) + size)
