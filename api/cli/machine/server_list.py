"""``rootgraft ps``: lists the servers that run on this machine, from their run records."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

from ...http.run_record import RunRecord, running_servers
from .machine_options import PsOptions
from .text_table import duration_text, text_table

_HEAD = ("PID", "MODEL", "STATUS", "RUNNING", "WAITING", "KV", "ADAPTERS", "UP", "ADDRESS")


def list_servers(options: PsOptions) -> int:
    """Print the running servers with model, address, adapters, load and uptime. Returns 0."""
    records = running_servers()
    if options.json:
        print(json.dumps([asdict(record) for record in records], indent=2))
    elif records:
        print(text_table(_HEAD, [_row(record) for record in records]))
    else:
        print("No server is running on this machine. Try: rootgraft serve", file=sys.stderr)
    return 0


def _row(record: RunRecord) -> tuple[str, ...]:
    load = (str(record.running), str(record.waiting), f"{record.kv_usage:.0%}", str(record.adapters))
    up = duration_text(time.time() - record.started)
    return str(record.pid), ", ".join(record.models) or "-", record.status, *load, up, record.url
