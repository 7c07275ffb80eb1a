"""``rootgraft bench step``: the parts that it tells add up to the step, and a load that does not fit is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rootgraft.api.cli.bench_step import limit, table
from rootgraft.api.cli.main import main
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.profiling import step_profiler
from rootgraft.engine.profiling.step_profiler import measure_steps
from rootgraft.engine.profiling.step_report import Part, StepLoad, StepTimes
from rootgraft.kernels import cpu, machine_limits, ops

KERNELS = {"linear", "attention", "rope and KV", "norm"}  # the activation is in a linear op
BESIDE = {"copy_pages", "draw_tokens", "flush_lines", "largest", "mask_logits"}  # a forward pass
ONCE = ("arrange_", "pack_", "widen_")  # begin the names of what is called as weights are loaded
FLAGS = ("--device", "cpu", "--num-gpu-blocks-override", "400", "--threads", "1")


@pytest.fixture(autouse=True)
def known_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that need not be measured."""
    monkeypatch.setattr(machine_limits, "reading_rate", lambda: 20e9)
    monkeypatch.setattr(machine_limits, "products_rate", lambda dtype, bytewise=False: 200e9)
    monkeypatch.setattr(machine_limits, "layer_rate", lambda layer, dtype, budget: 200e9)


def config(model: Path, **options: object) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", num_gpu_blocks_override=400, threads=1, **options)


@pytest.mark.skipif(ops.native_kernels() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "load",
    [StepLoad(3, 8, 0, 0, 2), StepLoad(0, 8, 0, 40, 2), StepLoad(2, 8, 0, 5, 3), StepLoad(3, 60, 40, 0, 2)],
    ids=str,
)
def test_the_parts_are_the_step(tiny_llama: Path, load: StepLoad) -> None:
    """Whether its passes are recorded (the first load) or not."""
    times = measure_steps(config(tiny_llama), tiny_llama, load)
    assert set(times.parts) >= KERNELS | {"schedule", "inputs", "between kernels", "head", "sample", "commit", "encode"}
    assert all(part.seconds > 0 for part in times.parts.values())
    assert sum(part.seconds for part in times.parts.values()) + times.rest == pytest.approx(times.seconds)
    assert 0 < times.rest < times.seconds
    assert times.tokens >= load.rows + (load.prefill > 0)
    assert {name for name, part in times.parts.items() if part.limit} == {"linear", "attention", "head"}
    assert {name for name, part in times.parts.items() if part.is_forward} >= KERNELS | {"head"}
    assert ops.native_kernels().library.listener is None


def test_all_products_of_weights_are_linears_or_experts() -> None:
    sources = (Path(ops.__file__).parent / "cpu").glob("native_*.py")
    bound = {name for path in sources for name in re.findall(r'bind\("(\w*linear)"', path.read_text())}
    assert bound > {"linear", "quantised_linear", "expert_linear"}
    assert {step_profiler._FAMILIES.get(name) for name in bound - {"pack_linear"}} == {"linear", "experts"}


@pytest.mark.parametrize(
    ("load", "options", "message"),
    [
        (StepLoad(65, 8, 0, 0, 2), {}, "--rows"),
        (StepLoad(64, 8, 0, 1, 2), {}, "--rows"),
        (StepLoad(2, 8, 0, 639, 2), {}, "--prefill"),
        (StepLoad(2, 1000, 0, 0, 2), {}, "--context"),
        (StepLoad(64, 50, 0, 0, 2), {}, "--context"),
    ],
)
def test_a_load_that_does_not_fit(tiny_llama: Path, load: StepLoad, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_steps(config(tiny_llama, **options), tiny_llama, load)


def test_the_command(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "times.json"
    argv = ["bench", "step", str(tiny_llama), *FLAGS, "--rows", "2", "--context", "8", "--steps", "2"]
    assert main([*argv, "--output-json", str(path)]) == 0
    assert "tokens per second" in capsys.readouterr().out
    assert json.loads(path.read_bytes())["load"] == {"rows": 2, "context": 8, "shared": 0, "prefill": 0, "steps": 2}
    assert main(["bench", "step", "--rows", "0"]) == 2
    assert "--rows and --prefill are both 0" in capsys.readouterr().err
    assert main(["bench", "step", "--context", "8", "--shared", "8"]) == 2
    assert (
        "--shared (8) must be less than --context (8): each row needs at least one token of its own."
        in capsys.readouterr().err
    )


def test_the_table() -> None:
    parts = {"schedule": Part(0.001), "linear": Part(0.006, 0.003, True), "head": Part(0.002, 0.001, True)}
    times = StepTimes(("a model",), 20e9, 300e9, 0.010, 0.008, 32.0, parts, 0.001)
    assert limit(times) == pytest.approx(0.004)
    lines = [line.split() for line in table(times).splitlines()]
    assert ["linear", "6.00", "60.0", "50"] in lines
    assert ["schedule", "1.00", "10.0"] in lines
    assert ["everything", "else", "2.00"] in lines
    assert ["tokens", "per", "second", "4000"] in lines
    assert ["%", "of", "limit", "50"] in lines


def test_every_native_call_of_a_forward_pass_has_a_name_for_people() -> None:
    sources = Path(cpu.__file__).parent.glob("*.py")
    called = {name for path in sources for name in re.findall(r'\.bind\("(\w+)"', path.read_text())}
    assert {"linear", "attention", "both_forms_linear"} <= called
    assert {name for name in called - BESIDE if not name.startswith(ONCE)} == set(step_profiler._FAMILIES)
