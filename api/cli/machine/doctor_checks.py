"""Doctor checks: turn facts about the machine into findings, each with a reason and a command that helps."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ....engine.checkpoint.config_overrides import resolve_served_model
from ....engine.checkpoint.locate import cache_folder, hub_name
from ....engine.config import EngineConfig
from ....engine.errors import EngineError, NotDownloaded
from ....engine.machine.kernel_state import KernelState, kernel_state
from ....engine.machine.processor import Processor, processor
from ....engine.machine.resources import Cores, Memory, cores, kv_pool_bytes, memory, open_files
from ....engine.machine.software import (
    Driver,
    TorchProbe,
    driver,
    install_command,
    installed,
    probe_torch,
    requirement,
    system_name,
    unmet_requirements,
)
from ...config import ServerConfig
from ...http.listener import port_fault
from ...http.run_record import running_servers
from .text_table import bytes_text, path_text

if TYPE_CHECKING:
    from ....engine.model_tools.weight_plan import WeightPlan

Status = Literal["ok", "slow", "fault", "note"]
_LEAST_DISK = 2e9
_LEAST_KV = 64 << 20
_LEAST_FILES = 4096
_LEAST_DRIVER = 525  # number of the first driver that runs all of CUDA 12
_OPTIONAL = ("triton", "xgrammar")
"""Packages that may be missing: of torch for CUDA, and of the extra ``ebnf``."""
_CUDA_WHEELS = f"'{requirement('torch')}' --index-url https://download.pytorch.org/whl/cu126"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        section: heading under which the line is printed.
        name: name of the checked item.
        status: "ok"; "slow": a server runs, but slower; "fault": a server cannot start; "note": information.
        value: what was found.
        reason: consequence of the value; empty without a problem.
        command: command that fixes the problem; empty if there is none.
    """

    section: str
    name: str
    status: Status
    value: str
    reason: str = ""
    command: str = ""


def examine() -> list[Finding]:
    """Check this machine and return all findings, in the order of the report."""
    torch = probe_torch()
    available = cores()
    return [
        Finding("System", "system", "ok", f"{system_name()}, {platform.system()} {platform.release()}"),
        Finding("System", "Python", "ok", f"{platform.python_version()}, {sys.executable}"),
        *check_cpu(processor()),
        *check_cores(available, os.getloadavg()[0]),
        check_memory(memory()),
        *check_kernels(kernel_state()),
        check_torch(torch),
        *check_gpu(driver(), torch),
        check_packages(installed(), unmet_requirements()),
        check_port(ServerConfig()),
        check_open_files(open_files()),
        *check_caches(),
    ]


def check_named(config: EngineConfig) -> list[Finding]:
    """Return the findings of ``check_model``, and the published formats that load, even if the model is not downloaded.

    Raises:
        EngineError: the model is neither on this machine nor in the list of published models, or is not supported.
    """
    published = check_published(config.model or "")
    try:
        return published + check_model(config)
    except NotDownloaded as error:
        if not published:
            raise
        _, _, command = str(error).partition(" Try: ")
        return [*published, Finding("Published", "files", "note", "not on this machine", "", command)]


def check_model(config: EngineConfig) -> list[Finding]:
    """Find how a model's weights are stored, how much memory weights and KV need, and how they are computed.

    Raises:
        EngineError: the model is not on this machine, or is not supported.
    """
    from ....engine.model_tools.weight_plan import plan_weights

    files = resolve_served_model(config, on_machine=True)
    plan = plan_weights(config, files.path)
    kinds = ", ".join(kind if share == 1.0 else f"{share:.0%} {kind}" for kind, share in plan.stored)
    size, room = bytes_text(plan.memory_bytes), bytes_text(plan.room_bytes)
    is_small = plan.memory_bytes <= plan.room_bytes
    each = f" on each of {plan.ranks} ranks" if plan.ranks > 1 else ""
    return [
        Finding("Model", "model", "ok", f"{files.name}: {plan.shape}"),
        Finding("Model", "stored", "ok", f"{kinds}; {bytes_text(plan.stored_bytes)} in files"),
        Finding(
            "Model",
            "memory",
            "ok" if is_small else "fault",
            f"{size} for weights{each}, of {room} available to them",
            "" if is_small else "The weights do not fit. Free memory, or use a smaller quantisation of the model.",
        ),
        Finding(
            "Model",
            "KV",
            "ok" if plan.kv_tokens else "fault",
            f"{plan.kv_token_bytes:,} bytes per token{each}; the pool holds up to {plan.kv_tokens:,} tokens",
            "" if plan.kv_tokens else "No memory is left for KV.",
        ),
        Finding("Model", "computed", "ok", f"{plan.computed}; {plan.device}"),
        *([Finding("Model", "ranks", "ok", f"{plan.ranks}; {_collectives(plan)}")] if plan.ranks > 1 else []),
        Finding("Model", "adapters", "ok", "LoRA and DoRA on all linear modules, on top of these weights"),
    ]


