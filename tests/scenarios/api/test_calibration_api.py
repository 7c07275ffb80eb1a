"""Calibrations: fitted by the command against a server, and applied by it to what they were fitted for alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.api.real_server import RealServer, tiny_server
from support.models.lora_models import LINEARS, base, make_adapter
from support.models.tiny_fixtures import CHAT_TEMPLATE
from support.models.tiny_tokenizers import train_byte_level, write_folder

from rootgraft.api.cli.main import main

QUESTION: dict[str, Any] = {
    "type": "choice",
    "instructions": "Which team?",
    "choices": [{"value": "a"}, {"value": "b"}],
}


@pytest.fixture(scope="module")
def server(bases: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealServer, Path]]:
    base("wordy", bases)
    write_folder(bases / "wordy", train_byte_level().to_str(), eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)
    make_adapter("wordy", bases, bases / "adapters" / "one", 1, r=2, target_modules=LINEARS)
    calibrations = tmp_path_factory.mktemp("calibrations")
    options = f"--served-model-name base --num-gpu-blocks-override 400 --enable-lora --lora-dir {bases / 'adapters'}"
    with tiny_server(bases / "wordy", *options.split(), "--calibration-dir", str(calibrations)) as started:
        yield started, calibrations


def decide(server: RealServer, question: dict[str, Any], **fields: Any) -> tuple[int, dict[str, Any]]:
    reply = server.http.post("/v1/decisions", json={"input": "Text.", "questions": [question], **fields})
    return reply.status_code, reply.json()["answers"][0] if reply.status_code == 200 else reply.json()["error"]


def fit(server: RealServer, folder: Path, tmp_path: Path, *options: str) -> int:
    """Fit by lines whose answers go against what the model says."""
    _, plain = decide(server, QUESTION, model="one")
    least = min(plain["probabilities"], key=lambda each: each["probability"])["value"]
    lines = [json.dumps({"input": f"Mail {number}.", "answer": least}) for number in range(24)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    (tmp_path / "question.json").write_text(json.dumps(QUESTION))
    url = str(server.http.base_url).rstrip("/")
    words = ["calibrate", str(tmp_path / "data.jsonl"), "--question", str(tmp_path / "question.json"), "--name", "team"]
    return main([*words, "--url", url, "--model", "one", "--calibration-dir", str(folder), *options])


def test_a_calibration_is_fitted_applied_and_held_to_its_question(
    server: tuple[RealServer, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live, folder = server
    asking = {**QUESTION, "calibration": "team"}
    assert decide(live, asking, model="one")[1]["code"] == "calibration_not_found"
    assert fit(live, folder, tmp_path, "--bias") == 0
    told = capsys.readouterr().out
    assert "Brier score" in told and '"calibration": "team"' in told
    written = json.loads((folder / "team.json").read_text())
    plain, calibrated = decide(live, QUESTION, model="one")[1], decide(live, asking, model="one")[1]
    assert "calibration" not in plain and calibrated["calibration"] == "team"
    assert calibrated["digest"] == plain["digest"] == written["digest"] and written["brier"][1] < written["brier"][0]
    weights = [
        each["probability"] ** (1 / written["temperature"]) * 2.718281828459045**bias
        for each, bias in zip(plain["probabilities"], written["bias"], strict=True)
    ]
    shown = [each["probability"] for each in calibrated["probabilities"]]
    assert shown == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-6)
    assert calibrated["choice"] != plain["choice"], "all labels said the contrary of the model"
    for other, model in ((asking, "base"), ({**asking, "instructions": "Who?"}, "one")):
        status, error = decide(live, other, model=model)
        assert (status, error["code"], error["param"]) == (400, "calibration_mismatch", "questions[0].calibration")
    check_system_one(live, folder, shown)
    (folder / "team.json").write_text("{")
    assert decide(live, asking, model="one")[1]["code"] == "calibration_damaged"


def check_system_one(live: RealServer, folder: Path, shown: list[float]) -> None:
    """The same question to the same model has the same calibration of System One."""
    asked = {"type": "choice", "instructions": "Which team?", "criteria": {"a": None, "b": None}, "calibration": "team"}
    body: dict[str, Any] = {"model": "one", "state": "Text.", "questions": {"which": asked}}
    found = live.http.post("/v1/systemone", json=body).json()
    assert list(found["answers"]["which"]["probabilities"].values()) == pytest.approx(shown, abs=1e-6)
    assert found["diagnostics"]["which"]["calibration"] == "team"
    refused = live.http.post("/v1/systemone", json={**body, "model": "base"})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "calibration_mismatch")
    assert error["param"] == "questions.which.calibration"


@pytest.mark.parametrize("name", ["../team", ".team", "", "x" * 65, "a/b", "team\n"])
def test_a_name_that_is_none_is_refused(server: tuple[RealServer, Path], name: str) -> None:
    status, error = decide(server[0], {**QUESTION, "calibration": name})
    assert status == 400 and "calibration" in error["param"]


@pytest.mark.parametrize(
    "data, question, says",
    [
        ('{"input": "x", "answer": "a"}\n' * 19, QUESTION, "19 lines; at least 20"),
        ('{"input": "x", "answer": "c"}\n' * 20, QUESTION, "line 1 of"),
        ('{"input": "x"}\n' * 20, QUESTION, "must be an object with 'input' and 'answer'"),
        ("[]\n" * 20, QUESTION, "must be an object with 'input' and 'answer'"),
        (
            '{"input": "x", "answer": 1}\n' * 20,
            {"type": "predicate", "instructions": "?"},
            "has an answer that the question does not allow",
        ),
        ("", {"type": "poem"}, "whose type is predicate, choice or score"),
        ("", {**QUESTION, "calibration": "old"}, "must not contain 'calibration'"),
    ],
)
def test_wrong_files_are_told(
    data: str, question: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.jsonl").write_text(data)
    (tmp_path / "question.json").write_text(json.dumps(question))
    words = ["calibrate", str(tmp_path / "data.jsonl"), "--question", str(tmp_path / "question.json")]
    assert main([*words, "--name", "n", "--calibration-dir", str(tmp_path)]) != 0
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
