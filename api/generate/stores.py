"""Stores: the server's stores of responses, files, batches and usage, and its compiled validators."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine.serving.calibration_folder import CalibrationFolder
from ..batches.batch_service import BatchService, FindCaller
from ..config import ServerConfig
from ..observe.usage_ledger import UsageLedger, UsageRecorder
from ..storage.event_store import EventStore
from ..storage.response_store import ResponseStore
from ..structured.output_check import OutputValidators

if TYPE_CHECKING:
    from ..batches.internal_client import InternalClient


@dataclass(slots=True)
class Stores:
    """The server's stores for files, batches, responses and usage. All base models of a server share them.

    Attributes:
        batches: service for files and batches of clients; None without ``--batch-dir``.
        internal_client: calls the server's own routes with the lines of batches. Set by ``create_app``.
        ledger: usage ledger; None without ``--usage-ledger``, and in a gateway.
        relay: in a gateway, sends the usage of each request to the ledger of the main process; else None.
        validators: compiled validators of JSON Schemas, which check answers.
        calibrations: calibrations of typed questions.
    """

    responses: ResponseStore
    events: EventStore
    batches: BatchService | None = None
    internal_client: InternalClient | None = None
    ledger: UsageLedger | None = None
    relay: UsageRecorder | None = None
    validators: OutputValidators = field(default_factory=OutputValidators)
    calibrations: CalibrationFolder = field(default_factory=lambda: CalibrationFolder(None))

    @classmethod
    def in_memory(cls, options: ServerConfig) -> Stores:
        """Create stores that open no file."""
        responses = ResponseStore(options.max_stored_response_bytes, options.stored_response_ttl)
        stores = cls(responses, EventStore(options.max_stored_event_bytes, options.stored_event_ttl))
        if options.calibration_dir is not None:
            stores.calibrations = CalibrationFolder(Path(options.calibration_dir))
        return stores

    @classmethod
    def open(cls, options: ServerConfig, find_caller: FindCaller) -> Stores:
        """Open the stores that the options name.

        Args:
            find_caller: returns the caller of a batch.

        Raises:
            ConfigError: a store cannot be opened.
        """
        stores = cls.in_memory(options)
        if options.usage_ledger is not None:
            stores.ledger = UsageLedger(Path(options.usage_ledger))
        if options.batch_dir is not None:
            limits = options.max_stored_file_bytes, find_caller, options.max_file_bytes, options.max_request_bytes
            stores.batches = BatchService(Path(options.batch_dir), *limits)
        return stores

    @property
    def recorder(self) -> UsageRecorder | None:
        """The object that records the usage of each request; None if usage is not recorded."""
        return self.relay if self.ledger is None else self.ledger

    def stats(self) -> dict[str, float]:
        """Return gauges and counters for the metrics."""
        lost, waiting = (0, 0) if self.ledger is None else (self.ledger.num_lost, self.ledger.num_waiting)
        batches = {} if self.batches is None else self.batches.stats()
        return {
            **self.responses.stats(),
            **self.events.stats(),
            **batches,
            "ledger_lost": lost,
            "ledger_waiting": waiting,
        }