def check_published(model: str) -> list[Finding]:
    """Find which formats of a published model can be loaded. Returns nothing for any other model."""
    from ....engine.checkpoint.published_models import form_answers, published_models

    repository = hub_name(model).partition(":")[0]
    config = published_models().get(repository)
    if config is None:
        return []
    return [
        Finding("Published", answer.form, "ok" if answer.loads else "note", answer.how or "no", answer.fault)
        for answer in form_answers(config)
    ]


def _collectives(plan: WeightPlan) -> str:
    parts = []
    if plan.stages > 1:
        parts.append("each has some of the layers and sends one vector per token to the next")
    if plan.sums:
        parts.append(f"per step, {plan.sums} all-reduces of hidden states and one gather of the logits")
    reads, least, most = plan.h200_milliseconds
    sums = f" and {least:.1f} to {most:.1f} ms for all-reduces over NVLink" if plan.sums else ""
    parts.append(
        f"on H200s a step of one token would take {reads:.1f} ms to read the weights{sums} (published figures, not "
        "measured here)"
    )
    return "; ".join(parts)


def check_cpu(found: Processor) -> Iterator[Finding]:
    """Check instruction sets, huge pages and clock rate."""
    sets = found.instruction_sets
    value = f"{found.name}: {', '.join(sets) or found.architecture}"
    if found.architecture in ("x86_64", "AMD64") and "AVX2" not in sets:
        reason = "No AVX2: kernels use slower 16-byte vectors. CPUs since 2013 have AVX2; a VM may hide it."
        yield Finding("Compute", "CPU", "slow", value, reason)
    else:
        yield Finding("Compute", "CPU", "ok", value)
    if found.huge_pages == "never":
        reason = "Without huge pages, access to the KV pool misses the TLB more often."
        command = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("Compute", "huge pages", "slow", "never", reason, command)
    if found.governor == "powersave":
        reason = "The CPU clock may stay low during short steps."
        command = "sudo cpupower frequency-set -g performance"
        yield Finding("Compute", "clock", "note", "governor powersave", reason, command)


def check_cores(found: Cores, load: float) -> Iterator[Finding]:
    """Check the cores within affinity and quota, and their use by other processes. ``load``: average of one minute."""
    parts = [f"{found.usable} usable of {found.machine}"]
    if found.affinity < found.machine:
        parts.append(f"affinity allows {found.affinity}")
    if found.quota is not None:
        parts.append(f"the cgroup allows {found.quota:g}")
    if found.compute_threads < found.usable:
        parts.append(f"an engine uses {found.compute_threads} threads, one per core of one socket")
    value = ", ".join(parts)
    if found.quota is not None and found.quota < 1:
        reason = "With less than one core, each step is throttled: give the container at least one (--cpus)."
        yield Finding("Compute", "cores", "slow", value, reason)
    else:
        yield Finding("Compute", "cores", "ok", value)
    if load > found.machine:
        reason = "Other processes overload the cores; streams will stutter."
        yield Finding("Compute", "load", "slow", f"{load:.1f} on {found.machine} cores", reason, "top -o %CPU")


