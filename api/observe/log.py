"""The log, as text or as one JSON object a line."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import orjson

FIELDS = "fields"
"""Name of the attribute of a log record whose entries stand beside the others in a line of JSON."""

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``logger``, then the record's fields, or else its ``message``."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, FIELDS, None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def set_up_log(level: str, form: str) -> None:
    """Write the log to standard error, in the form ``text`` or ``json``, from this level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
