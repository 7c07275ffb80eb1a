"""Logging setup: text, or one JSON object in a line. In a terminal, requests are logged only if an option is set."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import orjson

FIELDS = "fields"
"""Attribute of a log record whose entries become fields of the JSON line."""

ACCESS = "rootgraft.access"
"""Name of the logger of requests."""

# Loggers of the HTTP clients that huggingface_hub uses. They write a line for each request.
_CLIENTS = ("httpx", "httpx2")
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: ``time`` (UTC), ``level``, ``logger``, and its fields or its ``message``."""

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


class TextLines(logging.Formatter):
    """Formats a record as time, level, logger and message. A request is described in words."""

    def __init__(self) -> None:
        super().__init__(_TEXT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line without the exception."""
        fields = getattr(record, FIELDS, None)
        if fields is not None:
            record.message = request_words(fields)
        return super().formatMessage(record)


def request_words(fields: Mapping[str, Any]) -> str:
    """Describe a request in words, from its fields: method, path, status, model, tokens, times and id."""
    parts = [f"{fields['method']} {fields['path']} {fields['status']} in {fields['seconds']:.2f} s"]
    parts += [f"{name} {fields[name]}" for name in ("error", "model", "adapter", "tenant") if fields.get(name)]
    if (prompt := fields.get("prompt_tokens")) is not None:
        cached = fields.get("cached_tokens")
        parts.append(f"{prompt} prompt tokens" + (f" ({cached} cached)" if cached else ""))
    if (tokens := fields.get("completion_tokens")) is not None:
        parts.append(f"{tokens} tokens")
    if (first := fields.get("first_token_seconds")) is not None:
        parts.append(f"first after {first:.2f} s")
    if (speed := fields.get("tokens_per_second")) is not None:
        parts.append(f"{speed:.1f} tokens/s")
    parts += [end if count == 1 else f"{count} {end}" for end, count in (fields.get("finished") or {}).items()]
    return ", ".join([*parts, f"id {fields['request_id']}"])


def set_up_log(level: str, form: str, *, log_requests: bool = False) -> None:
    """Log to standard error from ``level`` on, in the form ``text`` or ``json``.

    Args:
        log_requests: whether to log each request. This applies only to text in a terminal, where by default only
            requests that end in a server error are logged. All other logs have a line for each request.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level != "debug":
        for name in _CLIENTS:
            logging.getLogger(name).setLevel(logging.WARNING)
    if form == "text" and sys.stderr.isatty() and not log_requests and level != "debug":
        access = logging.getLogger(ACCESS)
        access.setLevel(max(logging.WARNING, logging.getLogger().level))