def check_memory(found: Memory) -> Finding:
    """Check the memory, and how much of it the KV pool would get."""
    value = f"{_gib(found.available)} available of {_gib(found.total)}"
    value += f" (limited by the cgroup or ulimit -v; the machine has {_gib(found.machine)})" if found.is_limited else ""
    pool = kv_pool_bytes(found, EngineConfig().gpu_memory_utilization)
    if pool < _LEAST_KV:
        reason = f"A tenth is kept free, which leaves {_gib(max(pool, 0))} for KV even before any weights."
        return Finding("Compute", "memory", "fault", value, reason, "rootgraft serve --kv-cache-memory 0.25")
    return Finding("Compute", "memory", "ok", f"{value}; up to {_gib(pool)} for KV")


def check_kernels(found: KernelState) -> Iterator[Finding]:
    """Check the compiler, and which CPU kernels a server would use."""
    install = install_command("g++")
    if found.compiler:
        yield Finding("Kernels", "compiler", "ok", found.compiler)
    elif found.status == "fitting":
        yield Finding("Kernels", "compiler", "ok", "none, and none is needed: the package contains compiled kernels")
    else:
        yield Finding("Kernels", "compiler", "slow", "none", "Kernels cannot be compiled for this CPU.", install)
    where = f"in {path_text(found.cache)}"
    if found.status == "built":
        yield Finding("Kernels", "CPU kernels", "ok", f"{found.instruction_set}, compiled, {where}")
    elif found.status == "compiled at start":
        reason = "The first start compiles them; this takes about half a minute."
        yield Finding("Kernels", "CPU kernels", "note", f"not compiled yet {where}", reason)
    elif found.status == "fitting":
        yield Finding("Kernels", "CPU kernels", "ok", f"{found.instruction_set}, from the package")
    else:
        command = install if not found.compiler else "XDG_CACHE_HOME=/tmp/cache rootgraft serve"
        if found.status == "portable":
            reason = f"They do not use all instructions of this CPU, and others cannot be compiled: {found.fault}."
            yield Finding(
                "Kernels", "CPU kernels", "slow", f"{found.instruction_set}, from the package", reason, command
            )
        else:
            reason = f"Plain torch is used instead, many times slower: {found.fault}."
            yield Finding("Kernels", "CPU kernels", "slow", "none", reason, command)


def check_torch(found: TorchProbe) -> Finding:
    """Check torch, as imported by a separate process."""
    if found.fault:
        reason = f"No model can be loaded: {found.fault.rstrip('.')}."
        command = f"pip install --force-reinstall '{requirement('torch')}'"
        return Finding("Kernels", "torch", "fault", "cannot be imported", reason, command)
    built = f"built for CUDA {found.cuda}" if found.cuda else "built for CPUs"
    return Finding("Kernels", "torch", "ok", f"{found.version}, {built}")


def check_gpu(found: Driver | None, torch: TorchProbe) -> Iterator[Finding]:
    """Check the GPUs, and the reason if torch cannot use them."""
    if torch.devices:
        for name, size, capability in torch.devices:
            yield Finding("Kernels", "GPU", "ok", f"{name}, {_gib(size)}, compute capability {capability}")
        return
    if found is None:
        yield Finding("Kernels", "GPU", "ok", "none: --device auto is cpu")
        return
    gpus = ", ".join(found.gpus) or "a GPU that nvidia-smi does not name"
    if torch.fault:
        yield Finding(
            "Kernels", "GPU", "note", gpus, "torch cannot be imported, so it is unknown whether it can use the GPU."
        )
    elif found.fault:
        reason = f"The driver does not run, so the CPU is used: {found.fault.rstrip('.')}."
        yield Finding("Kernels", "GPU", "slow", gpus, reason, "sudo dmesg | grep -i nvrm")
    elif not torch.cuda:
        reason = "This torch is built for CPUs, so the GPU is not used."
        yield Finding("Kernels", "GPU", "slow", gpus, reason, f"pip install --force-reinstall {_CUDA_WHEELS}")
    else:
        told = f" ({torch.warnings[0]})" if torch.warnings else ""
        reason = (
            f"torch is built for CUDA {torch.cuda}, which driver {found.version} does not support{told}; the CPU is "
            "used."
        )
        is_old = int(found.version.partition(".")[0] or 0) < _LEAST_DRIVER
        command = install_command("nvidia-driver") if is_old else f"pip install --force-reinstall {_CUDA_WHEELS}"
        yield Finding("Kernels", "GPU", "slow", gpus, reason, command)


