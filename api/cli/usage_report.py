"""``rootgraft usage``: prints the usage in a server's ledger as a table, CSV or JSON, with or without prices.

A file of prices has a table for each model or adapter, and ``"*"`` for all others, in any currency:

    [models."*"]
    prompt = 0.10        # a million tokens of prompts that were not cached
    cached = 0.01        # default: as prompt
    completion = 0.40

The price of a model is also that of its answers in place of another one, which the ledger calls ``small (for big)``,
and of the versions of a catalogue's name, such as ``sql@1a2b3c4d5e6f``, unless the file names these themselves.
"""

from __future__ import annotations

import csv
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from ...engine.errors import ConfigError
from ..access.api_keys import read_entries
from ..observe.usage_ledger import DailyUsage, read_ledger
from ..protocol.base import StrictModel
from .machine.text_table import text_table
from .options import UsageOptions

_COLUMNS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
_MILLION = Decimal(1_000_000)
_VERSION = re.compile(r"@[0-9a-f]{12}$")

Price = Annotated[Decimal, Field(ge=0, le=1_000_000, strict=False, allow_inf_nan=False)]


class ModelPrices(StrictModel):
    """Prices of a million tokens. ``cached`` is the price of cached prompt tokens, by default that of ``prompt``."""

    prompt: Price
    completion: Price
    cached: Price | None = None

    def cost(self, usage: DailyUsage) -> Decimal:
        """Return the price of a row of the ledger."""
        cached = self.prompt if self.cached is None else self.cached
        new = usage.prompt_tokens - usage.cached_tokens
        return (new * self.prompt + usage.cached_tokens * cached + usage.completion_tokens * self.completion) / _MILLION


class PriceFile(StrictModel):
    """The file of ``--prices``."""

    models: Annotated[dict[str, ModelPrices], Field(min_length=1)]


@dataclass(slots=True)
class _Sum:
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: Decimal = Decimal(0)


def report_usage(options: UsageOptions) -> int:
    """Print the sums of a ledger. Returns 0. Raises ConfigError if a file is unusable, or a model has no price."""
    prices = None if options.prices is None else _read_prices(Path(options.prices))
    groups = _Groups(options)
    sums: dict[str, _Sum] = {}
    for usage in read_ledger(Path(options.usage_ledger), options.since, options.until):
        found = sums.setdefault(groups.of(usage), _Sum())
        for column in _COLUMNS:
            setattr(found, column, getattr(found, column) + getattr(usage, column))
        if prices is not None:
            found.cost += _prices_of(usage.model, prices).cost(usage)
    columns = (*_COLUMNS, "cost") if prices is not None else _COLUMNS
    rows = [(name, *(getattr(sums[name], column) for column in columns)) for name in sorted(sums)]
    _print(options, (options.by, *columns), rows)
    return 0


class _Groups:
    """Names of the rows for which usage is summed."""

    def __init__(self, options: UsageOptions) -> None:
        self._by = options.by
        entries = read_entries(Path(options.api_key_file)) if options.api_key_file and options.by == "tenant" else ()
        self._tenants = {entry.name: entry.tenant or entry.name for entry in entries}

    def of(self, usage: DailyUsage) -> str:
        if self._by == "tenant":
            # The ledger contains only the key's name, and the tenant of a revoked key is unknown.
            return self._tenants.get(usage.key, usage.key)
        if self._by == "month":
            return usage.day[:7]
        return {"day": usage.day, "key": usage.key}.get(self._by, usage.model)


def _print(options: UsageOptions, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    if options.json:
        print(json.dumps([dict(zip(head, row, strict=True)) for row in rows], indent=2, default=_number))
    elif options.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(rows)
    else:
        shown = [tuple(_cell(value) for value in row) for row in rows]
        print(text_table([name.upper().replace("_", " ") for name in head], shown))


def _number(value: Decimal) -> float:
    return float(value)


def _cell(value: object) -> str:
    if isinstance(value, Decimal):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value) or "(no key)"


def _read_prices(path: Path) -> Mapping[str, ModelPrices]:
    try:
        return PriceFile.model_validate(tomllib.loads(path.read_text("utf-8-sig"))).models
    except OSError as error:
        raise ConfigError(f"--prices: {path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--prices: {'.'.join(map(str, first['loc'])) or path}: {first['msg']}.") from None
    except ValueError as error:
        raise ConfigError(f"--prices: {path} is not valid TOML: {error}.") from None


def _prices_of(model: str, prices: Mapping[str, ModelPrices]) -> ModelPrices:
    """Return the prices of the model of a row: of its whole name, or of the model that has answered."""
    # "small (for big)" was answered by small, and "sql@1a2b3c4d5e6f" by a version of the catalogue's sql.
    answered = model.partition(" (for ")[0]
    names = (model, answered, _VERSION.sub("", answered), "*")
    found = next((prices[name] for name in names if name in prices), None)
    if found is None:
        raise ConfigError(f'--prices has no price for {model}, and none for "*", the default for other models.')
    return found
