"""Find the other servers on this machine (vLLM for CPUs, llama.cpp, OpenVINO GenAI), or say how to get them."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serve.alternate import Unavailable

PEERS = Path(__file__).with_name("peers")
_SECONDS = 120.0  # Time for a peer to print its version.


@dataclass(frozen=True, slots=True)
class Peer:
    """Another server.

    Attributes:
        path: of its program; None where it is not installed.
        version: as it tells it, None where it does not.
        missing: how to get it; None where it is installed.
    """

    name: str
    path: Path | None = None
    version: str | None = None
    missing: str | None = None

    @property
    def program(self) -> Path:
        """The program. Raises Unavailable where the peer is not installed."""
        if self.path is None:
            raise Unavailable(f"not installed: {self.missing}")
        return self.path


def find_vllm(given: str | None, folder: Path) -> Peer:
    """Find the command ``vllm``, of a build for CPUs.

    Args:
        given: path or name of the command; None for one on PATH, or where ``install_vllm.sh`` leaves it.
        folder: where the peers' install scripts put them.
    """
    path = _program(given, "vllm", folder / "vllm" / "bin" / "vllm")
    if path is None:
        return Peer("vLLM", missing=_advice("vLLM's CPU build", "install_vllm.sh", "--vllm", given))
    ask = "from importlib.metadata import version; print(version('vllm'))"
    version = _said([str(path.with_name("python")), "-P", "-c", ask])
    if version is not None and "cpu" not in version:
        return Peer("vLLM", missing=f"{path} is vLLM {version}, which is no build for CPUs")
    return Peer("vLLM", path, version)


def find_llama_server(given: str | None, folder: Path) -> Peer:
    """Find llama.cpp's ``llama-server``; see ``find_vllm``."""
    path = _program(given, "llama-server", folder / "llama.cpp" / "bin" / "llama-server")
    if path is None:
        return Peer("llama.cpp", missing=_advice("llama.cpp's server", "install_llama_cpp.sh", "--llama-server", given))
    said = _said([str(path), "--version"]) or ""
    version = re.search(r"version: (.+)", said)
    return Peer("llama.cpp", path, version[1].strip() if version else None)


def find_openvino(given: str | None, folder: Path) -> Peer:
    """Find a Python with OpenVINO GenAI and what its HTTP server needs; see ``find_vllm``."""
    path = _program(given, None, folder / "openvino" / "bin" / "python")
    if path is None:
        advice = _advice("OpenVINO GenAI", "install_openvino.sh", "--openvino-python", given)
        return Peer("OpenVINO GenAI", missing=advice)
    ask = "import openvino_genai, starlette, uvicorn, uvloop; print(openvino_genai.get_version())"
    version = _said([str(path), "-P", "-c", ask])
    if version is None:
        return Peer("OpenVINO GenAI", missing=f"{path} lacks openvino-genai, starlette, uvicorn or uvloop")
    return Peer("OpenVINO GenAI", path, version.strip())


def _program(given: str | None, name: str | None, installed: Path) -> Path | None:
    if given is not None:
        found = shutil.which(given)
    else:
        found = (shutil.which(name) if name else None) or shutil.which(installed)
    return Path(found).absolute() if found else None


def _advice(what: str, script: str, option: str, given: str | None) -> str:
    where = f"there is no program {given}" if given is not None else f"{what} was not found"
    return f"{where}: bash {(PEERS / script).relative_to(PEERS.parents[2])} installs it, {option} names one elsewhere"


def _said(command: list[str]) -> str | None:
    """Return what a program writes, None if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout + done.stderr).strip() if done.returncode == 0 else None
