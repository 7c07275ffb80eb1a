"""Batch store: keeps the state of each batch in a JSON file, which survives crashes.

validating -> in_progress -> finalizing -> completed        every line has an answer or an error
     |             |-> cancelling -> cancelled              answers until then are kept
     |             `-> finalizing -> expired                likewise, 24 hours after creation
     `-> failed                                             the input is not a valid batch file
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from .file_store import read_records, write_json
from .steady_clock import STEADY_CLOCK

ENDED = ("completed", "failed", "cancelled", "expired")
WINDOW = 86400  # Seconds from a batch's creation to its expiry.
_TIMED = ("in_progress", "finalizing", "cancelling", "completed", "failed", "cancelled", "expired")


@dataclass(slots=True)
class BatchCounts:
    """Numbers of all, answered and failed lines of a batch, and the tokens of its answers by kind."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class BatchRecord:
    """State of a batch. Times are seconds since 1970; ``body`` has OpenAI's names.

    Attributes:
        owner: the tenant; "" without keys.
        key: name of the API key with which the batch's requests are made.
        outcome: the state in which the batch will end.
        output_expiry: seconds until the output files expire, None for the default.
        times: time at which the batch entered each state, by state.
    """

    owner: str
    key: str
    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    created_at: int
    id: str = field(default_factory=lambda: f"batch_{uuid4().hex}")
    status: str = "validating"
    outcome: str = "completed"
    output_expiry: int | None = None
    times: dict[str, int] = field(default_factory=dict)
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)
    counts: BatchCounts = field(default_factory=BatchCounts)

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    @classmethod
    def stored(cls, fields: dict[str, Any]) -> BatchRecord:
        """Convert the fields of a file to a record."""
        return cls(**{**fields, "counts": BatchCounts(**fields["counts"])})

    def body(self) -> dict[str, Any]:
        """Return the batch in OpenAI's format."""
        counts = self.counts
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "metadata": self.metadata,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{state}_at": self.times.get(state) for state in _TIMED},
            "output_file_id": self.output_file_id if self.has_ended else None,
            "error_file_id": self.error_file_id if self.has_ended else None,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "request_counts": {"total": counts.total, "completed": counts.completed, "failed": counts.failed},
            "usage": _usage(counts.usage) if self.has_ended and counts.usage else None,
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
    """Batch records of a folder. Belongs to one event loop.

    Args:
        folder: folder of the records; created if missing.
        clock: returns seconds since 1970.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = STEADY_CLOCK) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._clock = clock
        loaded, _ = read_records(folder, "batch_*.json", BatchRecord.stored)
        self._records = {record.id: record for record in sorted(loaded, key=lambda each: (each.created_at, each.id))}
        for record in self._records.values():
            if record.has_ended:
                self.answers_path(record).unlink(missing_ok=True)

    @property
    def running(self) -> list[BatchRecord]:
        return [record for record in self._records.values() if not record.has_ended]

    def new(self, **fields: Any) -> BatchRecord:
        """Create and save a record. After an OSError, no record exists."""
        record = BatchRecord(created_at=int(self._clock()), **fields)
        self.save(record)
        self._records[record.id] = record
        return record

    def move(self, record: BatchRecord, status: str) -> None:
        """Set the state and its time, and save the record. After an OSError, the state is unchanged."""
        before = record.status
        self.mark(record, status)
        try:
            self.save(record)
        except OSError:
            record.status = before
            del record.times[status]
            raise

    def mark(self, record: BatchRecord, status: str) -> None:
        """Set the state and its time in memory, without saving the record."""
        record.status = status
        record.times[status] = int(self._clock())

    def save(self, record: BatchRecord) -> None:
        write_json(self._folder / f"{record.id}.json", asdict(record))

    def is_over(self, record: BatchRecord) -> bool:
        return self._clock() >= record.expires_at

    def answers_path(self, record: BatchRecord) -> Path:
        return self._folder / f"{record.id}.answers"

    def get(self, owner: str, batch_id: str) -> BatchRecord | None:
        record = self._records.get(batch_id)
        return record if record is not None and record.owner == owner else None

    def of(self, owner: str) -> list[BatchRecord]:
        """Return all batches of an owner, the newest first."""
        return [record for record in reversed(self._records.values()) if record.owner == owner]

    def forget(self, record: BatchRecord) -> None:
        self._records.pop(record.id)
        (self._folder / f"{record.id}.json").unlink(missing_ok=True)
