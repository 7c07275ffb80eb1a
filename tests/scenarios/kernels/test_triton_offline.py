"""Every kernel compiles for every architecture, and none needs more of it than it did when the golden file was written.

After a change that is meant: ``python tests/support/kernels/triton_offline.py --write-golden``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_the_golden_file_has_all_architectures():
    """Every variant of sm_80, 86, 89 and 90; of the others at least the first of each kernel."""
    needs = golden()
    assert needs.keys() == {f"sm_{arch}" for arch in triton_offline.ARCHITECTURES}
    assert needs["sm_80"].keys() == needs["sm_86"].keys() == needs["sm_89"].keys() == needs["sm_90"].keys()
    kernels = {name.partition("/")[0] for name in needs["sm_90"]}
    for arch, found in needs.items():
        assert found.keys() <= needs["sm_90"].keys() and {name.partition("/")[0] for name in found} == kernels, arch


def test_what_attention_spills_on_sm_86():
    """Where tiles of sm_90 would spill registers; but decode spills up to 24 bytes for heads of 64 and KV of 8 bits."""
    found = {name: need for name, need in golden()["sm_86"].items() if name.startswith("attention")}
    assert {name: need["spills"] for name, need in found.items() if need["spills"]} == {
        "attention_decode/bf16-64": 8,
        "attention_decode/bf16-128-int8-kv": 24,
        "attention_decode/bf16-128-fp8-kv": 24,
    }


@pytest.mark.sample
def test_latent_attention_fits_a_card_of_99_kib():
    found = compile_offline("--only", "attention", "--latent", "--for", "89")
    assert_within_limits(found)
    assert not grown(found) and len(found["sm_89"]) >= 4
