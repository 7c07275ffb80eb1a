"""Calibration folder: ``rootgraft calibrate`` writes one JSON file for each calibration, and the server reads it by
name.

A file is replaced as a whole. A file that has changed is read again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RequestError, quoted
from ..whole_file import write_whole
from .calibration import Calibration
from .label_shares import LabelShares

_DIGEST = re.compile("[0-9a-f]{64}")
_MOST_BYTES = 64 << 10
_MOST_LABELS = 256
_MOST_KEPT = 1000


@dataclass(frozen=True, slots=True)
class CalibrationFile:
    """The content of a calibration file.

    Attributes:
        digest: digest of model and question.
        temperature, bias: see ``Calibration``.
        model, question: the model and the question to which the calibration applies. The server does not use these and
            the following fields; they inform people who read the file.
        examples, brier, ece: number of examples, and the Brier scores and the expected calibration errors before and
            after the fit.
    """

    digest: str
    temperature: float
    bias: list[float] = field(default_factory=list)
    model: str = ""
    question: dict[str, Any] = field(default_factory=dict)
    examples: int = 0
    brier: list[float] = field(default_factory=list)
    ece: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file as JSON values."""
        return asdict(self)


def write_calibration(folder: Path, name: str, content: CalibrationFile) -> Path:
    """Write a calibration, and replace an earlier one of the same name. Returns the file's path. Raises ConfigError."""
    target = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(target, (json.dumps(content.to_json(), allow_nan=False) + "\n").encode())
    except OSError as error:
        raise ConfigError(f"--calibration-dir: {target} cannot be written: {error.strerror}.") from error
    return target


class CalibrationFolder:
    """Finds calibrations by name.

    Args:
        folder: folder of the files; None if the server has no calibrations.
        option: command-line option that names the folder, for error messages.
    """

    def __init__(self, folder: Path | None, option: str = "--calibration-dir") -> None:
        self._folder = folder
        self._option = option
        self._kept: dict[str, tuple[tuple[int, int], Calibration]] = {}

    def named(self, names: Sequence[str | None], fields: Sequence[str]) -> list[NamedCalibration | None]:
        """Return the calibration of each question; None for a question that names none. Raises like ``find``."""
        return [
            None if name is None else NamedCalibration(self.find(name, field), name, field)
            for name, field in zip(names, fields, strict=True)
        ]

    def find(self, name: str, field: str) -> Calibration:
        """Return a calibration.

        Args:
            field: field of the request that names the calibration.

        Raises:
            RequestError: no calibration has this name, or its file cannot be read.
        """
        if self._folder is None:
            raise RequestError(f"There are no calibrations: {self._option} is not given.", param=field)
        path = self._folder / f"{name}.json"
        try:
            state = path.stat()
            stamp = state.st_mtime_ns, state.st_ino
            kept = self._kept.get(name)
            if kept is not None and kept[0] == stamp:
                return kept[1]
            found = _read(path.read_bytes() if state.st_size <= _MOST_BYTES else b"")
        except FileNotFoundError:
            text = f"There is no calibration {quoted(name)} here."
            raise RequestError(text, param=field, code="calibration_not_found") from None
        except (OSError, ValueError, RecursionError):
            text = f"The calibration {quoted(name)} cannot be read; its file is damaged."
            raise RequestError(text, param=field, code="calibration_damaged") from None
        while len(self._kept) >= _MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[name] = stamp, found
        return found


def _read(data: bytes) -> Calibration:
    """Parse a calibration file. Raises ValueError if it is malformed or contains a number that is not finite."""
    content = json.loads(data)
    if not isinstance(content, dict):
        raise ValueError("no object")
    digest, temperature, bias = content.get("digest"), content.get("temperature"), content.get("bias", [])
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError("no digest")
    if temperature is None or not _is_number(temperature) or temperature <= 0:
        raise ValueError("no temperature")
    if not isinstance(bias, list) or len(bias) > _MOST_LABELS or not all(map(_is_number, bias)):
        raise ValueError("no bias")
    return Calibration(digest, float(temperature), tuple(map(float, bias)))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


@dataclass(frozen=True, slots=True)
class NamedCalibration:
    """A calibration with its name, and the field of the request that names it."""

    calibration: Calibration
    name: str
    field: str

    def apply(self, shares: LabelShares, digest: str | None) -> LabelShares:
        """Return the calibrated shares of a question's labels. Raises RequestError like ``check``."""
        self.check(digest, len(shares.shares))
        return self.calibration.apply(shares)

    def check(self, digest: str | None, num_labels: int) -> None:
        """Check that this calibration was fitted for a question and a model.

        Args:
            digest: digest of the model and the question; None if the model's content is not known.

        Raises:
            RequestError: the calibration was fitted for another question or another model.
        """
        if self.calibration.digest != digest or len(self.calibration.bias) not in (0, num_labels):
            raise RequestError(
                f"The calibration {quoted(self.name)} was fitted for another question, or for other weights: run "
                "rootgraft calibrate again.",
                param=self.field,
                code="calibration_mismatch",
            )
