"""Answer room: counts the answers of unfinished batches in their owners' shares of the stored files."""

from __future__ import annotations

import asyncio
import logging

from ..errors import HTTPError
from ..storage.batch_store import BatchRecord
from ..storage.file_store import FileStore

RETRY_SECONDS = 5.0  # Seconds between two checks whether the owner has deleted files.

logger = logging.getLogger(__name__)


class AnswerRoom:
    """Counts the bytes that each batch occupies in a file store with its answers. Belongs to one event loop.

    Args:
        files: the file store. The bytes are counted in its ``FileStore.answers``.
    """

    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._held: dict[str, int] = {}

    def hold(self, record: BatchRecord, size: int) -> None:
        """Set the bytes that a batch occupies: the size of its answers on disk, or 0 once they are stored as files."""
        self._files.answers.give_back(record.owner, self._held.pop(record.id, 0))
        if size:
            self._files.answers.take(record.owner, size)
            self._held[record.id] = size

    async def take(self, record: BatchRecord, size: int) -> None:
        """Reserve ``size`` bytes for an answer.

        Waits while the owner has no room; the batch's ``errors`` report this.
        """
        while True:
            try:
                self._files.check_room(record.owner, size)
                break
            except HTTPError as error:
                if not record.errors:
                    logger.warning("batch %s waits for storage space: %s", record.id, error)
                message = f"An answer waits for storage space, which the owner of the batch must free: {error.detail}"
                record.errors = [{"code": error.code, "message": message, "line": None, "param": None}]
            await asyncio.sleep(RETRY_SECONDS)
        record.errors = []
        self.hold(record, self._held.get(record.id, 0) + size)