def check_packages(versions: dict[str, str], unmet: list[str]) -> Finding:
    """Check versions of packages, and whether packages are missing or have another version than required."""
    missing = [name for name, version in versions.items() if not version and name not in _OPTIONAL]
    wanted = unmet or missing
    if wanted:
        words = " ".join(f"'{each}'" for each in wanted)
        reason = "These packages are missing or have the wrong version; a server cannot start without them."
        return Finding("Kernels", "packages", "fault", ", ".join(wanted), reason, f"pip install {words}")
    shown = ("triton", "tokenizers", "llguidance", "xgrammar", "huggingface-hub", "fastapi", "uvicorn")
    return Finding(
        "Kernels", "packages", "ok", ", ".join(f"{each} {versions[each]}" for each in shown if versions[each])
    )


def check_port(options: ServerConfig) -> Finding:
    """Check whether the port is free."""
    fault, _, command = port_fault(options).partition(" Try: ")
    if fault:
        return Finding("Serving", f"port {options.port}", "note", "in use", fault, command)
    return Finding("Serving", f"port {options.port}", "ok", f"free on {options.host}")


def check_open_files(limits: tuple[int, int]) -> Finding:
    """Check the soft and the hard limit of open files."""
    soft, hard = limits
    value = f"{soft} (at most {hard})"
    if soft < _LEAST_FILES:
        reason = "Each connection uses one; at the limit, new clients are refused."
        return Finding("Serving", "open files", "note", value, reason, f"ulimit -n {min(hard, 65536)}")
    return Finding("Serving", "open files", "ok", value)


def check_caches() -> Iterator[Finding]:
    """Check the model caches, the disk that contains them, and the running servers."""
    try:
        from ....engine.adapter_sources.cached_adapters import adapter_cache_folder, cached_adapters
        from ....engine.checkpoint.model_cache import cached_models, hub_cache

        own, models = cache_folder(), cached_models()
        adapters = cached_adapters(adapter_cache_folder())
    except ImportError as error:
        yield Finding("Serving", "models", "note", "unknown", f"The caches cannot be read: {error}.")
        return
    except EngineError as error:
        yield Finding("Serving", "models", "fault", "no cache", str(error), "XDG_CACHE_HOME=/tmp/cache rootgraft serve")
        return
    size = sum(model.size for model in models)
    served = sum(not model.fault for model in models)
    where = f"{path_text(own)} and {path_text(hub_cache())}"
    value = f"{len(models)} ({bytes_text(size)}) in {where}; {served} can be served"
    yield (
        Finding("Serving", "models", "ok", value)
        if models
        else Finding("Serving", "models", "note", "none here", "The first start downloads one.", "rootgraft pull")
    )
    size = sum(adapter.size for adapter in adapters)
    value = f"{len(adapters)} ({bytes_text(size)}) in {path_text(adapter_cache_folder())}"
    yield Finding("Serving", "adapters", "ok", value if adapters else "none downloaded")
    folder = own
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        status: Status = "note" if models else "fault"
        value = f"{path_text(folder)} cannot be written"
        command = "XDG_CACHE_HOME=/tmp/cache rootgraft serve"
        yield Finding("Serving", "cache", status, value, "No model can be downloaded into it.", command)
    elif free < _LEAST_DISK:
        value = f"{bytes_text(free)} free below {path_text(folder)}"
        yield Finding("Serving", "disk", "note", value, "Most models are larger.", "rootgraft list")
    else:
        yield Finding("Serving", "disk", "ok", f"{bytes_text(free)} free below {path_text(folder)}")
    records = running_servers()
    told = ", ".join(f"{record.pid} at {record.url}" for record in records) or "none runs"
    yield Finding("Serving", "servers", "ok", told)


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
