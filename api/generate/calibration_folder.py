"""Calibration folder: one JSON file for each calibration, written by ``rootgraft calibrate`` and read by the server.

A file is replaced as a whole, and read again once it has changed.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ...engine.errors import ConfigError, RequestError, quoted
from ...engine.serving.calibration import Calibration
from ..protocol.base import StrictModel
from ..protocol.exact_json import dumps_exact, loads_exact

_MOST_BYTES = 64 << 10
_MOST_KEPT = 1000

Number = Annotated[float, Field(allow_inf_nan=False)]
Figures = Annotated[list[Number], Field(min_length=2, max_length=2)]


class CalibrationFile(StrictModel):
    """What a file holds.

    Attributes:
        digest: of model and question.
        temperature, bias: as of ``Calibration``.
        model, question: whose they are; examples, brier, ece: what the fit told, before and after. For readers alone.
    """

    digest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    temperature: Annotated[Number, Field(gt=0)]
    bias: Annotated[list[Number], Field(max_length=256, default_factory=list)]
    model: str = ""
    question: Annotated[dict[str, Any], Field(default_factory=dict)]
    examples: int = 0
    brier: Figures | None = None
    ece: Figures | None = None


def write_calibration(folder: Path, name: str, content: CalibrationFile) -> Path:
    """Write a calibration, in the place of an earlier one of its name. Returns its file. Raises ConfigError."""
    target = folder / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(prefix=f".{name}-", dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                os.fchmod(handle, 0o644)
                file.write(dumps_exact(content.model_dump()) + b"\n")
            os.replace(made, target)
        except OSError:
            os.unlink(made)
            raise
    except OSError as error:
        raise ConfigError(f"--calibration-dir: {target} cannot be written: {error.strerror}.") from error
    return target


class CalibrationFolder:
    """Finds calibrations by name.

    Args:
        folder: None where there are none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._kept: dict[str, tuple[tuple[int, int], Calibration]] = {}

    def find(self, name: str, field: str) -> Calibration:
        """Return a calibration.

        Args:
            field: the request's field that names it.

        Raises:
            RequestError: there is none of this name, or it cannot be read.
        """
        if self._folder is None:
            raise RequestError("This server has no calibrations: --calibration-dir is not given.", param=field)
        path = self._folder / f"{name}.json"
        try:
            state = path.stat()
            stamp = state.st_mtime_ns, state.st_ino
            kept = self._kept.get(name)
            if kept is not None and kept[0] == stamp:
                return kept[1]
            data = path.read_bytes() if state.st_size <= _MOST_BYTES else b""
            content = CalibrationFile.model_validate(loads_exact(data))
        except FileNotFoundError:
            text = f"There is no calibration {quoted(name)} here."
            raise RequestError(text, param=field, code="calibration_not_found") from None
        except (OSError, ValueError, ValidationError):
            text = f"The calibration {quoted(name)} cannot be read; its file is damaged."
            raise RequestError(text, param=field, code="calibration_damaged") from None
        found = Calibration(content.digest, content.temperature, tuple(content.bias))
        while len(self._kept) >= _MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[name] = stamp, found
        return found


def check_fits(found: Calibration, name: str, digest: str | None, num_labels: int, field: str) -> None:
    """Check that a calibration is for a question to a model.

    Args:
        digest: of both; None where the model's content is not known.

    Raises:
        RequestError: it is for another one.
    """
    if found.digest != digest or len(found.bias) not in (0, num_labels):
        raise RequestError(
            f"The calibration {quoted(name)} was fitted for another question, or for another content of the model: run "
            "rootgraft calibrate again.",
            param=field,
            code="calibration_mismatch",
        )
