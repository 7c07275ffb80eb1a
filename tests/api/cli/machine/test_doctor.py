# ruff: noqa: E501 (facts of machines)
"""`rootgraft doctor`: machines made of files, broken installations, the report in 80 columns, and its exit code."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import psutil
import pytest
from gguf import GGMLQuantizationType
from support.models.small_gguf import SHAPES, tensors
from support.models.small_gguf import write as write_gguf

from rootgraft.api.cli.machine import doctor_checks
from rootgraft.api.cli.machine.doctor import report
from rootgraft.api.cli.machine.doctor_checks import (
    Finding,
    check_cores,
    check_cpu,
    check_gpu,
    check_kernels,
    check_memory,
    check_model,
    check_named,
    check_open_files,
    check_packages,
    check_port,
    check_published,
    check_torch,
    examine,
)
from rootgraft.api.cli.main import main
from rootgraft.api.config import ServerConfig
from rootgraft.api.http.listener import listening
from rootgraft.engine.checkpoint.published_models import published_models
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ModelError
from rootgraft.engine.machine import kernel_state as kernel_states
from rootgraft.engine.machine import software
from rootgraft.engine.machine.kernel_state import KernelState, kernel_state
from rootgraft.engine.machine.processor import Processor, processor
from rootgraft.engine.machine.resources import Cores, Memory, cores, kv_pool_bytes, memory
from rootgraft.engine.machine.software import Driver, TorchProbe, install_command, probe_torch, unmet_requirements
from rootgraft.kernels.cpu import portable_build

GIB = 1 << 30
TORCH = TorchProbe("", "2.13.0", "13.0", ())


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(content))
    return root


V2 = "0::/app/server\n"
V1 = "9:memory:/box\n3:cpu,cpuacct:/box\n0::/\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/app/server/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/app/server/cpu.max": "150000 100000"}, 1.5),
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/app/server/cpu.max": "400000 100000",
                "sys/fs/cgroup/app/cpu.max": "50000 100000",
            },
            0.5,
        ),
        (
            {"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": "200000 100000"},
            2,
        ),  # in a container the path is the host's
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": -1,
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": 100000,
            },
            None,
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": 300000,
                "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": 100000,
            },
            3,
        ),
        ({"proc/self/cgroup": "nonsense", "sys/fs/cgroup/cpu.max": "1 2 3"}, None),
    ],
)
def test_the_quota_of_cgroups(tmp_path: Path, files: dict[str, object], quota: float | None) -> None:
    assert cores(write(tmp_path, files)).quota == quota


@pytest.mark.parametrize(("affinity", "quota", "usable"), [(8, None, 8), (8, 2.9, 2), (8, 0.5, 1), (1, 4, 1)])
def test_usable_cores(affinity: int, quota: float | None, usable: int) -> None:
    found = processors(8, affinity, quota)
    assert found.usable == found.compute_threads == usable and not found.has_other_sockets


def processors(machine: int, affinity: int, quota: float | None = None) -> Cores:
    """Processors of one socket, each a core."""
    return Cores(machine, machine, affinity, quota, frozenset(range(affinity)), affinity)


def topology(sockets: int, nodes: int, cores_of_node: int) -> dict[str, object]:
    """Files of a machine whose cores have two hardware threads each, numbered as Linux does: all first ones first."""
    total, files = nodes * cores_of_node, dict[str, object]()

    def both(first: int, count: int) -> str:
        return f"{first}-{first + count - 1},{total + first}-{total + first + count - 1}\n"

    for node in range(nodes):
        files[f"sys/devices/system/node/node{node}/cpulist"] = both(node * cores_of_node, cores_of_node)
    for number in range(2 * total):
        folder, core, of_socket = f"sys/devices/system/cpu/cpu{number}/topology", number % total, total // sockets
        files[f"{folder}/thread_siblings_list"] = f"{core},{core + total}\n"
        files[f"{folder}/core_siblings_list"] = both(core // of_socket * of_socket, of_socket)
    return files


@pytest.mark.parametrize(
    ("machine", "allowed", "quota", "threads", "others"),
    [
        ((2, 2, 16), range(64), None, 16, True),  # one thread for each core of one socket
        ((2, 2, 16), range(64), 12, 12, True),
        ((1, 1, 16), range(32), None, 16, False),
        ((2, 2, 16), range(16, 32), None, 16, False),  # the second socket, one thread of each core
        ((2, 2, 16), range(12, 32), None, 16, True),  # 4 cores of the first socket, 16 of the second
        ((1, 8, 4), range(64), None, 32, False),  # each cache a NUMA node
        ((2, 8, 4), range(64), None, 16, True),
        ((8, 1, 8), range(16), None, 8, False),  # a virtual machine with a socket for each core
        ((2, 2, 2), range(8), None, 8, False),  # few processors are all used
        ((1, 1, 1), range(2), None, 2, False),
    ],
)
def test_an_engine_computes_on_the_cores_of_one_socket(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: tuple[int, int, int],
    allowed: range,
    quota: int | None,
    threads: int,
    others: bool,
) -> None:
    files = topology(*machine)
    if quota is not None:
        files |= {"proc/self/cgroup": V2, "sys/fs/cgroup/cpu.max": f"{quota}00000 100000"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(allowed))
    found = cores(write(tmp_path, files))
    assert (found.compute_threads, found.has_other_sockets) == (threads, others)
    assert found.socket <= set(allowed)
    assert ("an engine uses" in next(check_cores(found, 0.0)).value) == (threads < found.usable)


def test_processors_of_which_the_system_tells_nothing_are_cores_of_one_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(20, 40)))
    found = cores(tmp_path)
    assert (found.socket, found.socket_cores, found.compute_threads) == (frozenset(range(20, 40)), 20, 20)


@pytest.mark.parametrize(
    ("files", "limit", "left"),
    [
        ({}, None, None),
        ({"proc/self/cgroup": V2, "sys/fs/cgroup/app/server/memory.max": "max"}, None, None),
        (
            {
                "proc/self/cgroup": V2,
                "sys/fs/cgroup/app/server/memory.max": 100_000,
                "sys/fs/cgroup/app/server/memory.current": 70_000,
                "sys/fs/cgroup/app/server/memory.stat": "anon 5\ninactive_file 20000\n",
            },
            100_000,
            50_000,
        ),
        (
            {"proc/self/cgroup": V2, "sys/fs/cgroup/memory.max": 100_000, "sys/fs/cgroup/memory.current": 200_000},
            100_000,
            0,
        ),
        ({"proc/self/cgroup": V1, "sys/fs/cgroup/memory/box/memory.limit_in_bytes": 1 << 63}, None, None),
        ({"proc/self/limits": "Max address space         unlimited            unlimited            bytes"}, None, None),
        (
            {
                "proc/self/limits": "Max address space         1000000              unlimited            bytes",
                "proc/self/statm": "100 50 20 0 0 0 0",
            },
            1_000_000,
            1_000_000 - 100 * resource.getpagesize(),
        ),
        (
            {
                "proc/self/cgroup": V1,
                "sys/fs/cgroup/memory/box/memory.limit_in_bytes": 90_000,
                "sys/fs/cgroup/memory/box/memory.usage_in_bytes": 40_000,
            },
            90_000,
            50_000,
        ),
    ],
)
def test_the_memory_of_cgroups(tmp_path: Path, files: dict[str, object], limit: int | None, left: int | None) -> None:
    found = memory(write(tmp_path, files))
    assert found.machine == psutil.virtual_memory().total
    assert found.total == (limit or found.machine) and found.is_limited == (limit is not None)
    if left is not None:
        assert found.available == left


def test_a_kv_pool_keeps_to_the_limit_of_a_container() -> None:
    assert kv_pool_bytes(Memory(64 * GIB, 64 * GIB, 60 * GIB), 0.9) == 4 * GIB
    assert kv_pool_bytes(Memory(64 * GIB, 2 * GIB, 1 * GIB), 0.9) == pytest.approx(0.8 * GIB)


def test_a_processor_from_its_files(tmp_path: Path) -> None:
    cpuinfo = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: avx2 fma f16c avx512f avx512bw avx512dq avx512vl amx_tile\n\nprocessor : 1\nmodel name : Other\n"
    files = {"proc/cpuinfo": cpuinfo, "sys/kernel/mm/transparent_hugepage/enabled": "always [never]"}
    found = processor(write(tmp_path, files))
    assert (found.name, found.instruction_sets, found.huge_pages) == ("Some CPU", ("AVX2", "AVX-512"), "never")


def x86(**changes: Any) -> Processor:
    return replace(Processor("CPU", "x86_64", frozenset(("avx2", "fma", "f16c")), "madvise", ""), **changes)


def kernels(status: Any, **changes: Any) -> KernelState:
    return replace(KernelState(status, "g++ 12", Path("/c"), True, "AVX2"), **changes)


@pytest.mark.parametrize(
    ("found", "status", "text"),
    [
        (lambda: check_cpu(x86()), "ok", "CPU: AVX2"),
        (lambda: check_cpu(x86(flags=frozenset())), "slow", "No AVX2"),
        (lambda: check_cpu(x86(huge_pages="never")), "slow", "transparent_hugepage/enabled"),
        (lambda: check_cpu(x86(governor="powersave")), "note", "cpupower"),
        (lambda: check_cores(processors(64, 64), 64.0), "ok", "64 usable of 64"),
        (lambda: check_cores(processors(64, 8, 2), 1.0), "ok", "2 usable of 64, affinity allows 8, the cgroup allows 2"),
        (lambda: check_cores(processors(64, 64, 0.5), 1.0), "slow", "--cpus"),
        (lambda: check_cores(processors(4, 4), 4.1), "slow", "top -o %CPU"),
        (lambda: [check_memory(Memory(8 * GIB, 8 * GIB, 6 * GIB))], "ok", "up to 4.0 GiB for KV"),
        (lambda: [check_memory(Memory(8 * GIB, GIB, GIB // 8))], "fault", "limited by the cgroup or ulimit -v; the machine has 8.0 GiB"),
        (lambda: check_kernels(kernels("built")), "ok", "AVX2, compiled, in /c"),
        (lambda: check_kernels(kernels("compiled at start")), "note", "half a minute"),
        (lambda: check_kernels(kernels("fitting", compiler="")), "ok", "none is needed: the package contains compiled kernels | "),
        (lambda: check_kernels(kernels("fitting")), "ok", "AVX2, from the package | "),
        (lambda: check_kernels(kernels("portable", compiler="", fault="no C++ compiler")), "slow", "AVX2, from the package | They do not use all instructions of this CPU"),
        (lambda: check_kernels(kernels("missing", compiler="", fault="no C++ compiler")), "slow", "many times slower: no C++ compiler"),
        (lambda: check_kernels(kernels("missing", fault="the cache /c cannot be written")), "slow", "XDG_CACHE_HOME=/tmp/cache"),
        (lambda: [check_torch(TORCH)], "ok", "built for CUDA 13.0"),
        (lambda: [check_torch(TorchProbe("ImportError: libc10.so"))], "fault", "libc10.so. | pip install --force-reinstall 'torch"),
        (lambda: check_gpu(None, TORCH), "ok", "none: --device auto is cpu"),
        (lambda: check_gpu(Driver("580.1", ("H100",)), replace(TORCH, devices=(("H100", 80 * GIB, "9.0"),))), "ok", "80.0 GiB, compute capability 9.0"),
        (lambda: check_gpu(Driver("580.1", ("H100",)), replace(TORCH, cuda="")), "slow", "built for CPUs, so the GPU is not used"),
        (lambda: check_gpu(Driver("535.1", ("A10",)), replace(TORCH, warnings=("CUDA initialization: too old",))), "slow", "driver 535.1 does not support (CUDA initialization: too old); the CPU is used. | pip install "
            "--force-reinstall 'torch"),
        (lambda: check_gpu(Driver("470.1", ("A10",)), TORCH), "slow", "| sudo apt-get install nvidia-driver"),
        (lambda: check_gpu(Driver("", (), "NVIDIA-SMI has failed."), TORCH), "slow", "The driver does not run, so the CPU is used: NVIDIA-SMI has failed. |"),
        (lambda: [check_packages({"torch": "2", "triton": ""}, ["orjson<4,>=3.11"])], "fault", "pip install 'orjson<4,>=3.11'"),
        (lambda: [check_packages({"torch": ""}, [])], "fault", "pip install 'torch'"),
        (lambda: [check_open_files((1024, 1 << 20))], "note", "ulimit -n 65536"),
        (lambda: [check_open_files((4096, 4096))], "ok", "4096"),
    ],
)  # fmt: skip
def test_what_is_found_is_told_with_reason_and_command(
    found: Callable[[], Any], status: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor_checks, "install_command", lambda package: install_command(package, Path("/nonexistent"))
    )
    findings = list(found())
    worst = max((finding.status for finding in findings), key=("ok", "note", "slow", "fault").index)
    assert worst == status
    told = " | ".join(" | ".join((f.value, f.reason, f.command)) for f in findings)
    assert text in told
    assert all(finding.reason for finding in findings if finding.status != "ok")


def test_a_port_in_use_names_its_holder_and_another() -> None:
    with listening(ServerConfig(port=0)) as listener:
        found = check_port(ServerConfig(port=listener.socket.getsockname()[1]))
    assert found.status == "note" and f"(pid {os.getpid()})" in found.reason
    assert re.fullmatch(r"rootgraft serve --port \d+", found.command)


def test_a_torch_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for program, fault in (
        (
            "raise ImportError('libtorch_cpu.so: cannot open shared object file')",
            "ImportError: libtorch_cpu.so: cannot open",
        ),
        ("import os; os.kill(os.getpid(), 4)", "its import ended with exit status -4"),
        ("", "AttributeError"),
    ):
        (tmp_path / "torch.py").write_text(program)
        assert fault in probe_torch().fault
    assert "No such file" in probe_torch("/no/python").fault


def test_the_state_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(portable_build, "FOLDER", tmp_path / "portable")
    found = kernel_state()
    assert found.status == "compiled at start" and found.is_writable and found.cache.is_relative_to(tmp_path)
    monkeypatch.setattr(kernel_states, "_is_writable", lambda folder: False)
    assert "cannot be written" in kernel_state().fault and kernel_state().status == "missing"
    monkeypatch.setenv("PATH", str(tmp_path))
    found = kernel_state()
    assert not found.compiler and found.status == "missing"
    for name, status in (("find_portable", "portable"), ("find_fitting", "fitting")):
        monkeypatch.setattr(portable_build, name, lambda: tmp_path / "library.so")
        monkeypatch.setattr(kernel_states, "_instruction_set", lambda path: path.name)
        found = kernel_state()
        assert (found.status, found.instruction_set) == (status, "library.so")


def test_unmet_requirements_of_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        software,
        "requires",
        lambda package: ["pytest>=1", "pytest<1", "no-such-package>2; python_version > '3'", "other; extra == 'x'"],
    )
    assert unmet_requirements() == ["pytest<1", "no-such-package>2"]


def test_the_package_manager_of_the_system(tmp_path: Path) -> None:
    assert install_command("g++", tmp_path) == "sudo apt-get install g++"
    write(tmp_path, {"usr/bin/dnf": ""})
    assert install_command("g++", tmp_path) == "sudo dnf install gcc-c++"


FINDINGS = [
    Finding("Compute", "CPU", "ok", "A CPU with a long name " * 5),
    Finding(
        "Compute",
        "load",
        "slow",
        "9 on 2 cores",
        "Other processes want more than all cores; streams will stutter and wait.",
        "top",
    ),
    Finding(
        "Serving",
        "models",
        "fault",
        "none",
        "No home.",
        "XDG_CACHE_HOME=/tmp/cache rootgraft serve --with a-long-command-that-is-not-wrapped-anywhere",
    ),
]


def test_the_report_fits_80_columns_and_has_colours_where_they_are_wanted() -> None:
    plain = report(FINDINGS, 80, coloured=False)
    assert "\x1b" not in plain
    assert all(len(line) <= 80 for line in plain.splitlines() if "Try:" not in line)
    assert plain.splitlines()[-1] == "1 problem keeps a server from starting; 1 thing makes it slow."
    coloured = report(FINDINGS, 80, coloured=True)
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain and "\x1b[31mfault\x1b[0m" in coloured


@pytest.mark.parametrize("fault", ["", "ImportError: libtorch.so"])
def test_doctor_of_this_machine(
    fault: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_checks, "probe_torch", lambda: TorchProbe(fault, "2.13", "", ()))
    assert all(isinstance(finding, Finding) for finding in examine())
    code = main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (0 if found["ok"] else 1)
    assert code or not fault
    names = {finding["name"] for finding in found["findings"]}
    assert {
        "CPU",
        "cores",
        "memory",
        "compiler",
        "CPU kernels",
        "torch",
        "GPU",
        "packages",
        "port 8000",
        "open files",
        "servers",
    } <= names
    assert main(["doctor"]) == code
    assert ("keeps a server from starting" in capsys.readouterr().out) == bool(code)


def test_doctor_needs_neither_torch_nor_numpy() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = sys.modules['huggingface_hub'] = None;"
        "from rootgraft.api.cli.machine import doctor_checks as d; from rootgraft.engine.machine.software import TorchProbe;"
        "d.probe_torch = lambda: TorchProbe('No module named torch');"
        "from rootgraft.api.cli.main import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "No model can be loaded: No module named torch" in done.stdout and not done.stderr


def test_a_model_is_planned_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its storage, memory and products, for the options that a server would have."""
    kinds = dict.fromkeys((name for name, shape in SHAPES.items() if len(shape) == 2), GGMLQuantizationType.Q8_0)
    path = write_gguf(tmp_path / "small.gguf", tensors(), types=kinds)
    found = {each.name: each for each in check_model(EngineConfig(model=str(path)))}
    assert found["stored"].value.startswith("Q8_0; ") and found["model"].value.startswith(
        "small: llama, 1 layers of 64"
    )
    assert found["memory"].status == "ok"
    widened = {each.name: each for each in check_model(EngineConfig(model=str(path), quantization="widened"))}
    assert widened["computed"].value.startswith("in ")
    assert main(["doctor", str(tmp_path / "none.gguf")]) != 0
    assert "there is no folder or file" in capsys.readouterr().err


