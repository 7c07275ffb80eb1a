"""What all tests share: the small real model, one thread, and Hypothesis without deadlines.

Tests use no GPU, even where there is one: the GPU's kernels run in Triton's interpreter, and are compiled in processes
of their own. With ``ROOTGRAFT_TEST_GPU=1`` those kernels run on the GPU instead (``support.kernels.gpu_copies``); the
engine on one is checked by ``benchmarks/gpu``.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import certifi
import pytest
from hypothesis import HealthCheck, settings
from support import benchmark_package
from support.engine.interrupts import interrupts
from support.models.llama_cpp_sources import models_of_llama_cpp

# First of all: the tests start hundreds of processes, and without bytecode each compiles torch again, for some seconds.
# Where none is to be written beside the sources, as in many containers, it is kept in the folder of what is built.
if sys.dont_write_bytecode:
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / "build" / "bytecode")
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Before anything imports Triton, which looks here when it is imported.
if os.environ.get("ROOTGRAFT_TEST_GPU") == "1":
    os.environ["TRITON_F32_DEFAULT"] = "ieee"  # products of fp32 tests are not to be rounded to TF32
else:
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# Before anything imports torch, whose own kernels are held down to the level that ours are.
if held := os.environ.get("ROOTGRAFT_CPU_LEVEL"):
    wide = held.startswith("avx512")
    os.environ["ATEN_CPU_CAPABILITY"] = "avx512" if wide else "avx2" if held == "avx2" else "default"
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE" if wide else "AVX2" if held == "avx2" else "SSE41"

# Before ours, which imports it without its checker of IRIs: it is the oracle of formats.
import jsonschema  # noqa: F401

from rootgraft.engine.checkpoint.locate import resolve_model

USES_GPU = "TRITON_INTERPRET" not in os.environ
if USES_GPU:
    from support.kernels import gpu_copies

    gpu_copies.install()

benchmark_package.register()
TESTS = Path(__file__).parent
BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # a machine may be: no test is to blame
settings.register_profile("local", **BUSY)
settings.register_profile("ci", **BUSY, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Share a run of all fast tests between three processes: on two cores, as each waits for what it starts.

    A run that names paths is one process, as is each of the three; heavy tests are left to whoever asks for them, as
    some want the machine to themselves.
    """
    option = config.option
    is_worker = hasattr(config, "workerinput") or "PYTEST_XDIST_WORKER" in os.environ
    if (
        not is_worker
        and config.args_source is pytest.Config.ArgsSource.TESTPATHS
        and config.pluginmanager.hasplugin("xdist")
        and option.numprocesses is None
        and option.markexpr == "not heavy"
        and not (option.usepdb or option.collectonly)
        and (os.cpu_count() or 1) > 1
    ):
        option.numprocesses, option.dist = 3, "loadfile"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without the garbage collector, which leaves what was imported alone afterwards.

    All test modules hold three million objects. Going through them took 15 of the 51 CPU seconds of a collection, and
    then two seconds at each full collection of the tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put what takes long first: processes that share a run, a file each, then end at about the same time.

    That is files with heavy tests, and those of the sources, which one process runs.
    """
    heavy = {item.path for item in items if item.get_closest_marker("heavy")}
    items.sort(key=lambda item: item.path not in heavy and item.path.parent != TESTS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have files that share a server run by one process."""
    if config.getvalue("dist") != "loadfile":
        return None
    from support.machine.file_scheduling import FilesByServer

    return FilesByServer(config, log)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread of torch, and of each engine in this process whose options name no number.

    Tiny models gain nothing from threads. And several test processes share the cores: where a pool's thread has none,
    its others wait for it at every op, some hundred times a step.

    Test modules that need torch were imported before the first fixture runs; the others are spared its import.
    """
    with pytest.MonkeyPatch.context() as patch:
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
            patch.setattr("rootgraft.engine.executor.load_weights.place_threads", lambda config: config.threads or 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def one_root_certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One certificate in place of the hundred and more that each client of httpx reads when it is made.

    That took 30 ms of processor time, thousands of times in a pass. No test asks a server that these certificates vouch
    for: those of the tests speak plain HTTP, or have certificates of their own.
    """
    end = "-----END CERTIFICATE-----\n"
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    file.write_text(Path(certifi.where()).read_text("ascii", "ignore").partition(end)[0] + end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(file))
        yield


@pytest.fixture(scope="session", autouse=True)
def steady_compile_workers() -> Iterator[None]:
    """Low priority for compile workers in place of idle priority, which gets no time while tests keep cores busy."""
    with pytest.MonkeyPatch.context() as patch:
        if workers := sys.modules.get("rootgraft.grammar.compile.worker_handle"):
            patch.setattr(workers, "_YIELD", workers._STEADY)
        yield


@pytest.fixture(scope="module", autouse=True)
def kept_compile_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines take the compile workers of engines before them; tests of grammars start their own."""
    if (
        "grammar" in request.path.relative_to(TESTS).parts
        or "rootgraft.grammar.compile.compile_service" not in sys.modules
    ):
        yield
    else:
        from support.engine.compile_workers import kept_workers

        with kept_workers():
            yield


@pytest.fixture(scope="session")
def llama_cpp_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of llama.cpp's vocabularies and of published chat templates, downloaded once."""
    return models_of_llama_cpp(tmp_path_factory.mktemp("llama_cpp"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The default model's GGUF file, downloaded into the user's cache at first use."""
    return resolve_model(None).path


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `support.models.lora_models.base` saves tiny bases, each once."""
    return tmp_path_factory.mktemp("bases")


@pytest.fixture(scope="session")
def adapted_llama(bases: Path) -> Path:
    """The folder of a tiny Llama (``llama/``) and of all adapters in `support.models.adapted_llama`."""
    from support.models.adapted_llama import save_adapted_llama

    return save_adapted_llama(bases)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama that runs on the native kernels."""
    from support.models.tiny_llama import save_tiny_llama

    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port on which nobody listens, and which nobody else is given meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def alarm(request: pytest.FixtureRequest) -> Iterator[Callable[[float], None]]:
    """Has KeyboardInterrupt raised after some seconds, by a real signal; see `support.engine.interrupts`."""
    with interrupts(request.path) as set_alarm:
        yield set_alarm


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The GPU's kernels take tensors on the CPU, interpreted, and what is undefined on a GPU is found.

    Where a GPU is asked for, it computes them, on copies.
    """
    from support.kernels import triton_interpreter

    from rootgraft.kernels.triton import launch

    if not USES_GPU:
        triton_interpreter.install()
    monkeypatch.setattr(launch, "DEVICE_TYPES", frozenset(("cuda", "cpu")))
    yield
    triton_interpreter.forget_allowed()
