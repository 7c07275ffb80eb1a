"""Logging setup: text, or one JSON object a line."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import orjson

FIELDS = "fields"
"""Attribute of a log record whose entries become fields of the JSON line."""

# Loggers of the HTTP clients that huggingface_hub uses: they write a line for each request.
_CLIENTS = ("httpx", "httpx2")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """One object a line: ``time`` (UTC), ``level``, ``logger``, then the record's fields, or else its ``message``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its newline."""
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
    """Log to standard error from ``level`` on, in the form ``text`` or ``json``."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level != "debug":
        for name in _CLIENTS:
            logging.getLogger(name).setLevel(logging.WARNING)