def test_a_model_of_the_hub_is_not_downloaded_for_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, **options: Any) -> str:
        assert options["local_files_only"] is True
        raise FileNotFoundError(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match=r"org/name is not on this machine\. Try: rootgraft pull org/name"):
        check_model(EngineConfig(model="org/name"))


def test_forms_of_a_published_model_are_told_without_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, **options: Any) -> str:
        assert options["local_files_only"] is True
        raise FileNotFoundError(name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    found = {each.name: each for each in check_named(EngineConfig(model="Qwen/Qwen3-8B"))}
    assert found["16 bits"].status == found["GGUF Q4_K_M"].status == "ok"
    assert found["files"].command == "rootgraft pull Qwen/Qwen3-8B"
    refused = {each.name: each for each in check_named(EngineConfig(model="zai-org/GLM-5.2:Q4_K_M"))}
    assert refused["GGUF Q4_K_M"].value == "no"
    assert "GGUF files of GlmMoeDsaForCausalLM are not supported" in refused["GGUF Q4_K_M"].reason
    assert refused["16 bits"].status == "ok"
    with pytest.raises(ModelError, match=r"org/name is not on this machine"):
        check_named(EngineConfig(model="org/name"))


def test_each_row_of_the_page_of_models_is_what_the_command_says() -> None:
    page = (Path(__file__).parents[4] / "docs" / "reference" / "models.md").read_text("utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.partition("## Published repositories")[2].partition("\n## ")[0].splitlines()
        if re.match(r"\| [\w.-]+/", line)
    ]
    assert {name for name, *_ in rows} == set(published_models())
    for name, *cells in rows:
        found = ["y" if each.status == "ok" else "n" for each in check_published(name)]
        assert found == [cell for cell in cells if cell in ("y", "n")], name
