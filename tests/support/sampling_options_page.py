"""Writes the rows of ``docs/reference/api.md`` on sampling options, from the table that requests are checked by.

PYTHONPATH=tests python tests/support/sampling_options_page.py
"""

from __future__ import annotations

import re
from pathlib import Path

from rootgraft.engine.sampling_options import OPTIONS, SamplingOption

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api.md"
HEADING = "## Sampling options\n"
_INTRODUCTION = """
Fields of chats, completions, responses and messages, and of the `SamplingParams` of `LLM`. Values beyond the bounds are
a 400 that names the field. This section is made of the table that requests are checked by
(`tests/support/sampling_options_page.py`).
"""


def rewritten(page: str) -> str:
    """Return the page with its section and its rows as the table says."""
    names = ", ".join(f"`{option.name}`" for option in OPTIONS)
    told = r"| supported | see [sampling options](#sampling-options)"
    page = re.sub(
        r"^\| `temperature`.*?\| supported \| see \[sampling options\]\(#sampling-options\)",
        f"| {names} {told}",
        page,
        flags=re.M,
    )
    before, _, rest = page.partition(HEADING)
    _, heading, after = rest.partition("\n## ")
    return before + HEADING + _section() + heading + after


def _section() -> str:
    rows = [_INTRODUCTION, "| option | default | bounds | |", "|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, OPTIONS), ""])


def _row(option: SamplingOption) -> str:
    bounds = f"{'above ' if option.is_above_low else ''}{option.low:g} to {_number(option.high)}"
    default = f"{option.neutral:g}" + (", or [the model's](#defaults-of-the-model)" if option.recommended else "")
    return f"| `{option.name}` | {default} | {bounds} | {option.about} |"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text("utf-8")), "utf-8")
