"""Scripts written for vLLM's classes run with the import changed alone, or are refused in words.

The scripts are ours, one for each subject of vLLM's documentation of offline inference. ``MODEL`` and ``ADAPTERS`` are
given; ``LLM(...)`` is checked with its keywords and is one engine for all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rootgraft
import rootgraft.engine.offline.llm_engine
from rootgraft import LLM
from rootgraft.engine.errors import EngineError
from rootgraft.engine.offline import llm as llm_module
from rootgraft.engine.offline.offline_model import read_config

SCRIPTS = sorted(Path(__file__).with_name("vllm_scripts").glob("*.txt"))
REFUSED = "# refused: "


def run(script: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, adapters: list[Path]) -> None:
    def open_shared(model: str | None = None, **options: Any) -> LLM:
        config = read_config(model, options)
        assert config.model == str(tiny_model)
        return llm

    monkeypatch.setattr(llm_module, "LLM", open_shared)
    monkeypatch.setattr(rootgraft.engine.offline.llm_engine, "LLM", open_shared)
    code = script.read_text("utf-8").replace("from vllm", "from rootgraft")
    exec(
        compile(code, str(script), "exec", dont_inherit=True),
        {"MODEL": str(tiny_model), "ADAPTERS": [str(each) for each in adapters]},
    )


@pytest.mark.parametrize(
    "script", [each for each in SCRIPTS if not each.stem.startswith("refused")], ids=lambda s: s.stem
)
def test_a_script_of_vllm_runs(
    script: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, adapters: list[Path]
) -> None:
    run(script, llm, monkeypatch, tiny_model, adapters)


@pytest.mark.parametrize("script", [each for each in SCRIPTS if each.stem.startswith("refused")], ids=lambda s: s.stem)
def test_a_script_that_cannot_run_is_told_what_to_do(
    script: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, tiny_model: Path, adapters: list[Path]
) -> None:
    words = script.read_text("utf-8").splitlines()[0].removeprefix(REFUSED)
    with pytest.raises(EngineError) as found:
        run(script, llm, monkeypatch, tiny_model, adapters)
    assert words in str(found.value)
