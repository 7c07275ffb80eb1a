"""The CPU: its name and the instruction sets that matter for the kernels, from ``/proc/cpuinfo``."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Names for people, and the flags that they need; from the least to the most.
INSTRUCTION_SETS = {
    "AVX2": ("avx2", "fma", "f16c"),
    "AVX-512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "AVX-512 VNNI": ("avx512f", "avx512_vnni"),
    "AVX-512 BF16": ("avx512f", "avx512_bf16"),
    "AMX": ("amx_tile", "amx_int8", "amx_bf16"),
    "NEON": ("asimd",),
}


@dataclass(frozen=True, slots=True)
class Processor:
    """A CPU.

    Attributes:
        name: name of the model, as the system reports it.
        architecture: such as x86_64.
        flags: flags in ``/proc/cpuinfo``.
        huge_pages: the setting of transparent huge pages; empty where there is none.
        governor: governor of the clock; empty where the system does not report it.
    """

    name: str
    architecture: str
    flags: frozenset[str]
    huge_pages: str
    governor: str

    @property
    def instruction_sets(self) -> tuple[str, ...]:
        return tuple(name for name, needs in INSTRUCTION_SETS.items() if self.flags.issuperset(needs))


def processor(root: Path = Path("/")) -> Processor:
    """Return the CPU; ``root`` holds ``proc`` and ``sys``."""
    fields: dict[str, str] = {}
    with suppress(OSError):
        for line in (root / "proc/cpuinfo").read_text().splitlines():
            key, colon, value = line.partition(":")
            if colon:
                fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    setting = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return Processor(
        fields.get("model name") or platform.processor() or "unknown",
        platform.machine(),
        frozenset(flags.split()),
        setting.partition("[")[2].partition("]")[0],
        _text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
    )


def _text(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip()
    return ""
