"""Every kernel compiles for every architecture, and none needs more of it than it did when the golden file was written.

After a change that is meant: ``python tests/support/kernels/triton_offline.py --write-golden``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton
from support.kernels import triton_offline


def compile_offline(*options: str) -> dict[str, dict[str, triton_offline.Need]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error", str(Path(triton_offline.__file__)), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["needs"]


def golden() -> dict[str, dict[str, triton_offline.Need]]:
    content = json.loads(triton_offline.GOLDEN.read_text())
    if content["triton"] != triton.__version__:
        pytest.skip(f"the golden file is of Triton {content['triton']}, this is {triton.__version__}")
    return content["needs"]


def assert_within_limits(found: dict[str, dict[str, triton_offline.Need]]) -> None:
    limits = {f"sm_{arch}": limit for arch, limit in triton_offline.SHARED_LIMIT.items()}
    for arch, needs in found.items():
        too_large = {name: need for name, need in needs.items() if need["shared"] > limits[arch]}
        assert not too_large, f"more shared memory than {arch} has"


def grown(found: dict[str, dict[str, triton_offline.Need]]) -> list[str]:
    return [
        f"{arch} {name}: {was} -> {need}"
        for arch, needs in found.items()
        for name, need in needs.items()
        if (was := golden()[arch].get(name)) is None or any(need[key] > was[key] for key in need)
    ]


def test_what_the_golden_file_has_is_within_limits():
    assert_within_limits(golden())


@pytest.mark.sample
def test_the_first_variant_of_each_kernel():
    found = compile_offline("--few", "--for", "90")
    assert_within_limits(found)
    assert not grown(found)


@pytest.mark.heavy
@pytest.mark.timeout(900)  # some hundred compilations
def test_every_variant():
    """For one architecture; for the others the first of each kernel: what differs among variants is alike on all."""
    found = compile_offline("--for", "90") | compile_offline("--few", "--for", "80", "86", "89", "100", "120")
    assert_within_limits(found)
    assert not grown(found)
    assert found["sm_90"].keys() == golden()["sm_90"].keys()


def test_the_golden_file_has_every_variant_of_all_architectures():
    needs = golden()
    assert needs.keys() == {f"sm_{arch}" for arch in triton_offline.ARCHITECTURES}
    for arch, found in needs.items():
        assert found.keys() == needs["sm_90"].keys(), arch


@pytest.mark.parametrize("arch", [80, 86, 89, 120])
def test_what_spills_where_tensor_cores_take_both_operands_from_registers(arch: int):
    """Chunks of delta nets, some bytes of decode, and of expansions of odd widths in prompts."""
    spills = {name: need["spills"] for name, need in golden()[f"sm_{arch}"].items() if need["spills"]}
    delta = {"delta_chunks/bf16-128", "delta_chunks/fp16-128"}
    assert delta <= spills.keys()
    for name in spills.keys() - delta:
        kernel = name.partition("/")[0]
        most = {"lora_expand": 24, "attention_decode": 24, "ssm_chunks": 8, "lora_shrink": 16, "invariant_linear": 8}
        assert spills[name] <= most.get(kernel, 0), name


def test_a_run_goes_on_where_the_last_one_ended(tmp_path, monkeypatch):
    """It compiles what the golden file lacks, begins nothing after its time, and keeps what there was."""
    file = tmp_path / "golden.json"
    file.write_text(json.dumps({"triton": "", "needs": {"sm_90": {"a/1": {}}, "sm_80": {"b/1": {"registers": 1}}}}))
    monkeypatch.setattr(triton_offline, "GOLDEN", file)
    compiled = []

    class Compiled:
        def __init__(self, name):
            self.name = name

        def compile(self):
            compiled.append(self.name)

    monkeypatch.setattr(triton_offline, "needs", lambda *_: {"registers": 2})
    monkeypatch.setattr(triton_offline.triton.runtime.driver, "set_active", lambda _: None)
    monkeypatch.setattr(triton_offline.launch_module, "OFFLINE_SHARED", 0)
    clock = iter(range(10))
    monkeypatch.setattr(triton_offline, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def lacking(architecture):
        return triton_offline.missing(((name, Compiled(name)) for name in ("a/1", "a/2", "a/3", "a/4")), architecture)

    found = triton_offline.compile_all(lacking, (90,), 3)  # begun at 0, looked at 1, 2 and 3
    assert compiled == ["a/2", "a/3"]
    triton_offline.write_golden(found, whole=False)
    kept = json.loads(file.read_text())["needs"]
    assert kept["sm_90"].keys() == {"a/1", "a/2", "a/3"} and kept["sm_80"] == {"b/1": {"registers": 1}}


@pytest.mark.sample
def test_latent_attention_fits_a_card_of_99_kib():
    found = compile_offline("--only", "attention", "--latent", "--for", "89")
    assert_within_limits(found)
    assert not grown(found) and len(found["sm_89"]) >= 4
