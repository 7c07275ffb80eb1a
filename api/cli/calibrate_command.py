"""``rootgraft calibrate``: fit a calibration of a typed question to labelled lines, using a server's own answers.

Each line of the data is an object with ``input``, as in ``POST /v1/decisions``, and ``answer``, the right answer: true
or false for a predicate, the value of a choice, the label or number of a level.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ...engine.errors import ConfigError
from ...engine.model_tools.fit_calibration import LEAST_EXAMPLES, CalibrationFit, fit_calibration
from ...engine.serving.calibration_folder import CalibrationFile, write_calibration
from .options import CalibrateOptions, RemoteOptions
from .remote_server import RemoteServer

_AT_A_TIME = 8
_MOST_BYTES = 1 << 30


def calibrate(remote: RemoteOptions, options: CalibrateOptions) -> int:
    """Ask the server the question for each labelled line, fit a calibration to its answers, and write it. Returns 0.

    The quality of the calibration is printed.

    Raises:
        ConfigError: a file is malformed or cannot be read or written, or there are too few examples.
        RemoteError: the server is not reachable, or refuses a line.
    """
    question = _object(options.question, Path(options.question))
    examples = [_example(question, Path(options.data), *each) for each in enumerate(_lines(Path(options.data)), 1)]
    if len(examples) < LEAST_EXAMPLES:
        raise ConfigError(f"{options.data} has {len(examples)} lines; at least {LEAST_EXAMPLES} are needed.")
    model, answers = asyncio.run(_ask(remote, options, question, [each for each, _ in examples]))
    digests = {each["digest"] for each in answers}
    if len(digests) > 1 or None in digests:
        raise ConfigError("The model was changed during the calibration: try again.")
    shares, labels = np.array([_shares(each) for each in answers]), np.array([label for _, label in examples])
    fit = fit_calibration(shares, labels, with_bias=options.bias)
    before, after = fit.before, fit.after
    content = CalibrationFile(
        digest=digests.pop(),
        temperature=fit.temperature,
        bias=list(fit.bias),
        model=model,
        question=question,
        examples=len(examples),
        brier=[before.brier, after.brier],
        ece=[before.ece, after.ece],
    )
    path = write_calibration(Path(options.calibration_dir), options.name, content)
    if options.json:
        print(json.dumps({"file": str(path), **content.to_json()}))
    else:
        print(_report(path, options.name, fit, len(examples)))
    return 0


def _report(path: Path, name: str, fit: CalibrationFit, num_examples: int) -> str:
    lines = [
        f"{path}: temperature {fit.temperature:.3f}" + (f", bias {_row(fit.bias)}" if fit.bias else ""),
        f"on {num_examples} examples, each evaluated by a fit without it (cross-validation):",
        f"{'':28}before   after",
        f"Brier score                 {fit.before.brier:6.4f}  {fit.after.brier:6.4f}",
        f"expected calibration error  {fit.before.ece:6.4f}  {fit.after.ece:6.4f}",
        f'To use it, add "calibration": "{name}" to the question.',
    ]
    if fit.after.brier >= fit.before.brier:
        lines.append("The calibration does not improve the probabilities (Brier score): do not use it.")
    return "\n".join(lines)


def _row(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


async def _ask(
    remote: RemoteOptions, options: CalibrateOptions, question: dict[str, Any], inputs: list[Any]
) -> tuple[str, list[dict[str, Any]]]:
    """Return the model's name and its answer to each input."""
    limit = asyncio.Semaphore(_AT_A_TIME)
    async with RemoteServer.connect(remote) as server:
        with tqdm(total=len(inputs), unit="line", disable=not sys.stderr.isatty(), leave=False) as bar:

            async def ask(text: Any) -> dict[str, Any]:
                body = {"model": server.model, "input": text, "questions": [question]}
                async with limit:
                    found = await server.call("POST", "decisions", {**body, "answer_with": options.answer_with})
                bar.update()
                answer: dict[str, Any] = found["answers"][0]
                return answer

            return server.model, await asyncio.gather(*map(ask, inputs))


def _shares(answer: dict[str, Any]) -> list[float]:
    """Return the probabilities of an answer in the order of the question's labels."""
    if answer["type"] == "predicate":
        return [answer["probability"], 1.0 - answer["probability"]]
    return [each["probability"] for each in answer["probabilities"]]


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"--data: {path} has more than {_MOST_BYTES >> 20} MiB.")
        return [line for line in path.read_text("utf-8-sig").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data: {path} cannot be read: {error}.") from error


def _object(option: str, path: Path) -> dict[str, Any]:
    """Return the question from a file. Raises ConfigError."""
    try:
        found = json.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--question: {option} cannot be read as JSON: {error}.") from error
    if not isinstance(found, dict) or found.get("type") not in ("predicate", "choice", "score"):
        raise ConfigError(f"--question: {option} must be an object whose type is predicate, choice or score.")
    for name in ("calibration", "model"):
        if name in found:
            raise ConfigError(f"--question: {option} must not contain {name!r}: set the model with --model.")
    return found


def _example(question: dict[str, Any], path: Path, number: int, line: str) -> tuple[Any, int]:
    """Return the input of a line and the index of its right label. Raises ConfigError."""
    try:
        found = json.loads(line)
        labels = _labels(question)
        return found["input"], next(at for at, names in enumerate(labels) if _is_one(found["answer"], names))
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"--data: line {number} of {path} must be an object with 'input' and 'answer'.") from None
    except StopIteration:
        raise ConfigError(f"--data: line {number} of {path} has an answer that the question does not allow.") from None


def _labels(question: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the spellings of each label of a question that the data may have."""
    if question["type"] == "predicate":
        return [(True,), (False,)]
    if question["type"] == "choice":
        return [(each["value"],) for each in question["choices"]]
    return [(each["label"], index) for index, each in enumerate(question["levels"])]


def _is_one(answer: Any, names: tuple[Any, ...]) -> bool:
    return any(type(answer) is type(name) and answer == name for name in names)
