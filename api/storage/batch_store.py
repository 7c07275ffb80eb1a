"""What is known of a batch, kept in a file so that it goes on after a crash.

validating -> in_progress -> finalizing -> completed        every line was answered, well or not
     |             |-> cancelling -> cancelled              what was answered until then is kept
     |             `-> finalizing -> expired                the same, 24 hours after it was made
     `-> failed                                             the input is no batch of requests
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson

from .file_store import write_json

ENDED = ("completed", "failed", "cancelled", "expired")
WINDOW = 86400  # seconds


@dataclass(slots=True)
class BatchRecord:
    """A batch. Times are seconds since 1970; what comes back to clients has OpenAI's names.

    Attributes:
        owner: the tenant, empty where there are no keys.
        key: name of the key that its requests are asked with.
        outcome: the state that it is to end in.
        output_expiry: seconds after which its output is forgotten, None for the default.
    """

    owner: str
    key: str
    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    id: str = field(default_factory=lambda: f"batch_{uuid4().hex}")
    status: str = "validating"
    outcome: str = "completed"
    output_expiry: int | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelled_at: int | None = None
    expired_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: dict[str, int] = field(default_factory=dict)

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it changes any more."""
        return self.status in ENDED

    def body(self) -> dict[str, Any]:
        """The batch as OpenAI shows it."""
        own = ("owner", "key", "outcome", "output_expiry", "total", "completed", "failed", "usage", "errors")
        fields = {name: value for name, value in asdict(self).items() if name not in own}
        ready = self.has_ended
        return {
            **fields,
            "object": "batch",
            "completion_window": "24h",
            "output_file_id": self.output_file_id if ready else None,
            "error_file_id": self.error_file_id if ready else None,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": _usage(self.usage) if ready and self.usage else None,
        }


def _usage(counts: dict[str, int]) -> dict[str, Any]:
    return {
        "input_tokens": counts["input"],
        "input_tokens_details": {"cached_tokens": counts["cached"]},
        "output_tokens": counts["output"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["input"] + counts["output"],
    }


class BatchRecords:
    """The records of a folder. Belongs to one event loop.

    Args:
        folder: made if it is not there.
        clock: seconds since 1970.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._clock = clock
        found = [BatchRecord(**orjson.loads(path.read_bytes())) for path in folder.glob("batch_*.json")]
        self._records = {record.id: record for record in sorted(found, key=lambda each: (each.created_at, each.id))}
        for record in self._records.values():
            if record.has_ended:
                self.account(record).unlink(missing_ok=True)

    @property
    def running(self) -> list[BatchRecord]:
        """Those that have not ended."""
        return [record for record in self._records.values() if not record.has_ended]

    def new(self, **fields: Any) -> BatchRecord:
        """A record that is saved."""
        now = int(self._clock())
        record = BatchRecord(created_at=now, expires_at=now + WINDOW, **fields)
        self._records[record.id] = record
        self.save(record)
        return record

    def move(self, record: BatchRecord, status: str) -> None:
        """Take a batch to another state, and save it."""
        record.status = status
        setattr(record, f"{status}_at", int(self._clock()))
        self.save(record)

    def save(self, record: BatchRecord) -> None:
        """Write a record down, durably."""
        write_json(self._folder / f"{record.id}.json", asdict(record))

    def is_over(self, record: BatchRecord) -> bool:
        """Whether the batch's time is up."""
        return self._clock() >= record.expires_at

    def account(self, record: BatchRecord) -> Path:
        """The file of all its answers while it is under way."""
        return self._folder / f"{record.id}.answers"

    def get(self, owner: str, batch_id: str) -> BatchRecord | None:
        """A batch of this owner's."""
        record = self._records.get(batch_id)
        return record if record is not None and record.owner == owner else None

    def of(self, owner: str) -> list[BatchRecord]:
        """All batches of an owner, the newest first."""
        return [record for record in reversed(self._records.values()) if record.owner == owner]

    def forget(self, record: BatchRecord) -> None:
        """Delete a record."""
        self._records.pop(record.id)
        (self._folder / f"{record.id}.json").unlink(missing_ok=True)
