"""``rootgraft doctor``: reports this machine's hardware and software, causes of low speed, and what to install."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from ....engine.config import EngineConfig
from .doctor_checks import Finding, check_named, examine
from .machine_options import DoctorOptions

_COLOURS = {"ok": "32", "slow": "33", "fault": "31", "note": "36"}
_NAME_WIDTH = 12


def doctor(options: DoctorOptions) -> int:
    """Print the report. Returns 0, or 1 if a server cannot start on this machine."""
    findings = examine()
    if options.model is not None:
        findings += check_named(EngineConfig(model=options.model, quantization=options.quantization))
    if not options.json:
        return print_report(findings)
    print(json.dumps({"ok": not _has_fault(findings), "findings": [asdict(each) for each in findings]}, indent=2))
    return int(_has_fault(findings))


def print_report(findings: Sequence[Finding]) -> int:
    """Print findings in the width of the terminal. Returns 0, or 1 if one of the findings is a fault."""
    print(report(findings, shutil.get_terminal_size().columns, coloured=_has_colours()))
    return int(_has_fault(findings))


def _has_fault(findings: Sequence[Finding]) -> bool:
    return any(finding.status == "fault" for finding in findings)


def report(findings: Sequence[Finding], width: int, *, coloured: bool) -> str:
    """Format findings by section, with reason and command below each problem, and a summary as the last line."""
    lines: list[str] = []
    section = ""
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", _painted(section, "1", coloured)]
        lines += _lines_of(finding, width, coloured)
    return "\n".join([*lines[1:], "", _sum(findings)])


def _lines_of(finding: Finding, width: int, coloured: bool) -> list[str]:
    status = _painted(f"{finding.status:5}", _COLOURS[finding.status], coloured)
    margin = " " * (9 + _NAME_WIDTH + 1)
    room = max(30, width - len(margin))
    first, *rest = textwrap.wrap(finding.value, room, break_on_hyphens=False) or [""]
    lines = [f"  {status}  {finding.name:{_NAME_WIDTH}} {first}", *(margin + each for each in rest)]
    lines += [margin + each for each in textwrap.wrap(finding.reason, room, break_on_hyphens=False)]
    # A command is not wrapped, so that it can be copied.
    return [*lines, *([f"{margin}Try: {_painted(finding.command, '1', coloured)}"] if finding.command else [])]


def _sum(findings: Sequence[Finding]) -> str:
    counts = Counter(finding.status for finding in findings)
    faults = {0: "A server can start here", 1: "1 problem keeps a server from starting"}
    slow = {0: "found nothing that makes it slow", 1: "1 thing makes it slow"}
    first = faults.get(counts["fault"], f"{counts['fault']} problems keep a server from starting")
    second = slow.get(counts["slow"], f"{counts['slow']} things make it slow")
    return f"{first}; {second}."


def _painted(text: str, colour: str, coloured: bool) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if coloured else text


def _has_colours() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
